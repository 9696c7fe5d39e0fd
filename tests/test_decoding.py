"""The verifier loop writes what transformers writes, whatever is drafted and however drafting fails."""

from __future__ import annotations

import functools
import gzip
import json
import os
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from scripted_drafter import BROKEN, ScriptedDrafter, broken, count_up, in_turn, knows, late, raising, silent, tree_of
from tiny_models import VOCAB_SIZE, random_prompts, tiny_llama, tiny_model, tiny_qwen3
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from redraft.decoding.generate import generate as generate_adaptively
from redraft.decoding.target_model import TargetModel
from redraft.retrieval.config import DraftConfig

torch.set_num_threads(1)

generate = functools.partial(generate_adaptively, adaptive=False)  # step counts that do not depend on the clock

SMOLLM2 = Path(os.environ.get("REDRAFT_SMOLLM2", Path.home() / ".cache/redraft/models/smollm2-135m"))
SPEC_BENCH = Path(os.environ.get("REDRAFT_DATA", "../shared/data")) / "prompts/spec_bench.jsonl.gz"


def reference(model, prompt, new_tokens, **options):
    """transformers' own text."""
    return model.generate(
        prompt, do_sample=False, max_new_tokens=new_tokens, attention_mask=torch.ones_like(prompt), **options
    )


def adversary(truth, seed: int, vocab_size: int = VOCAB_SIZE):
    """Random trees of up to 32 nodes in which every other node is what really follows: deep, bushy, mostly wrong."""
    truth = [int(token) for token in truth]

    def script(history, max_nodes):
        random = np.random.default_rng([seed, len(history)])
        tokens, parents, taken, depths = [], [], set(), []
        for _ in range(int(random.integers(0, max_nodes + 1))):
            parent = int(random.integers(-1, len(tokens))) if random.random() < 0.5 else len(tokens) - 1
            depth = 1 if parent < 0 else depths[parent] + 1
            place = len(history) + depth - 1
            token = truth[place] if place < len(truth) and random.random() < 0.5 else int(random.integers(vocab_size))
            if (parent, token) not in taken:
                taken.add((parent, token))
                tokens.append(token)
                parents.append(parent)
                depths.append(depth)
        return tree_of(tokens, parents, random.random(len(tokens)))

    return script


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_greedy_text_is_transformers_text(name):
    """200 prompts, each with another kind of draft in turn."""
    model = tiny_model(name)
    for i, prompt in enumerate(random_prompts(200)):
        expected = reference(model, prompt, 16)
        truth = expected[0].tolist()
        scripts = [adversary(truth, i), knows(truth, length=5), in_turn(count_up, silent), broken("cycle")]
        drafter = ScriptedDrafter(scripts[i % 4])
        assert torch.equal(generate(model, prompt, drafter, max_new_tokens=16).sequences, expected), (i, prompt)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("max_nodes", [0, 1, 2, 8, 32, None])
def test_every_budget_and_attention(name, attention, max_nodes):
    model = tiny_model(name, attention)
    for i, prompt in enumerate(random_prompts(3, seed=1)):
        expected = reference(model, prompt, 40)
        drafter = ScriptedDrafter(adversary(expected[0].tolist(), i))
        result = generate(model, prompt, drafter, max_new_tokens=40, max_nodes=max_nodes)
        assert torch.equal(result.sequences, expected)
        if max_nodes is not None:
            assert result.stats.drafted <= max_nodes * result.stats.steps


def test_without_a_drafter_it_decodes_plainly():
    model = tiny_llama()
    prompt = random_prompts(1)[0]
    result = generate(model, prompt, max_new_tokens=20)
    assert torch.equal(result.sequences, reference(model, prompt, 20))
    assert result.stats.tokens_per_step == 1.0
    assert result.stats.drafted == 0


def test_a_drafter_that_knows_the_text_saves_forwards():
    model = tiny_llama()
    prompt = random_prompts(1)[0]
    expected = reference(model, prompt, 41)
    drafter = ScriptedDrafter(knows(expected[0].tolist(), length=4))
    stats = generate(model, prompt, drafter, max_new_tokens=41).stats
    assert (stats.new_tokens, stats.steps, stats.tokens_per_step) == (41, 8, 5.0)
    assert stats.accepted == 32
    assert stats.accepted_by_source == {"session": 32}
    assert stats.accepted_by_depth == {1: 8, 2: 8, 3: 8, 4: 8}
    assert stats.drafted == 64


