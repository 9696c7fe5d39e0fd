"""Prompts that invite a drafter to be wrong: what was written before looks like what comes next, and is not.

random words      a list without rhyme; the model goes on with it or comments on it
near matches      one sentence over and over, each time with another end, so that every long match points to a wrong tail
languages         a switch of language in every sentence
base64            text without words
"""

from __future__ import annotations

import base64
import random

import torch

from redraft.decoding.live_benchmark import Prompt

__all__ = ["adversarial_prompts"]

_WORDS = (
    "anchor basil copper drift ember fable gravel harbor indigo jasper kettle lantern meadow nickel orchard pebble quarry"
    " ribbon saddle timber umber velvet willow yonder zephyr acorn bishop cradle dagger elbow falcon goblet hammer"
)
_SENTENCES = (
    "The weather was fine that morning.",
    "Der Zug kam wieder einmal zu spät.",
    "Le chat dormait devant la porte.",
    "La biblioteca cierra a las ocho.",
    "Il mercato era pieno di gente.",
    "De hond liep langs het water.",
)


def adversarial_prompts(tokenizer, device, count: int = 2, seed: int = 0) -> list[Prompt]:
    """`count` prompts of each kind in the chat template."""
    prompts = []
    for number in range(count):
        for kind, text in _texts(random.Random(seed + number)).items():
            encoded = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            ids = encoded["input_ids"].to(device)
            prompts.append(Prompt(kind, ids, torch.ones_like(ids)))
    return prompts


def _texts(chance: random.Random) -> dict[str, str]:
    known = _WORDS.split()
    words = " ".join(chance.choice(known) for _ in range(150))
    ends = chance.sample(known, 24)
    near = " ".join(f"When the keeper of the old lighthouse opened the heavy door he saw the {end}." for end in ends)
    mixed = " ".join(chance.choice(_SENTENCES) for _ in range(20))
    coded = base64.b64encode(chance.randbytes(300)).decode()
    return {
        "random words": f"Go on with this list, and never say a word twice: {words}",
        "near matches": f"Go on with this story, every sentence with another end: {near}",
        "languages": f"Go on in this manner, every sentence in another language than the one before: {mixed}",
        "base64": f"Write more lines of this base64 text: {coded}",
    }
