"""Indexes: built once from a corpus, or from the model itself, and read by any number of servers."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from redraft.commands import index_reports
from redraft.index_builders.build import BuildOptions, BuildSummary, build_index
from redraft.index_builders.merge import merge_indexes
from redraft.index_builders.progress import Progress, readable_bytes
from redraft.index_builders.ray_shards import build_index_on_ray
from redraft.index_builders.readers.documents import ReadOptions
from redraft.index_builders.structures import KINDS, check_output
from redraft.index_builders.tokenizers import Tokenizer
from redraft.retrieval.index_directory import open_index

__all__ = ["configure", "run"]

_BUILD_HELP = """\
Build an index from text, chats or token ids.

SOURCE is a file, a folder, a pattern such as 'docs/**/*.md', or - for standard input:
  folders                 text and source files in them, also .jsonl and .parquet; hidden folders are left out
  .jsonl .json .parquet   records with text or content (or --text-key), chats with messages or conversations
  a save_to_disk folder   the same, from the datasets library
  .npy, Megatron .bin     token ids, made with the same tokenizer
  any other file          one document of UTF-8 text
.gz and .zst are unpacked. Exact copies of a document are dropped.
"""

_BUILD_EXAMPLES = """\
examples:
  redraft index build ~/src/project notes.md --tokenizer ./tokenizer.json -o project.index
  redraft index build chats.jsonl.gz --tokenizer Qwen/Qwen3-8B -o chats.index
  redraft index build wiki/*.parquet --tokenizer model.gguf --max-tokens 50M -o wiki.index

An interrupted build resumes when the same command is given again.
"""

_SUCCESSORS_HELP = """\
Build the target model's own successor table: the likeliest next tokens after each token of its vocabulary.

The model is run once over its vocabulary; no text is read. Drafting uses the table where nothing better is known yet,
above all at the beginning of a text.
"""

_SUCCESSORS_EXAMPLES = """\
examples:
  redraft index build-successors --model ./model -o model.successors
  redraft serve --successors model.successors
"""

_DENSE_HELP = """\
Build a dense index of a corpus index: the target model is run over its documents, and its hidden states become keys by
which drafting finds places where the model was in a similar state.

Best over recorded answers of the model itself: build them into a corpus index first, with --chat-template.
"""

_DENSE_EXAMPLES = """\
examples:
  redraft index build answers.jsonl --chat-template --tokenizer ./model -o answers.index
  redraft index build-dense answers.index --model ./model
  redraft generate "..." --model ./model --index answers.index --dense answers.index.dense

An interrupted build resumes when the same command is given again.
"""

_MERGE_EXAMPLES = """\
examples:
  redraft index merge part1.index part2.index part3.index -o whole.index
  redraft index merge shards/ -o whole.index

Shards given in their order become the same index that a build in one go makes.
"""

_STATS_EXAMPLES = """\
examples:
  redraft index stats my.index
  redraft index stats shards/ more.index
  redraft index stats my.index --on held_out.jsonl --tokenizer tokenizer.json
  redraft index stats my.index --traces traces/maths.jsonl.gz --tokenizer tokenizer.json

Without --on, documents of the indexes are measured against all their other documents.
"""

_INDEXES = "an index, or a directory of indexes (the shards of one build, say)"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `redraft index`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, summary: str, run_action, **details) -> argparse.ArgumentParser:
        details.setdefault("description", summary)
        action = actions.add_parser(name, help=summary, formatter_class=parser.formatter_class, **details)
        action.set_defaults(run_action=run_action, usage_error=action.error)
        return action

    build = add("build", "build an index from a corpus", _build, description=_BUILD_HELP, epilog=_BUILD_EXAMPLES)
    build.add_argument("sources", nargs="+", metavar="SOURCE", help="where the text is")
    build.add_argument(
        "--tokenizer",
        required=True,
        metavar="T",
        help="the target model's: a tokenizer.json, a transformers folder or hub name, or a .gguf file",
    )
    build.add_argument("-o", "--output", required=True, metavar="DIR", help="the index directory to make")
    build.add_argument("--force", action="store_true", help="replace an index that exists")
    build.add_argument("--max-tokens", type=_count, metavar="N", help="stop after N tokens (20M is 20 million)")
    build.add_argument("--text-key", metavar="KEY", help="key or column with the text (otherwise the usual names)")
    build.add_argument(
        "--roles",
        default="assistant",
        metavar="ROLE,...",
        help="whose turns of a chat to index; each turn is a document",
    )
    build.add_argument(
        "--chat-template",
        action="store_true",
        help="index whole chats, written out with the tokenizer's chat template, instead of single turns",
    )
    build.add_argument(
        "--max-bad-records",
        type=_count,
        default=0,
        metavar="N",
        help="drop up to N records that are malformed or have no text",
    )
    build.add_argument(
        "--exclude", action="append", default=[], metavar="GLOB", help="names to leave out of folders (repeatable)"
    )
    build.add_argument("--stdin-format", choices=("jsonl", "text"), default="jsonl", help="what - reads")
    build.add_argument("--shard", type=_shard, default="1/1", metavar="I/N", help="build part I of N only")
    build.add_argument(
        "--memory-limit",
        type=_count,
        metavar="BYTES",
        help="how much memory building may take (8G, say); a corpus that needs more is refused early",
    )
    build.add_argument("--kind", choices=KINDS, help="structure to build (otherwise chosen by size and memory)")
    build.add_argument(
        "--ray", metavar="ADDRESS", help="tokenize on this Ray cluster (auto: the one that runs here, local: a new one)"
    )
    build.add_argument("--ray-tasks", type=_count, metavar="N", help="into how many tasks (otherwise one per CPU)")
    build.add_argument("--quiet", action="store_true", help="no progress and no summary")

    successors = add(
        "build-successors",
        "build a model's own successor table",
        _build_successors,
        description=_SUCCESSORS_HELP,
        epilog=_SUCCESSORS_EXAMPLES,
    )
    _add_model(successors)
    successors.add_argument("-o", "--output", required=True, metavar="DIR", help="the table's directory to make")
    successors.add_argument("--force", action="store_true", help="replace a table that exists")
    successors.add_argument("--batch", type=_count, default=256, metavar="N", help="tokens run at a time")

    dense = add(
        "build-dense",
        "build a dense index of a corpus index",
        _build_dense,
        description=_DENSE_HELP,
        epilog=_DENSE_EXAMPLES,
    )
    dense.add_argument("index", metavar="DIR", help="the corpus index")
    _add_model(dense)
    dense.add_argument("-o", "--output", metavar="DIR", help="the dense index to make (otherwise DIR.dense)")
    dense.add_argument("--force", action="store_true", help="replace an index that exists")
    dense.add_argument("--max-tokens", type=_count, metavar="N", help="run over N tokens only, spread evenly")
    dense.add_argument(
        "--layer", type=int, default=-1, metavar="N", help="whose states: -1 behind the final norm, -2 one block before"
    )
    dense.add_argument("--dim", type=_count, default=64, metavar="N", help="numbers in a key")
    dense.add_argument("--factory", metavar="TEXT", help="FAISS factory string (otherwise chosen by size)")
    dense.add_argument("--window", type=_count, default=1024, metavar="N", help="tokens the model sees at once")
    dense.add_argument("--batch", type=_count, default=4096, metavar="N", help="tokens in one forward")

    inspect = add("inspect", "say what indexes hold", index_reports.inspect)
    inspect.add_argument("indexes", nargs="+", metavar="DIR", help=_INDEXES)
    inspect.add_argument("--json", action="store_true", help="print manifests as JSON")

    merge = add("merge", "make one index of several", _merge, epilog=_MERGE_EXAMPLES)
    merge.add_argument("indexes", nargs="+", metavar="DIR", help=f"{_INDEXES}; made with one tokenizer")
    merge.add_argument("-o", "--output", required=True, metavar="DIR", help="the index directory to make")
    merge.add_argument("--force", action="store_true", help="replace an index that exists")
    merge.add_argument("--kind", choices=KINDS, help="structure to build (otherwise chosen by size and memory)")
    merge.add_argument("--memory-limit", type=_count, metavar="BYTES", help="refuse where merging would take more")

    stats = add("stats", "say how often indexes will find something", index_reports.stats, epilog=_STATS_EXAMPLES)
    stats.add_argument("indexes", nargs="+", metavar="DIR", help=_INDEXES)
    stats.add_argument(
        "--on", nargs="+", default=[], metavar="SOURCE", help="measure on this text instead of documents of the indexes"
    )
    stats.add_argument(
        "--traces", metavar="PATH", help="recorded outputs (as for `redraft replay`): say what the indexes add there"
    )
    stats.add_argument("--tokenizer", metavar="T", help="what the indexes were built with; needed for --on and --traces")
    stats.add_argument("--sample", type=_count, default="200k", metavar="N", help="how many tokens to measure on")
    stats.add_argument("--json", action="store_true", help="print the figures as JSON")

    verify = add("verify", "read all of each index and check it against its digests", index_reports.verify)
    verify.add_argument("indexes", nargs="+", metavar="DIR", help=_INDEXES)


def _add_model(parser: argparse.ArgumentParser) -> None:
    """The model that an index is made by."""
    parser.add_argument(
        "--model", required=True, metavar="MODEL", help="a transformers folder, a .gguf file, or a name on the hub"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the model, the same that it will decode in; auto is bfloat16 on CUDA, else float32",
    )


def run(args: argparse.Namespace) -> int:
    return args.run_action(args)


def _build(args: argparse.Namespace) -> int:
    progress = Progress(quiet=args.quiet)
    options = BuildOptions(
        read=ReadOptions(
            text_key=args.text_key,
            roles=tuple(args.roles.split(",")),
            max_bad_records=args.max_bad_records,
            exclude=tuple(args.exclude),
            stdin_format=args.stdin_format,
        ),
        max_tokens=args.max_tokens,
        chat_template=args.chat_template,
        shard=args.shard,
        force=args.force,
        kind=args.kind,
        memory_limit=args.memory_limit,
    )
    if args.ray is None:
        if args.ray_tasks is not None:
            args.usage_error("--ray-tasks needs --ray")
        summary = build_index(args.sources, args.tokenizer, args.output, options, progress)
    else:
        for flag, given in (
            ("-", "-" in args.sources),
            ("--max-tokens", args.max_tokens),
            ("--shard", args.shard != (1, 1)),
        ):
            if given:
                args.usage_error(f"{flag} cannot be had together with --ray")
        summary = build_index_on_ray(
            args.sources, args.tokenizer, args.output, args.ray, args.ray_tasks, options, progress
        )
    if not args.quiet:
        print(_build_report(args.output, summary), file=sys.stderr)
    return 0


def _build_report(output: str, summary: BuildSummary) -> str:
    dropped = {
        "exact duplicates": summary.duplicates,
        "bad records": summary.bad_records,
        "files that are not text": summary.skipped_files,
        "empty texts": summary.empty,
    }
    left_out = ", ".join(f"{count:,} {name}" for name, count in dropped.items() if count)
    size = summary.index_bytes
    resumed = f" ({summary.resumed_tokens:,} from an interrupted build)" if summary.resumed_tokens else ""
    return "\n".join(
        [
            f"{output}: {summary.documents:,} documents, {summary.tokens:,} tokens{resumed}",
            f"  {readable_bytes(size)}, {size / summary.tokens:.1f} bytes per token",
            f"  left out: {left_out or 'nothing'}",
            "  seconds: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in summary.seconds.items()),
        ]
    )


def _build_successors(args: argparse.Namespace) -> int:
    from redraft.decoding.loading import load_model
    from redraft.index_builders.successors import build_successors

    check_output(Path(args.output), args.force)
    progress = Progress()
    model, tokenizer = load_model(args.model, dtype=args.dtype)
    made = build_successors(
        model,
        tokenizer,
        args.output,
        name=_model_name(args.model),
        width=args.batch,
        force=args.force,
        progress=progress,
    )
    print(f"{args.output}: {made['rows']:,} rows, {progress.seconds['vocabulary']:.0f} s", file=sys.stderr)
    return 0


def _build_dense(args: argparse.Namespace) -> int:
    from redraft.decoding.loading import load_model
    from redraft.index_builders.dense import DenseOptions, build_dense

    output = args.output or args.index.rstrip("/") + ".dense"
    check_output(Path(output), args.force)
    options = DenseOptions(
        layer=args.layer,
        dimension=args.dim,
        factory=args.factory,
        max_tokens=args.max_tokens,
        window=args.window,
        batch=args.batch,
    )
    progress = Progress()
    model, tokenizer = load_model(args.model, dtype=args.dtype)
    with open_index(args.index, tokenizer_fingerprint=Tokenizer.from_transformers(tokenizer).fingerprint) as corpus:
        made = build_dense(
            corpus, model, output, name=_model_name(args.model), options=options, force=args.force, progress=progress
        )
    print(
        f"{output}: {made['vectors']:,} keys in {made['factory']}, {made['variance_kept']:.0%} of the variance kept,"
        f" {progress.seconds['states']:.0f} s of the model",
        file=sys.stderr,
    )
    return 0


def _model_name(spec: str) -> str:
    """How a model was named, without the folders that it lies in here."""
    return Path(spec).expanduser().name if Path(spec).expanduser().exists() else spec


def _merge(args: argparse.Namespace) -> int:
    progress = Progress()
    merged = merge_indexes(
        args.indexes,
        args.output,
        force=args.force,
        kind=args.kind,
        memory_limit=args.memory_limit,
        progress=progress,
    )
    print(
        f"{args.output}: {merged['documents']:,} documents, {merged['tokens']:,} tokens,"
        f" {merged['duplicates']:,} exact duplicates left out",
        file=sys.stderr,
    )
    return 0


def _count(text: str) -> int:
    """A whole number, with K, M or G for thousands, millions and thousands of millions."""
    match = re.fullmatch(r"(\d+)([kKmMgG]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"wanted a whole number such as 500, 20M or 1G, got {text!r}")
    return int(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[match[2].lower()]


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"wanted I/N with 1 <= I <= N, such as 2/8, got {text!r}")
    return int(match[1]), int(match[2])
