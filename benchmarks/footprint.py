"""How many bytes does a token cost? By structure, on recorded outputs: the session's context and the memory of outputs.

    python benchmarks/footprint.py TRACES --tokenizer T [--record]

Opens one session per workload with its longest recorded context, and lets the outputs of all workloads join one memory.
Bytes are those of the arrays as they are allocated, room for growth included. Asserts that every array is counted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from machine import RECORDS, provenance

from redraft.index_builders.tokenizers import load_tokenizer
from redraft.replay.report import table
from redraft.replay.traces import RememberedTokenizer, load_workload, trace_files
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.drafter import Drafter
from redraft.retrieval.memory import Memory
from redraft.retrieval.prefix_trie import PrefixTrie

PARTS = {
    "text": ("text", "block_next", "block_previous"),
    "contexts": ("nodes",),
    "successors": ("successors",),
    "hash": ("slots",),
}


def by_part(trie: PrefixTrie, tokens: int) -> dict[str, float]:
    """Bytes per token of each part of a trie, and of all."""
    parts = {name: sum(getattr(trie, field).nbytes for field in fields) / tokens for name, fields in PARTS.items()}
    total = sum(array.nbytes for array in trie) / tokens
    assert abs(total - sum(parts.values()) - trie.header.nbytes / tokens) < 1e-6, "an array is not counted"
    return parts | {"all": total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, metavar="TRACES")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json, transformers folder or name, or GGUF file")
    parser.add_argument("--record", action="store_true", help=f"write {RECORDS.name}/footprint-DATE.json")
    args = parser.parse_args()
    tokenizer = RememberedTokenizer(args.tokenizer, load_tokenizer)
    drafter = Drafter(DraftConfig())
    memory = Memory(10_000_000)
    rows: dict[str, dict[str, float]] = {}
    for file in trace_files(args.traces):
        items = list(load_workload(file, tokenizer).items(60_000))
        longest = max(items, key=lambda item: len(item.context))
        with drafter.open(longest.context) as session:
            rows[f"session {file.name.partition('.')[0]} ({len(longest.context)})"] = by_part(
                session._trie, max(len(longest.context), 1)
            )
        for number, item in enumerate(items):
            memory.append(hash((file.name, number)), item.output)
    rows[f"memory of all outputs ({memory.n_tokens})"] = by_part(memory.trie, memory.n_tokens)
    header = ("structure (tokens)", *PARTS, "all")
    print(table(header, [[name, *(f"{row[part]:.1f}" for part in header[1:])] for name, row in rows.items()]))
    if args.record:
        record = provenance() | {"bytes_per_token": rows}
        (RECORDS / f"footprint-{record['date']}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
