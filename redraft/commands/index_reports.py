"""What `redraft index` says of indexes that exist: `inspect`, `verify` and `stats`, of one index or of several.

A directory of indexes counts as all that are in it. Of one index everything is said; of several a summary, and a line
for each.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from redraft.index_builders.merge import common_tokenizer
from redraft.index_builders.progress import Progress, readable_bytes
from redraft.index_builders.readers.documents import ReadOptions, Tally
from redraft.index_builders.readers.reading import read_documents
from redraft.index_builders.readers.sources import list_files
from redraft.index_builders.stats import MATCH_LENGTHS, held_out_matches, matches_of_texts
from redraft.index_builders.tokenizers import load_tokenizer
from redraft.replay.contenders import Redraft
from redraft.replay.run import Plan, replay_files
from redraft.replay.traces import RememberedTokenizer, trace_files
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.dense_index import open_dense
from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.index_directory import index_folders, open_index
from redraft.retrieval.index_files import read_manifest
from redraft.retrieval.index_format import CORPUS_KINDS, DENSE, SUCCESSORS
from redraft.retrieval.index_verification import verify_index
from redraft.retrieval.successor_table import open_successors
from redraft.retrieval.tokens import as_tokens

__all__ = ["inspect", "stats", "verify"]


# --- inspect and verify -----------------------------------------------------------------------------------------------


def inspect(args: argparse.Namespace) -> int:
    manifests = {folder: _opened_manifest(folder) for folder in index_folders(*args.indexes)}
    if len(manifests) == 1:
        ((folder, manifest),) = manifests.items()
        print(json.dumps(manifest, indent=2, ensure_ascii=False) if args.json else _description(folder, manifest))
    elif args.json:
        parts = [{"path": str(folder), **manifest} for folder, manifest in manifests.items()]
        print(json.dumps({**_totals(list(manifests.values())), "parts": parts}, indent=2, ensure_ascii=False))
    else:
        print(_summary(manifests))
    return 0


def _opened_manifest(folder: Path) -> dict:
    """The manifest of an index that opens."""
    kind = read_manifest(folder)["kind"]
    if kind == SUCCESSORS:
        return open_successors(folder).manifest
    if kind == DENSE:
        with open_dense(folder) as index:
            return index.manifest
    with open_index(folder) as index:
        return index.manifest


def verify(args: argparse.Namespace) -> int:
    """Every index is read even if one before it is damaged; then the exit code is 1."""
    folders, manifests, damaged = index_folders(*args.indexes), {}, 0
    for folder in folders:
        try:
            with Progress().stages() as report:
                manifests[folder] = verify_index(folder, report)
        except IndexFormatError as error:
            if len(folders) == 1:
                raise
            damaged += 1
            print(f"DAMAGED: {error}")
        else:
            print(f"{folder}: intact, {_contents(manifests[folder])}")
    if len(folders) > 1:
        print(f"{len(folders)} indexes, {damaged} damaged; intact: {_contents(_totals(list(manifests.values())))}")
    return 1 if damaged else 0


def _totals(manifests: list[dict]) -> dict:
    """Of several indexes together."""
    corpora = [manifest for manifest in manifests if manifest["kind"] in CORPUS_KINDS]
    return {
        "indexes": len(manifests),
        "documents": sum(manifest["documents"] for manifest in corpora),
        "tokens": sum(manifest["tokens"] for manifest in corpora),
        "bytes": sum(map(_size, manifests)),
    }


def _summary(manifests: dict[Path, dict]) -> str:
    totals = _totals(list(manifests.values()))
    tokenizers = {str(manifest["tokenizer"]["fingerprint"]): manifest["tokenizer"] for manifest in manifests.values()}
    lines = [
        f"{totals['indexes']} indexes: {_contents(totals)}",
        f"  {readable_bytes(totals['bytes'])}, {totals['bytes'] / max(1, totals['tokens']):.1f} bytes per token",
        *(f"  tokenizer {tokenizer['name']}, fingerprint {print_}" for print_, tokenizer in tokenizers.items()),
    ]
    if len(tokenizers) > 1:
        lines.append("  they cannot be opened together: their token ids do not mean the same")
    return "\n".join(lines + [f"  {_line(folder, manifest)}" for folder, manifest in manifests.items()])


def _line(folder: Path, manifest: dict) -> str:
    kind = manifest["kind"].replace("_", " ")
    return f"{folder}: {_contents(manifest)}, {readable_bytes(_size(manifest))}, {kind}"


def _size(manifest: dict) -> int:
    return sum(file["bytes"] for file in manifest["files"].values())


def _description(folder: Path, manifest: dict) -> str:
    """All of one index. Options and sources are the builder's own words, so they may be of any shape."""
    tokenizer, size = manifest["tokenizer"], _size(manifest)
    unit, count = next(
        (unit, manifest[name])
        for name, unit in (("tokens", "token"), ("rows", "token"), ("vectors", "key"))
        if name in manifest
    )
    options = [
        f"{name} {value}" for name, value in manifest["options"].items() if value not in (None, False, [], [1, 1])
    ]
    lines = [
        f"{folder}: {_contents(manifest)}",
        f"  {readable_bytes(size)}, {size / max(1, count):.1f} bytes per {unit}",
        f"  {manifest['kind'].replace('_', ' ')}, format {manifest['format_version']}",
        f"  written {manifest['created']} by redraft {manifest['redraft_version']}",
        f"  tokenizer {tokenizer['name']}, {tokenizer['vocab_size']} ids, fingerprint {tokenizer['fingerprint']}",
        f"  options: {', '.join(options) or 'none'}",
    ]
    for source in manifest["sources"]:
        if isinstance(source, dict) and source.keys() == {"source", "documents", "tokens"}:
            lines.append(f"  from {source['source']}: {source['documents']:,} documents, {source['tokens']:,} tokens")
        else:
            lines.append(f"  from {source}")
    lines += [f"  {name}: {readable_bytes(file['bytes'])}" for name, file in manifest["files"].items()]
    return "\n".join(lines)


