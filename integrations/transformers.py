"""Drafting inside transformers' own `generate`, through its `custom_generate` argument (transformers 4.57 and later).

    from redraft.integrations.transformers import drafting
    model.generate(**inputs, max_new_tokens=200, custom_generate=drafting(drafter))

transformers prepares everything as usual (generation config, logits processors, stopping criteria, streamer) and hands it to the loop
of `redraft.decoding`, so penalties, bans, stop strings and the caller's own processors and criteria work, each with the
history of the path that is being verified. Greedy and sampled text; beams and the other searches are refused. Sampling draws
from redraft's keyed noise, not from torch's generator: the same distribution, reproducible through `seed`.

Two arguments get lost in transformers 5 between `generate` and a custom function: the streamer (give it to `drafting` too) and
the tokenizer that `stop_strings` need (pass `stopping_criteria=[StopStringCriteria(tokenizer, strings)]` instead).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from redraft.retrieval.errors import import_extra

__all__ = ["drafting"]

# What transformers passes along that decoding with its own cache and positions has no use for.
_HARMLESS = {"attention_mask", "use_cache", "logits_to_keep", "position_ids", "cache_position", "token_type_ids"}
_CACHES = {"cache", "past_key_values"}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def drafting(
    drafter,
    *,
    namespace: str = "default",
    max_nodes: int | None = None,
    adaptive: bool = True,
    seed: int | None = None,
    streamer=None,
    on_stats: Callable | None = None,
) -> Callable:
    """A value for `model.generate(custom_generate=...)` that decodes with drafts from `drafter`.

    Args:
        drafter: `redraft.Drafter`, `redraft.DraftClient`, or None for plain decoding by the same loop.
        namespace, max_nodes, adaptive: as in `redraft.generate`.
        seed: for sampled text; None draws another one for every call.
        streamer: gets the tokens of every step. Give it here as well as to `generate`: transformers 5 gives the prompt to its own
            `streamer` argument, but does not pass it on to a custom function.
        on_stats: called with the `GenerationStats` of every call.

    The returned function raises ValueError for what it cannot do: beams, scores or attentions to be returned, a
    cache that already holds something, inputs other than token ids.
    """
    import_extra("transformers", "models")
    given_streamer = streamer

    def custom_generate(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        **inputs,
    ):
        from redraft.decoding.generate import decode, padded_outputs, split_rows, stops_of
        from redraft.decoding.sampling import Choice
        from redraft.decoding.sequence import Sequence
        from redraft.decoding.target_model import TargetModel

        _refuse(generation_config, inputs, synced_gpus)
        target = TargetModel(model)
        mask = inputs.get("attention_mask")
        prompts = split_rows(input_ids, mask, target.vocab_size)
        first_seed = secrets.randbits(63) if seed is None else seed
        sequences = []
        for row, prompt in enumerate(prompts):
            padding = input_ids.shape[1] - len(prompt)
            if mask is not None and padding and bool(mask[row, :padding].any()):
                raise ValueError("attention_mask: wanted padding on the left only, as transformers itself does")
            sequences.append(
                Sequence(
                    row,
                    prompt.to(target.device),
                    target.length_limit(len(prompt), generation_config.max_length - input_ids.shape[1]),
                    seed=first_seed + row,
                    padding=input_ids[row, :padding].to(target.device),
                    stops=stops_of(stopping_criteria, row, len(prompts)),
                )
            )
        stats = decode(
            target,
            sequences,
            drafter,
            Choice(generation_config.do_sample, logits_processor, len(prompts)),
            streamer=streamer or given_streamer,
            namespace=namespace,
            max_nodes=max_nodes,
            adaptive=adaptive,
        )
        if on_stats is not None:
            on_stats(stats)
        pad = generation_config.pad_token_id
        written = padded_outputs(input_ids, sequences, 0 if pad is None else pad)
        if not generation_config.return_dict_in_generate:
            return written
        from transformers.generation import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=written)

    return custom_generate


def _refuse(generation_config, inputs: dict, synced_gpus: bool) -> None:
    """Raise ValueError for what the loop would have to ignore."""
    if (generation_config.num_beams or 1) != 1:
        raise ValueError(f"drafting searches no beams: wanted num_beams=1, got {generation_config.num_beams}")
    asked = [name for name in _OUTPUTS if getattr(generation_config, name, None)]
    if generation_config.return_dict_in_generate and asked:
        raise ValueError(f"drafting returns token ids only, not {', '.join(asked)}")
    if synced_gpus:
        raise ValueError("drafting works on one process: wanted synced_gpus=False")
    for name, value in inputs.items():
        if name in _CACHES:
            held = value.get_seq_length() if value is not None else 0
            if held:
                raise ValueError(f"{name}: wanted an empty cache or none, got one that holds {int(held)} tokens")
        elif name not in _HARMLESS and value is not None:
            raise ValueError(f"drafting knows nothing of the model input {name!r}; wanted token ids only")