def test_the_drafter_is_told_everything_once():
    """Prompt, every emitted token in order, runners-up of all verified nodes; the session is closed in the end."""
    model = tiny_llama()
    prompt = random_prompts(1)[0]
    drafter = ScriptedDrafter(adversary(reference(model, prompt, 40)[0].tolist(), 3))
    result = generate(model, prompt, drafter, max_new_tokens=40, namespace="mine")
    (session,) = drafter.sessions.values()
    assert session.history.tolist() == result.sequences[0].tolist()
    assert session.closed and session.namespace == "mine"
    assert [entry[0] for entry in drafter.log].count("open") == 1
    prefill, *steps = session.candidates
    assert set(prefill.tokens.tolist()) == set(prompt[0].tolist())
    assert sum(len(candidates.tokens) for candidates in steps) == result.stats.drafted + result.stats.steps
    for candidates in steps:
        assert candidates.ids.shape == (len(candidates.tokens), 8)
        assert (np.diff(candidates.probs, axis=1) <= 1e-6).all()


def test_runners_up_are_the_models_own():
    """The accepted rows come last, and every row is what the model says after that token on that path."""
    model = tiny_llama()
    prompt = random_prompts(1)[0]
    expected = reference(model, prompt, 12)
    drafter = ScriptedDrafter(knows(expected[0].tolist(), length=3))
    generate(model, prompt, drafter, max_new_tokens=12)
    (session,) = drafter.sessions.values()
    first_step = session.candidates[1]
    with torch.no_grad():
        probs = model(expected).logits[0].softmax(-1)
    start = prompt.shape[1]  # position of the root of the first step
    for i, row in enumerate(range(len(first_step.tokens) - 4, len(first_step.tokens))):
        at = start + i
        assert first_step.tokens[row] == expected[0, at]
        assert first_step.previous[row] == expected[0, at - 1]
        top = probs[at].topk(8)
        assert first_step.ids[row].tolist() == top.indices.tolist()
        np.testing.assert_allclose(first_step.probs[row], top.values, rtol=1e-3)


@pytest.mark.parametrize("kind", sorted(BROKEN))
def test_invalid_trees_cost_nothing_but_the_draft(kind):
    model = tiny_llama()
    prompt = random_prompts(1)[0]
    result = generate(model, prompt, ScriptedDrafter(broken(kind)), max_new_tokens=12)
    assert torch.equal(result.sequences, reference(model, prompt, 12))
    assert result.stats.failures == {"invalid tree": 11}
    assert result.stats.drafted == 0


def test_a_drafter_that_raises_is_tried_again_at_growing_distances():
    model = tiny_llama()
    prompt = random_prompts(1)[0]
    drafter = ScriptedDrafter(raising(RuntimeError("boom")))
    result = generate(model, prompt, drafter, max_new_tokens=40)
    assert torch.equal(result.sequences, reference(model, prompt, 40))
    assert 3 <= result.stats.failures["RuntimeError"] <= 7
    assert all(session.closed for session in drafter.sessions.values())


def test_a_drafter_that_recovers_is_used_again():
    model = tiny_llama()
    prompt = random_prompts(1)[0]
    expected = reference(model, prompt, 40)
    script = in_turn(raising(OSError("gone")), raising(OSError("gone")), knows(expected[0].tolist()))
    drafter = ScriptedDrafter(script)
    result = generate(model, prompt, drafter, max_new_tokens=40)
    assert torch.equal(result.sequences, expected)
    assert result.stats.failures == {"OSError": 2}
    assert result.stats.tokens_per_step > 3
    assert list(drafter.sessions.values())[-1].history.tolist() == expected[0].tolist()


def test_a_late_drafter_changes_no_text():
    model = tiny_llama()
    prompt = random_prompts(1)[0]
    result = generate(model, prompt, ScriptedDrafter(late(0.01)), max_new_tokens=8)
    assert torch.equal(result.sequences, reference(model, prompt, 8))
    assert result.stats.seconds["draft"] > 0.06


