"""A target model's own successor table, made from nothing but the model (`redraft index build-successors`).

What the table is for stands in `redraft.decoding.successors`, which computes it; how it is stored in
`docs/index-format.md`. Here the model is described, so that a table can be told from that of another model, and
the result is written as every index is: whole, or not at all.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from redraft.decoding.states import weights_digest
from redraft.decoding.successors import CONTEXT, successor_table
from redraft.index_builders.progress import Progress
from redraft.index_builders.tokenizers import Tokenizer
from redraft.retrieval.index_format import SUCCESSOR_IDS, SUCCESSOR_PROBS, SUCCESSORS
from redraft.retrieval.index_writer import IndexWriter

__all__ = ["build_successors"]


def build_successors(
    model, tokenizer, output: str | Path, *, name: str, width: int, force: bool, progress: Progress
) -> dict:
    """Run `model` over its vocabulary and write the table to `output`; returns what was recorded of the model.

    model, tokenizer: of transformers. name: how the model was named, for people to read. width: tokens run at a time.
    Raises FileExistsError for an output that is not to be replaced, ValueError for a model that cannot verify trees
    or a tokenizer without a fast version. An exception, Ctrl-C included, leaves what was there before.
    """
    described = Tokenizer.from_transformers(tokenizer, name).describe()
    context = tokenizer(CONTEXT)["input_ids"]  # with the beginning that the tokenizer gives a text, if any
    with IndexWriter(output, kind=SUCCESSORS, force=force) as writer:
        rows = int(model.get_output_embeddings().weight.shape[0])
        with progress.phase("vocabulary", rows, " ids") as report:
            ids, probs = successor_table(model, context, width=width, progress=report)
        writer.write(SUCCESSOR_IDS, ids)
        writer.write(SUCCESSOR_PROBS, probs.astype(np.float16))
        options = {
            "model": name,
            "weights_sha256": weights_digest(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "context": [int(token) for token in context],
        }
        with progress.stages() as report:
            counts = {"rows": rows, "max_token": ids.max(initial=-1)}
            writer.publish(counts=counts, tokenizer=described, options=options, sources=[], progress=report)
    return options | {"rows": rows}
