"""Tokenize on a Ray cluster, then build the index here.

Tokenizing is most of the work of a build and falls apart into shards; the structure does not. So every shard is a Ray task
that tokenizes into a work folder of its own, `my.index.work/2-of-8`, and the index is built from the shards'
documents in turn: the same bytes as without Ray. Sources, tokenizer and output must be under the same paths on all machines.

A task that dies is run again by Ray and goes on after its last whole part; so does the whole build, if it is started
again with the same number of shards.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from redraft.index_builders.build import BuildOptions, BuildSummary, Corpus, open_corpus, write_corpus
from redraft.index_builders.progress import Progress
from redraft.index_builders.readers.documents import Tally
from redraft.index_builders.readers.sources import list_files
from redraft.index_builders.structures import in_turn
from redraft.index_builders.token_parts import TokenParts
from redraft.index_builders.tokenizers import load_tokenizer
from redraft.index_builders.tokenizing import Counts, plan_of, tokenize, with_chat_template
from redraft.retrieval.errors import import_extra

__all__ = ["build_index_on_ray"]


def build_index_on_ray(
    sources: list[str],
    tokenizer: str,
    output: str | Path,
    address: str,
    shards: int | None = None,
    options: BuildOptions | None = None,
    progress: Progress | None = None,
) -> BuildSummary:
    """`build_index` with the tokenizing on the Ray cluster at `address` ("auto": the one that runs here; "local": a new one).

    `shards`: number of tasks; None is one per CPU of the cluster. Raises what `build_index` does, MissingExtraError
    without ray, ConnectionError without a cluster, ValueError for standard input, `max_tokens` and `shard`.
    """
    options, progress = options or BuildOptions(), progress or Progress(quiet=True)
    if "-" in sources or options.max_tokens is not None or options.shard != (1, 1):
        raise ValueError(
            "on Ray there is no standard input, no limit of tokens and no shard: tasks share the whole corpus"
        )
    output = Path(os.path.abspath(output))
    corpus = open_corpus(sources, tokenizer, output, options, progress)
    work = output.with_name(output.name + ".work")
    with _tidied(work), _cluster(address) as ray:
        shards = shards or max(1, int(ray.cluster_resources().get("CPU", 1)))
        tasks = [
            (work / f"{number}-of-{shards}", replace(options, shard=(number, shards), kind=None, memory_limit=None))
            for number in range(1, shards + 1)
        ]
        for path in work.iterdir() if work.is_dir() else ():
            if path.is_dir() and path not in [folder for folder, _ in tasks]:
                shutil.rmtree(path)  # of a build with another number of shards
        results = _run(ray, corpus, tokenizer, tasks, progress)
    for text in results[0]["warnings"]:
        progress.warn(text)
    with ExitStack() as stack:
        shards_parts = []
        for (folder, shard_options), result in zip(tasks, results, strict=True):
            plan = plan_of(corpus.files, corpus.tokenizer, shard_options)
            if result["plan"] != plan:
                raise ValueError("a Ray task saw other files than this process: all machines must see the same sources")
            shards_parts.append(stack.enter_context(TokenParts(folder, plan)))
        documents = in_turn(parts.documents() for parts in shards_parts)
        tally = Tally(**results[0]["tally"])
        summary = write_corpus(corpus, documents, _total(results), tally, output, progress)
    shutil.rmtree(work)
    return replace(summary, resumed_tokens=sum(result["resumed"] for result in results))


@contextmanager
def _tidied(work: Path):
    """After an exception, keep of the work folder only what can be resumed from."""
    try:
        yield
    except BaseException:
        for folder in work.iterdir() if work.is_dir() else ():
            if folder.is_dir() and not any(folder.glob("part-*.json")):
                shutil.rmtree(folder, ignore_errors=True)
        if work.is_dir() and not any(work.iterdir()):
            work.rmdir()
        raise


@contextmanager
def _cluster(address: str):
    """Ray, connected; let go of at the end."""
    ray = import_extra("ray", "ray")
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        yield ray
    finally:
        ray.shutdown()


def _run(ray, corpus: Corpus, tokenizer: str, tasks: list, progress: Progress) -> list[dict]:
    """What `_tokenize_shard` returns for every task, in order. Raises the first error; the other tasks are then stopped."""
    sources = [os.path.abspath(os.path.expanduser(source)) for source in corpus.sources]
    tokenizer = os.path.abspath(tokenizer) if os.path.exists(tokenizer) else tokenizer
    remote = ray.remote(num_cpus=1)(_tokenize_shard)
    pending = [remote.remote(sources, tokenizer, options, str(folder)) for folder, options in tasks]
    order, results = {reference: number for number, reference in enumerate(pending)}, {}
    try:
        with progress.phase("tokenizing on Ray", len(tasks), " shards") as report:
            while pending:
                done, pending = ray.wait(pending, timeout=0.5)
                for reference in done:
                    results[order[reference]] = ray.get(reference)
                counts = [result["counts"] for result in results.values()]
                report(len(results), sum(c["documents"] for c in counts), sum(c["tokens"] for c in counts))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    finally:
        for reference in pending:
            ray.cancel(reference, force=True)
    return [results[number] for number in range(len(tasks))]


def _tokenize_shard(sources: list[str], tokenizer: str, options: BuildOptions, folder: str) -> dict:
    """Runs in a Ray worker: tokenize one shard into `folder`."""
    os.environ.setdefault("RAYON_NUM_THREADS", "1")  # one CPU was asked for
    files, loaded = list_files(sources, options.read), load_tokenizer(tokenizer)
    warnings: list[str] = []
    tally = Tally(warn=warnings.append)
    plan = plan_of(files, loaded, options)
    with TokenParts(Path(folder), plan) as parts:
        resumed = parts.state["tokens"] if parts.state else 0
        options = with_chat_template(options, loaded)
        counts = tokenize(files, loaded, options, parts, tally, Progress(quiet=True))
    kept = ("bad_records", "skipped_files", "empty")
    return {
        "plan": plan,
        "counts": asdict(counts),
        "tally": {name: getattr(tally, name) for name in kept},
        "warnings": warnings,
        "resumed": resumed,
    }


def _total(results: list[dict]) -> Counts:
    """The counts of all shards. Every shard reads the whole corpus, so `read` and `unique` are the same in all."""
    counts = [Counts(**result["counts"]) for result in results]
    by_source = [
        [sum(column) for column in zip(*rows, strict=True)] for rows in zip(*(c.by_source for c in counts), strict=True)
    ]
    return Counts(
        read=counts[0].read,
        unique=counts[0].unique,
        documents=sum(c.documents for c in counts),
        tokens=sum(c.tokens for c in counts),
        by_source=by_source,
    )
