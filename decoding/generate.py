"""The verifier loop: draft, verify, accept, tell the drafter, again.

The text is what the target would have written alone; the drafter only decides how many tokens one forward yields.
`acceptance.py` has the rule, `sampling.py` the draws, `verifier.py` the step, `docs/verification.md` the proofs.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from redraft.decoding.drafts import Drafts
from redraft.decoding.first_costs import measure_costs
from redraft.decoding.nest import decode_nest
from redraft.decoding.sampling import Choice, warpers
from redraft.decoding.sequence import Sequence
from redraft.decoding.states import Projection
from redraft.decoding.stats import GenerationStats
from redraft.decoding.step_cost import cost_of
from redraft.decoding.target_model import TargetModel
from redraft.decoding.tree_size import sizer_of
from redraft.decoding.verifier import Verifier
from redraft.retrieval.draft_tree import DraftTree
from redraft.retrieval.tokens import as_count

__all__ = ["Generation", "Step", "decode", "generate", "padded_outputs", "split_rows", "stops_of"]


@dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    Attributes:
        sequences: int64[rows, prompt + new], as transformers returns them: the prompt, what was written, padding.
        stats: what it took.
        sources: per row, for every written token the id of the source that drafted it (`Source`), -1 for those that
            the target added itself.
        seed: what the draws were keyed with (give it again for the same text); None where nothing was sampled.
    """

    sequences: torch.Tensor
    stats: GenerationStats
    sources: list[list[int]]
    seed: int | None


class Step(NamedTuple):
    """What one forward added to one row, for `on_step`; `sources` as in `Generation.sources`."""

    row: int
    tokens: list[int]
    sources: list[int]
    tree: DraftTree


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    drafter=None,
    *,
    max_new_tokens: int,
    attention_mask: torch.Tensor | None = None,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    pad_token_id: int | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    stop_strings: str | list[str] | None = None,
    tokenizer=None,
    streamer=None,
    namespace: str = "default",
    max_nodes: int | None = None,
    adaptive: bool = True,
    on_step: Callable[[Step], None] | None = None,
    provenance: bool = False,
    acceptance: str = "lossless",
) -> Generation:
    """Let `model` continue `input_ids`, with drafts from `drafter`.

    Args:
        model: a decoder-only transformers model with sdpa or eager attention.
        input_ids: int64[rows, n], n >= 1.
        drafter: `redraft.Drafter`, `redraft.DraftClient`, or anything with their interface; None decodes plainly.
        max_new_tokens: at most so many tokens a row; fewer at an end token or at the model's context limit.
        attention_mask: [rows, n], 0 for padding (on either side).
        do_sample: draw from the processed distribution instead of taking the most likely token.
        temperature, top_k, top_p: of that distribution, with transformers' meaning; they change nothing in greedy text.
        seed: makes sampled text reproducible, whatever is drafted; row i of a batch draws with seed + i.
        eos_token_id: ids that end a row; default: the model's generation config.
        pad_token_id: fills rows that ended early; default: the model's generation config, else the first end token.
        logits_processor: transformers processors, each applied with the history of a node's own path.
        stopping_criteria: transformers criteria, each asked after every token; a row ends where one says so.
        stop_strings: texts that end a row once they are written; needs `tokenizer`.
        streamer: gets the prompt, then the tokens of every step as int64[k], as from transformers; one row only.
        namespace: whose memory the drafter uses and feeds.
        max_nodes: verify at most so many nodes a row and step, the best ones of the drafter's tree; 0 drafts nothing.
        adaptive: verify only as many nodes as pay for their measured cost, and none where none do (`tree_size.py`);
            False verifies every drafted node.
        on_step: called for every row after the prefill and after every step.
        provenance: note where accepted tokens stand in corpora (`GenerationStats.spans`); some microseconds a token, and
            through a server one more call a step.
        acceptance: "lossless", or "nest": Nearest Neighbor Speculative Decoding, which mixes the text of the drafter's dense
            index into the target's distribution and accepts what is likely enough. LOSSY: the text is not the target's own
            (`nest.py`). It needs a `redraft.Drafter` with a dense index, and none of the other arguments on drafts.

    Raises TypeError and ValueError for arguments and models it cannot be right with. A drafter that fails costs
    drafts, never text: see `GenerationStats.failures`.
    """
    if acceptance not in ("lossless", "nest"):
        raise ValueError(f"acceptance: wanted 'lossless' or 'nest', got {acceptance!r}")
    target = TargetModel(model)
    prompts = split_rows(input_ids, attention_mask, target.vocab_size)
    if as_count(max_new_tokens, 2**31 - 1, "max_new_tokens") < 1:
        raise ValueError("max_new_tokens: wanted at least 1, got 0")
    if streamer is not None and len(prompts) > 1:
        raise ValueError(f"streamer: wanted a single sequence, got {len(prompts)}")
    processors = LogitsProcessorList(logits_processor or [])
    if do_sample:
        processors.extend(warpers(temperature, top_k, top_p))
        seed = secrets.randbits(63) if seed is None else int(seed)
    criteria = StoppingCriteriaList(stopping_criteria or [])
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings: wanted the model's tokenizer too (tokenizer=...)")
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    eos = _end_ids(model, eos_token_id)
    sequences = [
        Sequence(
            row,
            prompt.to(target.device),
            target.length_limit(len(prompt), max_new_tokens),
            eos=eos,
            seed=(seed or 0) + row,
            stops=stops_of(criteria, row, len(prompts)) if criteria else None,
        )
        for row, prompt in enumerate(prompts)
    ]
    if streamer is not None:
        streamer.put(input_ids.cpu())
    choice = Choice(do_sample, processors, len(prompts))
    if acceptance == "nest":
        stats = decode_nest(target, sequences, drafter, choice, streamer=streamer, on_step=on_step)
        return _generation(model, input_ids, sequences, stats, pad_token_id, eos, seed if do_sample else None)
    stats = decode(
        target,
        sequences,
        drafter,
        choice,
        streamer=streamer,
        namespace=namespace,
        max_nodes=max_nodes,
        adaptive=adaptive,
        on_step=on_step,
        provenance=provenance,
    )
    return _generation(model, input_ids, sequences, stats, pad_token_id, eos, seed if do_sample else None)


