"""Every combination writes the plain loop's text: sources, budgets, penalties, batch sizes, layouts, in process and by a server."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from serving import running
from tiny_models import VOCAB_SIZE, random_prompts, tiny_llama
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from redraft.client.draft_client import DraftClient
from redraft.decoding.generate import generate
from redraft.decoding.stats import GenerationStats
from redraft.decoding.target_model import TargetModel
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import Source
from redraft.retrieval.drafter import Drafter

torch.set_num_threads(1)

SOURCES = {
    "all": Source.NAMES,
    "texts": ("session", "memory", "pointer"),
    "opinions": ("recycling",),
    "loose": ("skip", "frequent"),
}
PENALTIES = {
    False: None,
    True: LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(4)]),
}
SAMPLING = {False: {}, True: {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 5}}
PROMPTS = random_prompts(8, seed=83)
NEW_TOKENS = 10


def batch(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Left-padded ids and mask."""
    width = max(prompt.shape[1] for prompt in prompts)
    ids = [torch.nn.functional.pad(prompt, (width - prompt.shape[1], 0)) for prompt in prompts]
    masks = [torch.nn.functional.pad(torch.ones_like(prompt), (width - prompt.shape[1], 0)) for prompt in prompts]
    return {"input_ids": torch.cat(ids), "attention_mask": torch.cat(masks)}


@functools.cache
def plain(attention: str, penalised: bool, sampled: bool, row: int) -> list[int]:
    """What the row's text is alone, without drafts; row i draws with seed 5 + i."""
    options = SAMPLING[sampled] | ({"seed": 5 + row} if sampled else {})
    prompt = PROMPTS[row]
    result = generate(
        tiny_llama(attention), prompt, max_new_tokens=NEW_TOKENS, logits_processor=PENALTIES[penalised], **options
    )
    return result.sequences[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])  # flat batches and padded ones
@pytest.mark.parametrize("place", ["in process", "server"])
@pytest.mark.parametrize("sources", SOURCES)
def test_the_text_is_the_plain_loops(sources, place, attention, tmp_path):
    if attention == "eager" and sources != "all":
        pytest.skip("the layout does not depend on who drafts")
    config = DraftConfig(
        vocab_size=VOCAB_SIZE, max_nodes=64, disabled=frozenset(Source.NAMES) - frozenset(SOURCES[sources])
    )
    drafted = 0
    with Drafter(config) as drafter:
        if place == "in process":
            drafted = compare(drafter, attention)
        else:
            with (
                running(drafter, f"unix:{tmp_path}/s"),
                DraftClient(f"unix:{tmp_path}/s", config=config, timeout=5.0) as client,
            ):
                assert client.wait_until_ready(60)
                drafted = compare(client, attention)
    assert drafted > 0


def compare(drafter, attention: str) -> int:
    """Write every text with `drafter`; returns how many nodes were verified."""
    drafted = 0
    for max_nodes, penalised, sampled, rows in itertools.product(
        (1, 2, 8, 32, 64), (False, True), (False, True), (1, 8)
    ):
        prompts = batch(PROMPTS[:rows])
        width = prompts["input_ids"].shape[1]
        result = generate(
            tiny_llama(attention),
            drafter=drafter,
            max_new_tokens=NEW_TOKENS,
            max_nodes=max_nodes,
            adaptive=False,
            logits_processor=PENALTIES[penalised],
            **prompts,
            **SAMPLING[sampled],
        )
        assert not result.stats.failures
        for row in range(rows):
            expected = plain(attention, penalised, sampled, row)
            written = result.sequences[row, width : width + len(expected)].tolist()
            assert written == expected, (max_nodes, penalised, sampled, rows, row)
        drafted += result.stats.drafted
    return drafted


def test_batches_are_flat_where_attention_can_be_replaced():
    """So that the combinations above cover both layouts."""
    for attention, flat in (("sdpa", True), ("eager", False)):
        target = TargetModel(tiny_llama(attention))
        with target.decoding(GenerationStats()):
            assert target._takes_flat() is flat
