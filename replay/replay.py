"""Recorded outputs forced through a drafter, step by step: the tokens per step that a lossless verifier would get.

Verification never changes a text, so a recorded output stands for the target model: a step accepts the drafted path
that agrees with the output, as far as it agrees, and emits one more token (the bonus token). The first token of an
output comes from the prefill and is free. Every item is a session of its own, opened with its whole context; when it
is closed its output joins the drafter's memory.

The loop around the drafter is short, and the drafter's calls are timed one by one, by the time that this thread
spent on a processor: what else the machine does does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import thread_time_ns

from redraft.replay.loops import in_loop
from redraft.replay.tally import Tally
from redraft.replay.traces import Item
from redraft.retrieval.draft_tree import DraftTree

__all__ = ["replay_item", "replay_items"]


def replay_item(drafter, item: Item, tally: Tally, *, max_nodes: int | None = None, min_prob: float | None = None):
    """Force one recorded output through `drafter` (anything with `open`) and add what happened to `tally`.

    A session's `draft` may answer with its library's own kind of draft, when that has a method `tree` that makes a
    `DraftTree` of it: the conversion is not timed.
    """
    output, looping = item.output, in_loop(item.output).tolist()
    total = len(output)
    started = thread_time_ns()
    session = drafter.open(item.context)
    tally.open_ns.append(thread_time_ns() - started)
    tally.open_tokens.append(len(item.context))
    tally.items += 1
    _commit(session, output[:1], tally)
    position = 1
    while position < total:
        started = thread_time_ns()
        tree = session.draft(max_nodes, min_prob)
        tally.draft_ns.append(thread_time_ns() - started)
        if not isinstance(tree, DraftTree):
            tree = tree.tree()
        accepted = tally.walk(tree, output[position:])
        end = min(position + accepted + 1, total)
        tally.steps += 1
        tally.emitted += end - position
        if looping[position]:
            tally.loop_steps += 1
            tally.loop_emitted += end - position
        _commit(session, output[position:end], tally)
        position = end
    started = thread_time_ns()
    session.close()
    tally.close_ns.append(thread_time_ns() - started)
    tally.close_tokens.append(total)


def _commit(session, tokens, tally: Tally) -> None:
    started = thread_time_ns()
    session.commit(tokens)
    tally.commit_ns.append(thread_time_ns() - started)
    tally.commit_tokens.append(len(tokens))


def replay_items(
    drafter,
    items: Iterable[Item],
    *,
    max_nodes: int | None = None,
    min_prob: float | None = None,
    progress: Callable[[int], object] = lambda tokens: None,
) -> Tally:
    """Replay items one after the other through one drafter; `progress` is told the output tokens of each."""
    tally = Tally()
    for item in items:
        replay_item(drafter, item, tally, max_nodes=max_nodes, min_prob=min_prob)
        progress(len(item.output))
    return tally
