"""`model.generate(custom_generate=drafting(...))`: everything that transformers users pass, with the text it gives plainly."""

from __future__ import annotations

import pytest
import torch
from scripted_drafter import ScriptedDrafter
from test_decoding import adversary
from test_generate_command import model_folder  # noqa: F401 - a fixture
from tiny_models import VOCAB_SIZE, random_prompts, tiny_llama, tiny_model
from transformers import (
    AutoTokenizer,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextStreamer,
)

from redraft.decoding.generate import generate
from redraft.integrations.transformers import drafting

torch.set_num_threads(1)


class PreferTheSumOfTheText(LogitsProcessor):
    """Raises a token that depends on every token so far, in both the prompt and the path."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, ids in enumerate(input_ids):
            scores[row, int(ids.sum()) % VOCAB_SIZE] += 3.0
        return scores


class StopAfterSum(StoppingCriteria):
    """Ends a row once its text adds up to a number that seven divides."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([int(ids.sum()) % 7 == 0 and len(ids) > 12 for ids in input_ids])


OPTIONS = {
    "plain": {},
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeated n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[5], [6, 7], [9, 10, 11]]},
    "shortest length": {"min_new_tokens": 12, "eos_token_id": list(range(3, 30))},
    "several ends": {"eos_token_id": [2, 9, 17, 33]},
    "own processor": {"logits_processor": LogitsProcessorList([PreferTheSumOfTheText()])},
    "own criterion": {"stopping_criteria": StoppingCriteriaList([StopAfterSum()])},
    "all at once": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "logits_processor": LogitsProcessorList([PreferTheSumOfTheText()]),
        "stopping_criteria": StoppingCriteriaList([StopAfterSum()]),
        "min_new_tokens": 4,
        "eos_token_id": [2, 9],
    },
}


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("case", OPTIONS)
def test_text_with_drafts_is_the_text_without(name, case):
    model = tiny_model(name)
    for i, prompt in enumerate(random_prompts(6, seed=41)):
        options = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(prompt), **OPTIONS[case]}
        expected = model.generate(prompt, **options)
        stats = []
        drafter = ScriptedDrafter(adversary(expected[0].tolist(), i))
        custom = drafting(drafter, adaptive=False, on_stats=stats.append)
        assert torch.equal(model.generate(prompt, custom_generate=custom, **options), expected)
        assert stats[0].failures == {}


@pytest.mark.parametrize("case", ["plain", "repetition penalty", "all at once"])
def test_sampled_text_with_drafts_is_the_text_without(case):
    model = tiny_model("llama")
    options = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95, **OPTIONS[case]}
    for i, prompt in enumerate(random_prompts(6, seed=43)):
        plain = model.generate(prompt, custom_generate=drafting(None, seed=i), **options)
        drafter = ScriptedDrafter(adversary(plain[0].tolist(), i))
        drafted = model.generate(prompt, custom_generate=drafting(drafter, seed=i), **options)
        assert torch.equal(drafted, plain)
        several = model.generate(prompt, custom_generate=drafting(drafter, seed=i), num_return_sequences=2, **options)
        assert len(several) == 2


@pytest.mark.parametrize("case", OPTIONS)
def test_a_left_padded_batch_is_transformers_batch(case):
    """Processors and criteria see the padding, as they do in transformers."""
    model = tiny_model("qwen3")
    prompts = random_prompts(4, seed=47, longest=12)
    width = max(prompt.shape[1] for prompt in prompts)
    ids = torch.cat([torch.nn.functional.pad(prompt, (width - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.cat(
        [torch.nn.functional.pad(torch.ones_like(prompt), (width - prompt.shape[1], 0)) for prompt in prompts]
    )
    options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": mask, **OPTIONS[case]}
    expected = model.generate(ids, **options)
    truths = {tuple(prompt[0].tolist()): row[width - prompt.shape[1] :] for prompt, row in zip(prompts, expected)}

    def script(history, max_nodes):
        truth = next(truth for prompt, truth in truths.items() if tuple(history[: len(prompt)]) == prompt)
        return adversary(truth.tolist(), len(truth))(history, max_nodes)

    drafted = model.generate(ids, custom_generate=drafting(ScriptedDrafter(script), adaptive=False), **options)
    assert torch.equal(drafted, expected)


def test_stop_strings(model_folder):  # noqa: F811
    model, tokenizer = tiny_llama(), AutoTokenizer.from_pretrained(model_folder)
    prompt = tokenizer("abcab", return_tensors="pt")["input_ids"]
    whole = tokenizer.decode(model.generate(prompt, do_sample=False, max_new_tokens=40)[0, prompt.shape[1] :])
    strings = [whole[10:13], whole[20:22]]
    expected = model.generate(prompt, do_sample=False, stop_strings=strings, tokenizer=tokenizer, max_new_tokens=40)
    assert expected.shape[1] < prompt.shape[1] + 40
    drafter = ScriptedDrafter(adversary(expected[0].tolist(), 0))
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, strings)])
    options = {"do_sample": False, "max_new_tokens": 40, "stopping_criteria": criteria}
    assert torch.equal(model.generate(prompt, custom_generate=drafting(drafter), **options), expected)
    own = generate(model, prompt, drafter, max_new_tokens=40, stop_strings=strings, tokenizer=tokenizer)
    assert torch.equal(own.sequences, expected)
    with pytest.raises(ValueError, match="tokenizer"):
        generate(model, prompt, max_new_tokens=4, stop_strings=strings)


def test_streamers_and_output_objects(model_folder, capsys):  # noqa: F811
    model, tokenizer = tiny_llama(), AutoTokenizer.from_pretrained(model_folder)
    prompt = tokenizer("abcab", return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": 30, "do_sample": False}
    expected = model.generate(prompt, streamer=TextStreamer(tokenizer), **options)
    plainly = capsys.readouterr().out
    drafter, streamer = ScriptedDrafter(adversary(expected[0].tolist(), 1)), TextStreamer(tokenizer)
    custom = drafting(drafter, adaptive=False, streamer=streamer)
    output = model.generate(prompt, streamer=streamer, custom_generate=custom, return_dict_in_generate=True, **options)
    assert torch.equal(output.sequences, expected)
    assert capsys.readouterr().out == plainly


def test_what_cannot_be_done_is_refused():
    model, prompt = tiny_llama(), torch.tensor([[5, 6, 7]])
    full = DynamicCache()
    model(prompt[:, :2], use_cache=True, past_key_values=full)
    for text, options in [
        ("beams", {"num_beams": 2}),
        ("token ids only", {"return_dict_in_generate": True, "output_scores": True}),
        ("holds 2 tokens", {"past_key_values": full}),
    ]:
        with pytest.raises(ValueError, match=text):
            model.generate(prompt, max_new_tokens=4, custom_generate=drafting(None), **options)