def test_an_end_token_inside_an_accepted_path_ends_the_text():
    """Several end tokens; nothing behind one is emitted or told to the drafter."""
    model = tiny_llama()
    for prompt in random_prompts(20, seed=5):
        whole = generate(model, prompt, max_new_tokens=40, eos_token_id=[]).sequences[0].tolist()
        ends = [whole[prompt.shape[1] + 9], VOCAB_SIZE - 1]
        drafter = ScriptedDrafter(knows(whole, length=8))
        result = generate(model, prompt, drafter, max_new_tokens=40, eos_token_id=ends)
        assert torch.equal(result.sequences, reference(model, prompt, 40, eos_token_id=ends))
        (session,) = drafter.sessions.values()
        assert session.history.tolist() == result.sequences[0].tolist()


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 7])
def test_max_new_tokens_is_exact(new_tokens):
    model = tiny_llama()
    prompt = random_prompts(1)[0]
    whole = reference(model, prompt, 30, eos_token_id=None)
    drafter = ScriptedDrafter(knows(whole[0].tolist(), length=8))
    result = generate(model, prompt, drafter, max_new_tokens=new_tokens, eos_token_id=[])
    assert torch.equal(result.sequences[0], whole[0, : prompt.shape[1] + new_tokens])


def test_the_context_limit_is_respected_to_the_last_token():
    model = tiny_llama()
    prompt = torch.randint(3, VOCAB_SIZE, (1, 500), generator=torch.Generator().manual_seed(0))
    plain = generate(model, prompt, max_new_tokens=100, eos_token_id=[])
    assert plain.sequences.shape[1] == 512
    drafter = ScriptedDrafter(knows(plain.sequences[0].tolist(), length=8))
    result = generate(model, prompt, drafter, max_new_tokens=100, eos_token_id=[])
    assert torch.equal(result.sequences, plain.sequences)
    with pytest.raises(ValueError, match="fill the context"):
        generate(model, torch.ones(1, 512, dtype=torch.long), max_new_tokens=1)


def test_a_batch_writes_what_each_row_writes_alone():
    model = tiny_qwen3()
    prompts = random_prompts(8, seed=9)
    width = max(prompt.shape[1] for prompt in prompts)
    ids = torch.zeros(8, width, dtype=torch.long)
    mask = torch.zeros(8, width, dtype=torch.long)
    for row, prompt in enumerate(prompts):  # padded left and right in turn
        place = slice(width - prompt.shape[1], width) if row % 2 else slice(0, prompt.shape[1])
        ids[row, place], mask[row, place] = prompt[0], 1
    alone = [generate(model, prompt, max_new_tokens=30) for prompt in prompts]
    truths = {tuple(prompt[0].tolist()): result.sequences[0].tolist() for prompt, result in zip(prompts, alone)}

    def script(history, max_nodes):
        truth = next(truth for prompt, truth in truths.items() if tuple(history[: len(prompt)]) == prompt)
        return adversary(truth, len(truth))(history, max_nodes)

    result = generate(model, ids, ScriptedDrafter(script), max_new_tokens=30, attention_mask=mask)
    for row, (prompt, single) in enumerate(zip(prompts, alone)):
        written = single.sequences[0, prompt.shape[1] :]
        assert torch.equal(result.sequences[row, width : width + len(written)], written)
        assert (result.sequences[row, width + len(written) :] == 0).all()
    assert result.stats.tokens_per_step > 1.2


class _Collector(BaseStreamer):
    def __init__(self):
        self.put_values, self.ended = [], False

    def put(self, value):
        self.put_values.append(value.flatten().tolist())

    def end(self):
        self.ended = True


def test_streamer_and_on_step_see_tokens_as_they_are_accepted():
    model = tiny_llama()
    prompt = random_prompts(1)[0]
    expected = reference(model, prompt, 21)
    streamer, steps = _Collector(), []
    drafter = ScriptedDrafter(knows(expected[0].tolist()))
    result = generate(model, prompt, drafter, max_new_tokens=21, streamer=streamer, on_step=steps.append)
    assert streamer.put_values[0] == prompt[0].tolist()
    assert list(chain.from_iterable(streamer.put_values)) == expected[0].tolist()
    assert streamer.ended
    assert len(streamer.put_values) == result.stats.steps + 2
    assert list(chain.from_iterable(step.tokens for step in steps)) == expected[0, prompt.shape[1] :].tolist()
    assert list(chain.from_iterable(step.sources for step in steps)) == result.sources[0]
    assert result.sources[0].count(-1) == result.stats.steps + 1


def test_half_precision_follows_the_plain_loop_up_to_a_near_tie():
    model = tiny_llama(seed=3)
    half = type(model)(model.config).to(torch.bfloat16).eval()
    half.load_state_dict(model.state_dict())
    for prompt in random_prompts(10, seed=2):
        plain = generate(half, prompt, max_new_tokens=30).sequences[0]
        drafted = generate(half, prompt, ScriptedDrafter(knows(plain.tolist())), max_new_tokens=30).sequences[0]
        differ = next((i for i, (a, b) in enumerate(zip(plain, drafted)) if a != b), None)
        if differ is not None:
            with torch.no_grad():
                top = half(plain[None, :differ]).logits[0, -1].float().topk(2).values
            assert top[0] - top[1] < 0.5


