"""The demonstration behind `make demo`: a corpus becomes an index, a server drafts, a real model writes.

    python benchmarks/demo.py MODEL_FOLDER

1. the target model is opened;
2. `redraft index build` over the Python standard library's source (a part of it, so that it takes seconds);
3. `redraft serve` with that index on a Unix socket, in a process of its own;
4. six prompts of different kinds, each answered plainly and with drafts from the server; drafted tokens are coloured by
   the source they came from;
5. one table: tokens per step, speed ratio, accepted tokens by source, and whether both texts are identical.

The model runs in float32, where the two texts must be the same token for token. Exit code 1 where they are not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from redraft.client.draft_client import DraftClient
from redraft.commands.generate import COLOURS
from redraft.decoding.generate import generate
from redraft.decoding.loading import load_model
from redraft.decoding.text_stream import TextStream
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import Source

ARTICLE = """The lighthouse at Cape Ardal was built in 1874 after three ships were lost on the reef in a single winter. \
Its lamp burned rape-seed oil at first, then paraffin, and was given electric light in 1931. Four keepers and their \
families lived on the rock and were supplied by boat every two weeks, weather permitting; in the winter of 1901 no \
boat could land for seven weeks. The keepers kept a log in which they wrote down the weather, passing ships and, from \
1905, the birds that struck the lantern at night. These bird records, which cover 62 years, are now used by \
scientists who study how migration has changed with the climate. The light was made automatic in 1967 and the last \
keeper left. In 2009 the buildings were bought by a trust, which has restored them and opens them to visitors from \
May to September. The old lamp can be seen in the museum in the village."""

CODE = """def load_settings(path):
    settings = {}
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            key, value = line.split("=", 1)
            settings[key.strip()] = value.strip()
    return settings"""

PROMPTS = {
    "chat": "What are three good habits for someone who starts a new job? Explain each in one or two sentences.",
    "code": "Write a Python class `Stack` with the methods push, pop, peek and is_empty, and a short example of its use.",
    "summary": f"Summarize the following text in three sentences.\n\n{ARTICLE}",
    "code edit": "Rename the variable `settings` to `options` in this function and write the whole function again."
    f"\n\n```python\n{CODE}\n```",
    "maths": "A train leaves at 9:00 and travels at 80 km/h. A second train leaves the same station at 10:00 and travels at"
    " 120 km/h on the same track. When does the second train reach the first? Solve it step by step.",
    "translation": "Translate into French: The museum is open every day from nine to five. Children under twelve pay nothing."
    " Please leave your bags at the entrance.",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a transformers folder, a .gguf file, or a name on the hub")
    parser.add_argument("--new-tokens", type=int, default=96, metavar="N", help="length of each answer at most")
    parser.add_argument("--index-tokens", default="1M", metavar="N", help="how much of the standard library to index")
    args = parser.parse_args()
    heading("1. Open the target model")
    with waiting("reading the model and its tokenizer"):
        model, tokenizer = load_model(args.model, dtype="float32")
    with tempfile.TemporaryDirectory(prefix="redraft-demo-") as folder:
        heading("2. Build an index from the Python standard library's source")
        index = Path(folder) / "stdlib.index"
        tokenizer_file = Path(folder) / "tokenizer.json"
        tokenizer.backend_tokenizer.save(str(tokenizer_file))
        build_index(index, tokenizer_file, args.index_tokens)
        heading("3. Start the draft server")
        address = f"unix:{folder}/redraft.sock"
        server = start_server(index, address)
        try:
            heading("4. Let the model answer, plainly and with drafts")
            config = DraftConfig(vocab_size=int(model.get_output_embeddings().weight.shape[0]))
            with DraftClient(address, config, require=True, timeout=0.05) as client:
                rows = [answer(model, tokenizer, client, *prompt, args.new_tokens) for prompt in PROMPTS.items()]
        finally:
            server.terminate()
            code = server.wait(timeout=30)
    print_table(rows)
    print(f"\nThe server was stopped and ended with exit code {code}.")
    return 0 if all(row["identical"] for row in rows) else 1


def heading(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m", flush=True)


class waiting:
    """A bar without an end, for work that cannot say how far it is."""

    def __init__(self, what: str) -> None:
        self._bar = tqdm(desc=what, bar_format="{desc}: {elapsed}", leave=True)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._turn, daemon=True)

    def _turn(self) -> None:
        while not self._done.wait(0.5):
            self._bar.refresh()

    def __enter__(self) -> waiting:
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._done.set()
        self._thread.join()
        self._bar.close()


def build_index(index: Path, tokenizer: Path, tokens: str) -> None:
    command = [
        sys.executable,
        "-m",
        "redraft",
        "index",
        "build",
        sysconfig.get_path("stdlib"),
        "--tokenizer",
        tokenizer,
    ]
    options = ["--exclude", "site-packages", "--exclude", "test", "--max-tokens", tokens, "-o", index]
    if subprocess.run([*command, *options], check=False).returncode:
        raise SystemExit("the index was not built")


def start_server(index: Path, address: str) -> subprocess.Popen:
    """Start `redraft serve` and return when it is ready: indexes open, kernels compiled."""
    command = [sys.executable, "-m", "redraft", "serve", "--index", str(index), "--listen", address]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with waiting("compiling kernels and opening the index"):
        line = server.stdout.readline()
    if "ready" not in line:
        raise SystemExit(f"the server did not start:\n{line}{server.stderr.read()}")
    threading.Thread(target=server.stderr.read, daemon=True).start()  # its log must not fill the pipe
    print(line.strip())
    return server


def answer(model, tokenizer, client: DraftClient, task: str, prompt: str, new_tokens: int) -> dict:
    """Answer one prompt in both ways; a row of the table."""
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = ids["input_ids"]
    print(f"\n\033[1m{task}\033[0m: {prompt.splitlines()[0][:110]}", flush=True)
    with tqdm(total=new_tokens, desc="plainly", unit="token", leave=False) as bar:
        plain = timed(model, ids, None, new_tokens, lambda step: bar.update(len(step.tokens)))
    text = TextStream(tokenizer, ids[0].tolist())

    def show(step) -> None:
        for token, source in zip(step.tokens, step.sources):
            piece = text.push(token)
            colour = f"\033[38;5;{COLOURS[source % len(COLOURS)]}m" if source >= 0 else ""
            sys.stdout.write(f"{colour}{piece}\033[0m" if piece else "")
        sys.stdout.flush()

    drafted = timed(model, ids, client, new_tokens, show)
    stats = drafted["result"].stats
    ratio = plain["seconds"] / drafted["seconds"]
    print(f"\n\033[2m{stats.new_tokens} tokens, {stats.tokens_per_step:.2f} per step, {ratio:.2f}x the speed\033[0m")
    return {
        "task": task,
        "plain": plain["seconds"],
        "drafted": drafted["seconds"],
        "stats": stats,
        "identical": plain["result"].sequences.tolist() == drafted["result"].sequences.tolist(),
    }


def timed(model, ids, drafter, new_tokens: int, on_step) -> dict:
    start = time.perf_counter()
    result = generate(model, ids, drafter, max_new_tokens=new_tokens, on_step=on_step)
    return {"result": result, "seconds": time.perf_counter() - start}


def print_table(rows: list[dict]) -> None:
    accepted = sum((Counter(row["stats"].accepted_by_source) for row in rows), Counter())
    sources = [name for name in Source.NAMES if accepted[name]]
    heading("Result")
    columns = ["", "tokens", "per step", "speed", *sources, "identical"]
    table = []
    for row in rows:
        stats = row["stats"]
        by_source = [str(stats.accepted_by_source[name]) for name in sources]
        same = "yes" if row["identical"] else "NO"
        speed = f"{row['plain'] / row['drafted']:.2f}x"
        table.append([row["task"], str(stats.new_tokens), f"{stats.tokens_per_step:.2f}", speed, *by_source, same])
    steps = sum(row["stats"].steps for row in rows)
    stepped = sum(row["stats"].new_tokens - row["stats"].first_tokens for row in rows)
    speed = sum(row["plain"] for row in rows) / sum(row["drafted"] for row in rows)
    tokens = sum(row["stats"].new_tokens for row in rows)
    same = "yes" if all(row["identical"] for row in rows) else "NO"
    totals = [str(accepted[name]) for name in sources]
    table.append(["all", str(tokens), f"{stepped / max(steps, 1):.2f}", f"{speed:.2f}x", *totals, same])
    widths = [max(len(line[i]) for line in [columns, *table]) for i in range(len(columns))]
    for line in [columns, *table]:
        print(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths))
            )
        )
    print(f"\nAccepted tokens are counted under the source that drafted them ({', '.join(sources)}); speed is that of")
    print("drafted against plain decoding, prompt included.")


if __name__ == "__main__":
    sys.exit(main())