def _generation(model, input_ids, sequences, stats, pad_token_id, eos, seed) -> Generation:
    padded = padded_outputs(input_ids, sequences, _padding_id(model, pad_token_id, eos))
    return Generation(padded, stats, [sequence.sources for sequence in sequences], seed)


def decode(
    target: TargetModel,
    sequences: list[Sequence],
    drafter,
    choice: Choice,
    *,
    streamer=None,
    namespace: str = "default",
    max_nodes: int | None = None,
    adaptive: bool = True,
    on_step: Callable[[Step], None] | None = None,
    provenance: bool = False,
) -> GenerationStats:
    """Write `sequences` to their ends; the loop itself, for callers that have made their own sequences.

    The arguments are those of `generate`.
    """
    if max_nodes is not None and max_nodes < 0:
        raise ValueError(f"max_nodes: wanted 0 or more, got {max_nodes}")
    stats = GenerationStats(prompt_tokens=sum(sequence.length for sequence in sequences))

    def report(sequence: Sequence, tree: DraftTree, path: list[int], tokens: list[int]) -> None:
        sources = [int(tree.sources[node]) for node in path] + [-1] * (len(tokens) - len(path))
        if provenance and path:
            try:
                places = tree.provenance(path)
            except Exception:  # noqa: BLE001 - a server that has gone, say: the text does not depend on it
                stats.failures["provenance"] += 1
            else:
                stats.add_places(sequence.index, len(sequence.sources), [places[node] for node in path])
        sequence.sources += sources
        if streamer is not None:
            streamer.put(torch.tensor(tokens))
        if on_step is not None:
            on_step(Step(sequence.index, tokens, sources, tree))

    projection = None
    if drafter is not None and max_nodes != 0 and (wanted := getattr(drafter, "states", None)) is not None:
        projection = Projection(target.model, *wanted)
    sized = adaptive and drafter is not None
    drafts = Drafts(
        drafter,
        sequences,
        namespace=namespace,
        max_nodes=max_nodes,
        vocab_size=target.vocab_size,
        sizer=sizer_of(target.model) if sized else None,
        stats=stats,
    )
    with drafts, target.decoding(stats), projection.tap if projection else nullcontext():
        verifier = Verifier(
            target,
            sequences,
            choice,
            teach=drafter is not None,
            projection=projection,
            stats=stats,
            report=report,
        )
        if sized and max_nodes != 0 and not (cost := cost_of(target.model)).measured:
            with stats.timed("costs"):
                measure_costs(target, cost)
        emissions = verifier.prefill()
        while trees := drafts.step(emissions):
            emissions = verifier.verify(trees)
    if streamer is not None:
        streamer.end()
    return stats


def stops_of(criteria: StoppingCriteriaList, row: int, rows: int) -> Callable[[torch.Tensor], bool]:
    """`Sequence.stops` from transformers' criteria, for one row of a batch that they may keep something for."""
    return lambda ids: bool(criteria(ids.expand(rows, -1), None)[row])


def split_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, vocab_size: int) -> list[torch.Tensor]:
    """The rows of `input_ids` without their padding, each int64[n]. Raises TypeError, ValueError."""
    if not isinstance(input_ids, torch.Tensor):
        raise TypeError(f"input_ids: wanted a torch.Tensor of shape [rows, n], got {type(input_ids).__name__}")
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids: wanted shape [rows, n] with n >= 1, got {list(input_ids.shape)}")
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"input_ids: wanted int64 token ids, got {input_ids.dtype}")
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"input_ids: token ids {low}..{high} leave the model's vocabulary of {vocab_size} ids")
    if attention_mask is None:
        return list(input_ids.long())
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask: wanted shape {list(input_ids.shape)}, got {list(attention_mask.shape)}")
    prompts = [row[mask.bool()].long() for row, mask in zip(input_ids, attention_mask)]
    if not all(len(prompt) for prompt in prompts):
        raise ValueError("attention_mask: a row consists of padding alone")
    return prompts


def padded_outputs(input_ids: torch.Tensor, sequences: list[Sequence], padding: int) -> torch.Tensor:
    """int64[rows, n + longest output]: `input_ids` as they came, the outputs, `padding`."""
    outputs = [sequence.ids[sequence.prompt_length :].to(input_ids.device) for sequence in sequences]
    longest = max(map(len, outputs))
    rows = input_ids.new_full((len(sequences), input_ids.shape[1] + longest), padding, dtype=torch.long)
    rows[:, : input_ids.shape[1]] = input_ids
    for row, output in zip(rows, outputs):
        row[input_ids.shape[1] : input_ids.shape[1] + len(output)] = output
    return rows


def _end_ids(model: PreTrainedModel, eos_token_id: int | Iterable[int] | None) -> frozenset[int]:
    """The ids that end a text, from the argument or from the model."""
    if eos_token_id is None:
        eos_token_id = model.generation_config.eos_token_id
    if eos_token_id is None:
        return frozenset()
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else map(int, eos_token_id))


def _padding_id(model: PreTrainedModel, pad_token_id: int | None, eos: frozenset[int]) -> int:
    """What fills short rows, chosen as transformers chooses it."""
    for candidate in (pad_token_id, model.generation_config.pad_token_id):
        if candidate is not None:
            return candidate
    return min(eos, default=0)