def test_models_that_cannot_verify_trees_are_refused():
    from transformers import (
        GPTNeoXConfig,
        GPTNeoXForCausalLM,
        MambaConfig,
        MambaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    small = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(ValueError, match="recurrent"):
        TargetModel(MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1)))
    with pytest.raises(ValueError, match="encoder-decoder"):
        TargetModel(T5ForConditionalGeneration(T5Config(vocab_size=16, d_model=16, d_ff=16, num_layers=1, num_heads=2)))
    windowed = MistralConfig(**small, intermediate_size=16, num_key_value_heads=1, sliding_window=8)
    mistral = MistralForCausalLM(windowed).eval()
    prompt = torch.tensor([[1, 5, 7]])
    with pytest.raises(ValueError, match="sliding window of 8"):
        generate(mistral, prompt, max_new_tokens=6)
    assert torch.equal(
        generate(mistral, prompt, ScriptedDrafter(count_up, DraftConfig(vocab_size=16)), max_new_tokens=5).sequences,
        reference(mistral, prompt, 5),
    )
    other = GPTNeoXForCausalLM(GPTNeoXConfig(**small, intermediate_size=16)).eval()
    assert torch.equal(generate(other, prompt, max_new_tokens=5).sequences, reference(other, prompt, 5))


def test_wrong_arguments_say_what_was_wanted():
    model = tiny_llama()
    prompt = torch.tensor([[5, 6]])
    for error, text, ids, options in [
        (TypeError, "torch.Tensor", [[5, 6]], {}),
        (TypeError, "int64", prompt.float(), {}),
        (ValueError, r"\[rows, n\]", prompt[0], {}),
        (ValueError, r"\[rows, n\]", prompt[:, :0], {}),
        (ValueError, "vocabulary of 64", prompt + 60, {}),
        (ValueError, "max_new_tokens: wanted at least 1", prompt, {"max_new_tokens": 0}),
        (ValueError, "max_new_tokens: wanted 0..2147483647, got -3", prompt, {"max_new_tokens": -3}),
        (TypeError, "max_new_tokens: wanted a whole number", prompt, {"max_new_tokens": 1.5}),
        (ValueError, "max_nodes", prompt, {"max_nodes": -1}),
        (ValueError, "temperature", prompt, {"do_sample": True, "temperature": 0.0}),
        (ValueError, "top_p", prompt, {"do_sample": True, "top_p": 1.5}),
        (ValueError, "top_k", prompt, {"do_sample": True, "top_k": -1}),
        (ValueError, "padding alone", prompt, {"attention_mask": torch.zeros_like(prompt)}),
        (ValueError, "single sequence", prompt.repeat(2, 1), {"streamer": _Collector()}),
    ]:
        with pytest.raises(error, match=text):
            generate(model, ids, **{"max_new_tokens": 4, **options})


def test_the_model_is_left_as_it_was():
    model = tiny_llama(seed=4)
    model.train()
    generate(model, torch.tensor([[5, 6]]), max_new_tokens=3)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert not model.get_output_embeddings()._forward_pre_hooks
    model.eval()


@pytest.fixture(scope="module")
def smollm2():
    if not SMOLLM2.is_dir():
        pytest.skip(f"no SmolLM2 at {SMOLLM2} (set REDRAFT_SMOLLM2)")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = SMOLLM2.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, gguf_file=file.name, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=2)
    return model.eval(), tokenizer


@pytest.mark.parametrize("number", [80, 160, 240, 320])
def test_smollm2_on_spec_bench(smollm2, number):
    """A real model and prompts, and the real drafter."""
    if not SPEC_BENCH.is_file():
        pytest.skip(f"no Spec-Bench prompts at {SPEC_BENCH} (set REDRAFT_DATA)")
    drafter_module = pytest.importorskip("redraft.retrieval.drafter")
    model, tokenizer = smollm2
    with gzip.open(SPEC_BENCH, "rt") as lines:
        record = [json.loads(line) for line in lines][number]
    chat = [{"role": "user", "content": record["turns"][0]}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = prompt["input_ids"][:, -400:]
    with drafter_module.Drafter(DraftConfig(vocab_size=model.config.vocab_size)) as drafter:
        result = generate(model, ids, drafter, max_new_tokens=32)
    assert torch.equal(result.sequences, reference(model, ids, 32))
    assert result.stats.failures == {}
