"""The real drafter in the loop: the text is the target's own for every source, budget, penalty and batch size."""

from __future__ import annotations

import functools

import pytest
import torch
from test_decoding import reference
from tiny_models import VOCAB_SIZE, random_prompts, tiny_model
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from redraft.decoding.generate import generate as generate_adaptively
from redraft.decoding.successors import successor_table
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import Source
from redraft.retrieval.drafter import Drafter

torch.set_num_threads(1)
generate = functools.partial(generate_adaptively, adaptive=False)

PROMPTS = random_prompts(12, seed=61)
PENALTIES = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4), NoRepeatNGramLogitsProcessor(5)])


@functools.cache
def plain(name: str, penalised: bool, sampled: bool) -> list[torch.Tensor]:
    """The texts of the plain loop."""
    return [
        generate(tiny_model(name), prompt, max_new_tokens=32, **options(penalised, sampled, i)).sequences
        for i, prompt in enumerate(PROMPTS)
    ]


def options(penalised: bool, sampled: bool, seed: int) -> dict:
    chosen = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": seed} if sampled else {}
    return chosen | ({"logits_processor": PENALTIES} if penalised else {})


@pytest.mark.parametrize("source", [*Source.NAMES, "all"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_every_source_alone_and_all_together(name, source):
    """Twice over the same prompts: the second time the memory knows the texts."""
    disabled = frozenset() if source == "all" else frozenset(Source.NAMES) - {source}
    drafted = 0
    with Drafter(DraftConfig(vocab_size=VOCAB_SIZE, disabled=disabled)) as drafter:
        for _ in range(2):
            for prompt, expected in zip(PROMPTS, plain(name, False, False)):
                result = generate(tiny_model(name), prompt, drafter, max_new_tokens=32)
                assert torch.equal(result.sequences, expected)
                assert result.stats.failures == {}
                drafted += result.stats.drafted
    if source in ("session", "memory", "recycling", "all"):
        assert drafted > 0
    if source == "all":
        assert result.stats.tokens_per_step > 3


@pytest.mark.parametrize("max_nodes", [1, 2, 8, 32, 64])
@pytest.mark.parametrize("penalised", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_every_budget(max_nodes, penalised, sampled):
    model = tiny_model("llama")
    with Drafter(DraftConfig(vocab_size=VOCAB_SIZE, max_nodes=max_nodes)) as drafter:
        for i, (prompt, expected) in enumerate(zip(PROMPTS, plain("llama", penalised, sampled))):
            result = generate(model, prompt, drafter, max_new_tokens=32, **options(penalised, sampled, i))
            assert torch.equal(result.sequences, expected)
            assert result.stats.drafted <= max_nodes * result.stats.steps


@pytest.mark.parametrize("penalised", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_batch_of_eight(penalised, sampled):
    model = tiny_model("qwen3")
    prompts = PROMPTS[:8]
    width = max(prompt.shape[1] for prompt in prompts)
    ids = torch.cat([torch.nn.functional.pad(prompt, (0, width - prompt.shape[1])) for prompt in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (0, width - p.shape[1])) for p in prompts])
    with Drafter(DraftConfig(vocab_size=VOCAB_SIZE)) as drafter:
        for _ in range(2):
            result = generate(
                model, ids, drafter, max_new_tokens=32, attention_mask=mask, **options(penalised, sampled, 0)
            )
    for row, (prompt, expected) in enumerate(zip(prompts, plain("qwen3", penalised, sampled))):
        written = expected[0, prompt.shape[1] :]  # row i draws with seed + i, as its text alone did
        assert torch.equal(result.sequences[row, width : width + len(written)], written)
    assert result.stats.tokens_per_step > 2


def test_greedy_text_is_transformers_text_while_the_drafter_learns():
    model = tiny_model("llama")
    with Drafter(DraftConfig(vocab_size=VOCAB_SIZE)) as drafter:
        for prompt in random_prompts(60, seed=67):
            result = generate_adaptively(model, prompt, drafter, max_new_tokens=24)
            assert torch.equal(result.sequences, reference(model, prompt, 24))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_successor_table_is_what_the_model_says_of_each_token(name):
    model = tiny_model(name)
    done = []
    ids, probs = successor_table(model, [1, 40, 5], width=24, progress=done.append)
    with torch.no_grad():
        contexts = torch.tensor([[1, 40, 5, token] for token in range(VOCAB_SIZE)])
        expected = model(contexts).logits[:, -1].softmax(-1).topk(8)
    assert ids.tolist() == expected.indices.tolist()
    assert torch.allclose(torch.from_numpy(probs), expected.values, atol=1e-5)
    assert done == [24, 48, VOCAB_SIZE]