def _contents(counts: dict) -> str:
    if counts.get("kind") == DENSE:
        return f"{counts['vectors']:,} keys of {counts['dimension']} numbers"
    if counts.get("kind") == SUCCESSORS:
        return f"successors of {counts['rows']:,} tokens"
    return f"{counts['documents']:,} documents, {counts['tokens']:,} tokens"


# --- stats ------------------------------------------------------------------------------------------------------------


def stats(args: argparse.Namespace) -> int:
    if (args.on or args.traces) and args.tokenizer is None:
        args.usage_error("--on and --traces need --tokenizer, the one that the indexes were built with")
    folders = index_folders(*args.indexes)
    with ExitStack() as stack:
        indexes = [stack.enter_context(open_index(folder)) for folder in folders]
        ours = common_tokenizer(indexes)
        if args.on:
            found = matches_of_texts(indexes, _texts_to_measure(args, ours))
            measured = ", ".join(args.on)
        else:
            found = held_out_matches(indexes, args.sample)
            measured = "documents of the indexes, each against all the others"
        manifests = {folder: index.manifest for folder, index in zip(folders, indexes)}
    if found["positions"] == 0:
        raise ValueError(
            f"nothing to measure on: {measured}, --sample {args.sample}: {found['documents']:,} documents, none of two"
            " tokens or more"
        )
    totals = _totals(list(manifests.values()))
    steps = _tokens_per_step(args) if args.traces else {}
    if args.json:
        parts = [
            {"path": str(folder), "bytes": _size(manifest), **{key: manifest[key] for key in ("documents", "tokens")}}
            for folder, manifest in manifests.items()
        ]
        figures = {"measured_on": measured, "matches": found, "tokens_per_step": steps, "parts": parts}
        print(json.dumps(totals | figures, indent=2))
        return 0
    name = str(folders[0]) if len(folders) == 1 else f"{len(folders)} indexes"
    print(f"{name}: {_contents(totals)}, {readable_bytes(totals['bytes'])}")
    if len(folders) > 1:
        print("\n".join(f"  {_line(folder, manifest)}" for folder, manifest in manifests.items()))
    print(f"measured on {measured}: {found['documents']:,} documents, {found['positions']:,} positions")
    print(f"{'last tokens':>12} {'found':>8} {'and the next one, too':>22}")
    for length in MATCH_LENGTHS:
        print(f"{length:>12} {found['matched'][length]:>8.1%} {found['continued'][length]:>22.1%}")
    for workload, step in steps.items():
        print(f"tokens per step on {workload}: {step['without']:.2f} without an index, {step['with']:.2f} with it")
    return 0


def _tokens_per_step(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """{workload: {"without": tokens per step, "with": the same with the indexes}} on recorded outputs."""
    files, plan = trace_files(Path(args.traces)), Plan()
    tokenizer = RememberedTokenizer(args.tokenizer, load_tokenizer)
    config = DraftConfig(vocab_size=tokenizer.vocab_size, tokenizer_fingerprint=tokenizer.fingerprint)
    steps: dict[str, dict[str, float]] = {}
    replayed = 0
    with Progress().phase("replaying", 2 * len(files) * plan.tokens, " tokens") as report:

        def count(tokens: int) -> None:
            nonlocal replayed
            replayed += tokens
            report(replayed)

        for what, indexes in (("without", ()), ("with", tuple(args.indexes))):
            for file, tally in replay_files(Redraft(config, indexes), files, tokenizer, plan, progress=count):
                steps.setdefault(file.name.partition(".")[0], {})[what] = tally.tokens_per_step
    return steps


def _texts_to_measure(args: argparse.Namespace, ours: dict) -> list[np.ndarray]:
    """Token arrays of up to `args.sample` tokens from the sources after --on. `ours`: the indexes' tokenizer."""
    tokenizer = load_tokenizer(args.tokenizer)
    if tokenizer.fingerprint != ours["fingerprint"]:
        raise IndexFormatError(
            f"{', '.join(args.indexes)}: built with tokenizer {ours['name']!r} ({ours['fingerprint']}),"
            f" --tokenizer {tokenizer.name} has fingerprint {tokenizer.fingerprint}"
        )
    options, drawn, texts = ReadOptions(), 0, []
    for _, document in read_documents(list_files(args.on, options), options, Tally()):
        content = document.content
        texts.append(tokenizer.encode(content) if isinstance(content, str) else as_tokens(content))
        drawn += len(texts[-1])
        if drawn >= args.sample:
            break
    return texts
