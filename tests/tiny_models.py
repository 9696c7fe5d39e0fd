"""Tiny target models with random weights: real transformers models, small enough to decode thousands of tokens.

Their initial weights are larger than transformers' default, so that the next token depends on the context, and
greedy text does not end in one repeated token at once.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 64

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@functools.cache
def tiny_llama(attention: str = "sdpa", seed: int = 0):
    return _model(LlamaForCausalLM, LlamaConfig, attention, seed, {})


@functools.cache
def tiny_qwen3(attention: str = "sdpa", seed: int = 0):
    return _model(Qwen3ForCausalLM, Qwen3Config, attention, seed, {"tie_word_embeddings": True})


def tiny_model(name: str, attention: str = "sdpa"):
    return {"llama": tiny_llama, "qwen3": tiny_qwen3}[name](attention)


def _model(model_class, config_class, attention: str, seed: int, extra: dict):
    torch.manual_seed(seed)
    config = config_class(**{**_SHAPE, **extra}, attn_implementation=attention)
    return model_class(config).eval()


def save_with_tokenizer(model, folder: Path) -> Path:
    """Save a model and a tokenizer of single characters, 64 entries, as transformers does; returns the folder."""
    model.save_pretrained(folder)
    symbols = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz .,ABCDEFGHIJKLMNOPQRSTUVWXYZ012345"]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols[:VOCAB_SIZE])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>").save_pretrained(folder)
    return folder


def random_prompts(count: int, seed: int = 0, longest: int = 24) -> list[torch.Tensor]:
    """int64[1, n] prompts of 1 to `longest` tokens, some of them repeating themselves."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for _ in range(count):
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        alphabet = int(torch.randint(3, VOCAB_SIZE, (1,), generator=generator))
        prompts.append(torch.randint(3, 3 + min(alphabet, VOCAB_SIZE - 3), (1, length), generator=generator))
    return prompts
