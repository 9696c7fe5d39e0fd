"""Let a model write, with drafting.

The text goes to standard output as it is written, the figures to standard error at the end. The text is the same with
and without drafting; --plain shows the difference in time.

With --server the drafts come from a running `redraft serve`, else from a drafter in this process, which may read
indexes. Sampling begins with --temperature; without it the text is greedy.
"""

from __future__ import annotations

import argparse
import sys
import time

# one colour of the terminal's 256 for each source, in the order of `Source.NAMES`
COLOURS = (39, 141, 208, 45, 78, 107, 109, 213, 220, 203, 172)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="what to continue, or `-` for standard input")
    parser.add_argument(
        "--model", required=True, metavar="MODEL", help="a transformers folder, a .gguf file, or a name on the hub"
    )
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument(
        "--index",
        action="append",
        default=[],
        metavar="DIR",
        help="draft from this index too; may be given several times",
    )
    parser.add_argument(
        "--successors", metavar="DIR", help="draft from this table of `redraft index build-successors` too"
    )
    parser.add_argument("--dense", metavar="DIR", help="draft from this dense index of `redraft index build-dense` too")
    drafts.add_argument("--server", metavar="ADDRESS", help="draft server to ask: unix:PATH or HOST:PORT")
    drafts.add_argument("--plain", action="store_true", help="no drafting")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="length of the text at most")
    parser.add_argument("--max-nodes", type=int, metavar="N", help="verify at most so many drafted tokens a step")
    parser.add_argument("--temperature", type=float, metavar="T", help="sample, at this temperature")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens only")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the most likely tokens that make up P")
    parser.add_argument("--seed", type=int, metavar="N", help="makes a sampled text repeatable")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="of the model"
    )
    parser.add_argument("--show-drafts", action="store_true", help="colour drafted tokens by the source they came from")
    parser.add_argument(
        "--show-sources",
        action="store_true",
        help="number the spans that stand in a corpus, and name their documents and offsets below the text",
    )
    parser.add_argument(
        "--acceptance",
        choices=("lossless", "nest"),
        default="lossless",
        help="nest mixes the dense index's text into the model's own choice: LOSSY, grounded in documents",
    )
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Write the text, then the figures."""
    from redraft.decoding.generate import generate
    from redraft.decoding.loading import load_model
    from redraft.decoding.text_stream import TextStream

    if args.temperature is None and (args.top_k is not None or args.top_p is not None or args.seed is not None):
        args.usage_error("--top-k, --top-p and --seed are for sampling: give --temperature too")
    for name in ("successors", "dense"):
        if getattr(args, name) and (args.server or args.plain):
            args.usage_error(f"--{name} is for drafting in this process, not for --server or --plain")
    if args.acceptance == "nest" and not args.dense:
        args.usage_error("--acceptance nest needs --dense")
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    model, tokenizer = load_model(args.model, dtype=args.dtype)
    ids = _token_ids(tokenizer, prompt, args.chat)
    text = TextStream(tokenizer, ids[0].tolist())

    def show(step) -> None:
        for token, source in zip(step.tokens, step.sources):
            piece = text.push(token)
            sys.stdout.write(_coloured(piece, source) if args.show_drafts else piece)
        sys.stdout.flush()

    drafter = None if args.plain else _drafter(args, model, tokenizer)
    sampling = {}
    if args.temperature is not None:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
        sampling["seed"] = args.seed
    try:
        start = time.perf_counter()
        result = generate(
            model,
            ids,
            drafter,
            max_new_tokens=args.max_new_tokens,
            max_nodes=args.max_nodes,
            on_step=show,
            provenance=args.show_sources,
            acceptance=args.acceptance,
            **sampling,
        )
        seconds = time.perf_counter() - start
    finally:
        if drafter is not None:
            drafter.close()
    print(flush=True)
    if args.show_sources:
        written = result.sequences[0, ids.shape[1] :].tolist()
        print("\n" + _marked_spans(tokenizer, written, result.stats.spans), flush=True)
    _report(result, seconds, legend=args.show_drafts)
    return 0


def _token_ids(tokenizer, prompt: str, chat: bool):
    """int64[1, n]. Raises ValueError for a prompt without tokens."""
    if chat:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    if encoded["input_ids"].shape[1] == 0:
        raise ValueError("the prompt is empty; wanted at least one token")
    return encoded["input_ids"].long()


def _drafter(args: argparse.Namespace, model, tokenizer):
    """Where drafts come from: the server, or a drafter in this process with the indexes."""
    from redraft.index_builders.tokenizers import Tokenizer
    from redraft.retrieval.config import DraftConfig

    vocab_size = int(model.get_output_embeddings().weight.shape[0])
    if args.server or args.index or args.successors or args.dense:
        fingerprint = Tokenizer.from_transformers(tokenizer).fingerprint
        config = DraftConfig(vocab_size=vocab_size, tokenizer_fingerprint=fingerprint)
    else:
        config = DraftConfig(vocab_size=vocab_size)
    if args.server:
        from redraft.client.draft_client import DraftClient

        return DraftClient(args.server, config, require=True)
    from redraft.retrieval.drafter import Drafter

    return Drafter(config, indexes=args.index, successors=args.successors, dense=args.dense)


def _marked_spans(tokenizer, tokens: list[int], spans) -> str:
    """The text with its spans in brackets and numbered, and below it where each stands."""
    pieces, at = [], 0
    for number, span in enumerate(spans, 1):
        pieces.append(tokenizer.decode(tokens[at : span.begin]))
        pieces.append(f"[{tokenizer.decode(tokens[span.begin : span.end])}]{number}")
        at = span.end
    pieces.append(tokenizer.decode(tokens[at:]))
    places = [
        f"{number}: {span.place.index}, document {span.place.document}, offset {span.place.offset},"
        f" {span.end - span.begin} tokens"
        for number, span in enumerate(spans, 1)
    ]
    return "\n".join(["".join(pieces), "", *(places or ["no accepted token stands in a corpus"])])


def _coloured(piece: str, source: int) -> str:
    """`piece` in its source's colour; what the target added itself stays as it is."""
    return f"\033[38;5;{COLOURS[source % len(COLOURS)]}m{piece}\033[0m" if source >= 0 and piece else piece


def _report(result, seconds: float, *, legend: bool) -> None:
    """The figures, on standard error."""
    from redraft.retrieval.draft_tree import Source

    stats = result.stats
    rate = f"{stats.new_tokens} tokens in {seconds:.2f} s ({stats.new_tokens / seconds:.1f} a second)"
    lines = [f"{rate}, {stats.steps} steps, {stats.tokens_per_step:.2f} tokens per step"]
    if stats.drafted:
        by_source = ", ".join(f"{name} {count}" for name, count in stats.accepted_by_source.most_common())
        lines.append(f"accepted {stats.accepted} of {stats.drafted} drafted: {by_source or 'none'}")
    total = sum(stats.seconds.values()) or 1.0
    lines.append("time: " + ", ".join(f"{phase} {part / total:.0%}" for phase, part in stats.seconds.items() if part))
    if result.seed is not None:
        lines.append(f"seed {result.seed}")
    if stats.failures:
        lines.append("drafting failed: " + ", ".join(f"{reason} {n}x" for reason, n in stats.failures.items()))
    if legend:
        used = {source for row in result.sources for source in row if source >= 0}
        lines.append("colours: " + " ".join(_coloured(Source.NAMES[source], source) for source in sorted(used)))
    print("\n".join(lines), file=sys.stderr)
