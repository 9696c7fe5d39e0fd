"""One calibrated distribution from every source.

For one place in the tree, `gather` collects the candidates and the evidence for each; this function is the list of
sources. `score` turns evidence into probabilities: with s the strength of a cell, b its bias, and w the sum of the
weights of four rows (the kinds of evidence that name the candidate, the situation, the last token, the one before),

    d(c) = w0 + sum over slots of (w s + b)        P(c) = exp d(c) / (1 + sum over candidates of exp d(c'))

the 1 standing for "none of these". `learn` is one step of gradient descent on the log loss of that softmax for the
weights and biases, and counts hits and trials in the cells. It is called once per committed token, on the evidence
there was before it: what the target writes is the only teacher.

It is logistic mixing as in the PAQ compressors (Mahoney 2005) over learned PPM escapes, with the weights chosen by
which evidence is present. Both go slot by slot over all candidates, so that many cells are fetched at once. Cost: about
1.5 microseconds a place; a place is evaluated once per expanded node and once per committed token.
"""

from __future__ import annotations

import math

import numpy as np

from redraft.retrieval import evidence as ev
from redraft.retrieval import prefix_trie as pt
from redraft.retrieval.context_table import child_key, prefetch_node, prefetch_slot, root_key
from redraft.retrieval.draft_tree import Source
from redraft.retrieval.exponential import exponential
from redraft.retrieval.kernel import inner
from redraft.retrieval.knowledge import CURSOR
from redraft.retrieval.model import BIAS, RATE, STRENGTH, TRIALS
from redraft.retrieval.prefetch import prefetch
from redraft.retrieval.sources import contexts, copy_pointer, corpus, dense, proposal, recycling, track_record

WEIGHT_RATE = 0.003
LAST_RATE = 0.006  # the same for the weights by the last token, of which each sees little
BIAS_RATE = 0.03
MAX_TRIALS = 255
SMALL = 0.06  # growth of log(1 - p) up to which three terms of its series are exact
MIN_RATE = 1e-4
MIN_STRENGTH = math.log(MIN_RATE / (1 - MIN_RATE))
# By the number of trials: log(1 - share of one trial), what log p grows by at a miss.
LOG_KEPT = np.concatenate([[0], np.log1p(-1 / (np.arange(1, MAX_TRIALS + 1) + 0.5))]).astype(np.float32)

# bits of `enabled`
_SESSION, _MEMORY, _CORPUS, _POINTER = Source.SESSION, Source.MEMORY, Source.CORPUS, Source.POINTER
_RECYCLING, _SKIP, _FREQUENT, _CALLER = Source.RECYCLING, Source.SKIP, Source.FREQUENT, Source.CALLER
_ASKED_IN_A_COPY = 1 << _SESSION | 1 << _POINTER | 1 << _CALLER

_LONG_AGO = 1 << 40  # positions in the memory are no times

# columns of Places.pointers
SESSION_POINTER, MEMORY_POINTER = 0, 3


@inner(inline=False)
def copy_place(source, target):
    """Place 0 of `target` becomes place 0 of `source`, but for the caller's draft."""
    target.filled[0], target.now[0] = source.filled[0], source.now[0]
    target.following[0] = source.following[0]
    for column in range(pt.MAX_CONTEXT):
        target.windows[0, column] = source.windows[0, column]
    for column in range(6):
        target.pointers[0, column] = source.pointers[0, column]
    for column in range(CURSOR * ev.MAX_CORPORA):
        target.cursors[0, column] = source.cursors[0, column]


@inner(inline=False)
def advance(knowledge, places, source, target, token):
    """Place `target` is place `source` and then `token` (source = target moves it)."""
    windows = places.windows
    for back in range(pt.MAX_CONTEXT - 1, 0, -1):
        windows[target, back] = windows[source, back - 1]
    windows[target, 0] = token
    places.filled[target] = min(places.filled[source] + 1, pt.MAX_CONTEXT)
    if places.following[source]:
        places.following[target] = dense.still_followed(
            knowledge.neighbours, places.following[source], places.now[source], token
        )
    else:
        places.following[target] = 0
    places.now[target] = places.now[source] + 1
    for column in range(6):
        places.pointers[target, column] = places.pointers[source, column]
    copy_pointer.step(knowledge.session, places.pointers, target, SESSION_POINTER, token)
    copy_pointer.step(knowledge.memory, places.pointers, target, MEMORY_POINTER, token)
    corpus.advance(knowledge, places, source, target, token)


@inner(inline=False)
def foresee(knowledge, last, window, filled):
    """Have the memory fetched that `gather` looks at first where the text ends with `window` (newest token first,
    `filled` of them valid) and then `last`."""
    key = child_key(root_key(pt.ROOT), last)
    prefetch_slot(knowledge.session, key)
    prefetch_slot(knowledge.memory, key)
    for back in range(min(filled, pt.MAX_CONTEXT - 1)):
        key = child_key(key, window[back])
        prefetch_slot(knowledge.session, key)
        prefetch_slot(knowledge.memory, key)
    before_last = window[0] if filled > 0 else np.int32(-1)
    key = child_key(root_key(pt.SKIP_ROOT), before_last)
    prefetch_slot(knowledge.session, key)
    prefetch_slot(knowledge.memory, key)
    recycling.prefetch_slots(knowledge.recycled, before_last, last)
    recycling.prefetch_slots(knowledge.recycled_base, before_last, last)
    weights = knowledge.model.weights
    prefetch(weights, ev.token_row(ev.LAST_ROWS, last))
    prefetch(weights, ev.token_row(ev.LAST_ROWS, last) + 1)
    prefetch(weights, ev.token_row(ev.BEFORE_LAST_ROWS, before_last))
    prefetch(weights, ev.token_row(ev.BEFORE_LAST_ROWS, before_last) + 1)


@inner(inline=False)
def _foresee_rows(knowledge, window, filled):
    """The same for what the slots lead to, `window` being the whole end of the text."""
    key = root_key(pt.ROOT)
    for back in range(filled):
        key = child_key(key, window[back])
        prefetch_node(knowledge.session, key)
        prefetch_node(knowledge.memory, key)
    if filled > 1:
        key = child_key(root_key(pt.SKIP_ROOT), window[1])
        prefetch_node(knowledge.session, key)
        prefetch_node(knowledge.memory, key)
    last = window[0] if filled > 0 else np.int32(-1)
    before_last = window[1] if filled > 1 else np.int32(-1)
    recycling.prefetch_rows(knowledge.recycled, before_last, last)
    recycling.prefetch_rows(knowledge.recycled_base, before_last, last)


@inner
def _uses(enabled, source):
    return enabled >> source & 1


@inner(inline=False)
def gather(knowledge, places, place, ballot, draft, enabled, fitting):
    """Collect the candidates at a place and the evidence for each. THE LIST OF SOURCES.

    `draft` is the caller's own (tokens, parents, probs). `enabled` has a bit per `Source`. `fitting` is how often the
    least probability that a candidate must have goes into what all together can have: more candidates than that are not
    needed. They are few in any case (48), so the sources stand in order of how much they know. In a copy whose pointer
    is sure only the session's text is asked, and neither ages nor track records are evidence.
    """
    if len(knowledge.kinds):
        ev.clear(ballot, ev.MAX_CANDIDATES, ev.MIN_BREADTH)
    else:
        ev.clear(ballot, ev.FEWER_CANDIDATES, ev.FEWER_BREADTH)
    ev.narrow(ballot, fitting, 0.0)
    cells = knowledge.model.cells
    window, filled, path, pointers = places.windows[place], places.filled[place], places.path, places.pointers
    last = window[0] if filled > 0 else -1
    before_last = window[1] if filled > 1 else -1

    _foresee_rows(knowledge, window, filled)

    in_a_copy = copy_pointer.is_sure(cells, pointers, place, SESSION_POINTER, ev.SESSION_POINTER_CELLS)
    if in_a_copy:
        enabled &= _ASKED_IN_A_COPY

    if _uses(enabled, _CALLER):  # the caller's own draft
        proposal.add_proposed(ballot, draft[0], draft[1], draft[2], places.proposed[place])

    # All look-ups first: what one has asked for comes while the next is under way.
    memory_path, prompts_path = path[pt.MAX_CONTEXT :], path[2 * pt.MAX_CONTEXT :]
    session_stored, session_length, memory_stored, outputs_length = 0, 0, 0, 0
    prompts_stored, prompts_length = 0, 0
    if _uses(enabled, _SESSION):
        session_stored, session_length = pt.look_up(knowledge.session, window, filled, path)
    if _uses(enabled, _MEMORY):
        memory_stored, outputs_length = pt.look_up(knowledge.memory, window, filled, memory_path)
        prompts_stored, prompts_length = pt.look_up(knowledge.prompts, window, filled, prompts_path)
    if not in_a_copy:
        contexts.foresee_skips(knowledge.session, before_last)
        contexts.foresee_skips(knowledge.memory, before_last)
    contexts.foresee_contexts(knowledge.session, path, session_stored)

    session_total, session_distinct = 0, 0
    if _uses(enabled, _SESSION):  # this session's text
        if _uses(enabled, _POINTER):  # and the passage of it that is being copied
            copy_pointer.seat(knowledge.session, pointers, place, SESSION_POINTER, path, session_stored, session_length)
            pointed = copy_pointer.add_pointed(
                ballot, knowledge.session, pointers, place, SESSION_POINTER,
                ev.SESSION_POINTER, ev.SESSION_POINTER_CELLS,
            )  # fmt: skip
            ev.narrow(ballot, fitting, cells[pointed, RATE])
        session_total, session_distinct, latest = contexts.add_contexts(
            ballot, cells, knowledge.session, knowledge.session, path, session_stored, session_length, places.now[place],
            ev.SESSION_FIRST, ev.SESSION_NEXT, ev.SESSION_FIRST_CELLS, ev.SESSION_NEXT_CELLS, ev.BY_SESSION,
        )  # fmt: skip
        ev.narrow(ballot, fitting, cells[latest, RATE])

    memory_total, memory_distinct = 0, 0
    # Of outputs and prompts, those speak that match longer: of two memories that say the same, one is enough.
    prompts_speak = prompts_length > outputs_length
    memory_length = max(prompts_length, outputs_length)
    if _uses(enabled, _MEMORY):  # earlier outputs of the namespace, and earlier prompts where they are remembered
        if _uses(enabled, _POINTER):
            copy_pointer.seat(
                knowledge.memory, pointers, place, MEMORY_POINTER, memory_path, memory_stored, outputs_length
            )
            pointed = copy_pointer.add_pointed(
                ballot, knowledge.memory, pointers, place, MEMORY_POINTER,
                ev.MEMORY_POINTER, ev.MEMORY_POINTER_CELLS,
            )  # fmt: skip
            ev.narrow(ballot, fitting, cells[pointed, RATE])
        memory_total, memory_distinct, latest = contexts.add_contexts(
            ballot, cells, knowledge.session,
            knowledge.prompts if prompts_speak else knowledge.memory,
            prompts_path if prompts_speak else memory_path, prompts_stored if prompts_speak else memory_stored,
            memory_length, _LONG_AGO,
            ev.MEMORY_FIRST, ev.MEMORY_NEXT, ev.MEMORY_FIRST_CELLS, ev.MEMORY_NEXT_CELLS, ev.BY_MEMORY,
        )  # fmt: skip
        ev.narrow(ballot, fitting, cells[latest, RATE])

    if _uses(enabled, _RECYCLING) and last >= 0:  # the target's own earlier opinions
        recycling.add_recycled(
            ballot, knowledge.recycled, knowledge.recycled_base,
            knowledge.successor_ids, knowledge.successor_probs, before_last, last,
        )  # fmt: skip

    corpus_total, corpus_distinct, corpus_length = 0, 0, 0
    if _uses(enabled, _CORPUS):  # corpus indexes
        corpus_total, corpus_distinct, corpus_length = corpus.add_corpora(ballot, knowledge, places, place)

    store_similarity, store_depth = np.float32(-1.0), np.int64(0)
    own_similarity, own_depth = np.float32(-1.0), np.int64(0)
    # Neighbours of the target's state; there are none where these sources are not enabled.
    if places.following[place] and not in_a_copy:
        store_similarity, store_depth = dense.add_followed(
            ballot, knowledge.neighbours, places.following[place], places.now[place], 0, ev.DENSE, ev.DENSE_CELLS
        )
        own_similarity, own_depth = dense.add_followed(
            ballot, knowledge.neighbours, places.following[place], places.now[place], 1, ev.RERANK, ev.RERANK_CELLS
        )

    if not in_a_copy:
        contexts.foresee_ages(ballot, knowledge.session)
        track_record.foresee_track_records(ballot, cells, last)
    if _uses(enabled, _SKIP) and before_last >= 0:  # contexts that skip a token
        contexts.add_skips(ballot, knowledge.session, before_last, ev.SESSION_SKIP, ev.SESSION_SKIP_CELLS)
        contexts.add_skips(ballot, knowledge.memory, before_last, ev.MEMORY_SKIP, ev.MEMORY_SKIP_CELLS)

    if _uses(enabled, _FREQUENT):  # the memory's most frequent tokens
        contexts.add_frequent(ballot, knowledge.frequent)

    header = ballot.header
    header[ev.SITUATION] = ev.IN_A_COPY if in_a_copy else ev.situation(session_length, memory_length, corpus_length)
    header[ev.LAST_ROW] = ev.token_row(ev.LAST_ROWS, last)
    header[ev.BEFORE_LAST_ROW] = ev.token_row(ev.BEFORE_LAST_ROWS, before_last)
    # What a matching source did not name is evidence as well, and so is how long ago a token was used.
    if session_total > 0:
        cell = ev.absent_cell(ev.SESSION_ABSENT_CELLS, session_length, session_total, session_distinct)
        contexts.mark_absent(ballot, ev.SESSION_FIRST, cell)
    if memory_total > 0:
        cell = ev.absent_cell(ev.MEMORY_ABSENT_CELLS, memory_length, memory_total, memory_distinct)
        contexts.mark_absent(ballot, ev.MEMORY_FIRST, cell)
    if corpus_total > 0:
        cell = ev.absent_cell(ev.CORPUS_ABSENT_CELLS, corpus_length, corpus_total, corpus_distinct)
        contexts.mark_absent(ballot, ev.CORPUS_FIRST, cell)
    if store_similarity >= 0:
        cell = ev.dense_absent_cell(ev.DENSE_ABSENT_CELLS, store_similarity, store_depth)
        contexts.mark_absent(ballot, ev.DENSE, cell)
    if own_similarity >= 0:
        cell = ev.dense_absent_cell(ev.RERANK_ABSENT_CELLS, own_similarity, own_depth)
        contexts.mark_absent(ballot, ev.RERANK, cell)
    if in_a_copy:
        return
    if _uses(enabled, _SESSION):
        contexts.add_ages(ballot, knowledge.session, places.now[place], last, before_last)
    track_record.add_track_records(ballot, cells, last)


@inner(inline=False)
def score(model, ballot):
    """Fill `ballot.scores` with P(candidate) for every candidate."""
    header, scores, named_by, cells, weights = ballot.header, ballot.scores, ballot.named_by, model.cells, model.weights
    n, situation, present = header[ev.N_CANDIDATES], header[ev.SITUATION], header[ev.PRESENT]
    last, before_last = header[ev.LAST_ROW], header[ev.BEFORE_LAST_ROW]
    common = weights[situation, ev.N_SLOTS] + weights[last, ev.N_SLOTS] + weights[before_last, ev.N_SLOTS]
    for row in range(n):
        scores[row] = weights[named_by[row], ev.N_SLOTS] + common
    slots, n_slots = ballot.slots, 0
    for slot in range(ev.N_SLOTS):
        slots[n_slots] = slot
        n_slots += present >> slot & 1
    header[ev.N_PRESENT] = n_slots
    for i in range(n_slots):
        slot = slots[i]
        common = weights[situation, slot] + weights[last, slot] + weights[before_last, slot]
        for row in range(n):  # candidates without a cell here have cell 0, which adds nothing
            cell = ballot.cells[slot, row]
            scores[row] += (weights[named_by[row], slot] + common) * cells[cell, STRENGTH] + cells[cell, BIAS]
    total = 1.0
    for row in range(n):
        scores[row] = exponential(max(min(scores[row], 30.0), -30.0))
        total += scores[row]
    scale = 1.0 / total
    for row in range(n):
        scores[row] *= scale


@inner
def _is_absence(cell):
    return (cell >= ev.SESSION_ABSENT_CELLS) & (cell < ev.SESSION_POINTER_CELLS)


@inner(inline=False)
def strongest_slot(model, ballot, row):
    """The slot whose evidence speaks most for a candidate, among those that can name one; tells the node's source."""
    best, best_strength = ev.FREQUENT, np.float32(-1e30)
    for i in range(ballot.header[ev.N_PRESENT]):  # without jumps, which nobody could guess
        slot = ballot.slots[i]
        cell = ballot.cells[slot, row]
        strength = model.cells[cell, STRENGTH]
        better = (cell != 0) & (slot < ev.AGE) & (strength > best_strength) & (_is_absence(cell) == 0)
        best = slot if better else best
        best_strength = strength if better else best_strength
    return best


@inner(inline=False)
def learn(model, ballot, token):
    """The target wrote `token` where `ballot` (scored) was open."""
    weights, scores, named_by = model.weights, ballot.scores, ballot.named_by
    slope = np.float32(0.0)
    for row in range(ballot.header[ev.N_CANDIDATES]):
        scores[row] = (1.0 if ballot.tokens[row] == token else 0.0) - scores[row]  # the error, from here on
        error = np.float32(scores[row])
        weights[named_by[row], ev.N_SLOTS] += np.float32(WEIGHT_RATE) * error
        slope += error
    _learn_common(weights, ballot.header, ev.N_SLOTS, slope)
    for i in range(ballot.header[ev.N_PRESENT]):
        _learn_slot(model, ballot, token, ballot.slots[i])


@inner
def _learn_common(weights, header, slot, slope):
    """One step for the weights that all candidates share."""
    weights[header[ev.SITUATION], slot] += np.float32(WEIGHT_RATE) * slope
    weights[header[ev.LAST_ROW], slot] += np.float32(LAST_RATE) * slope
    weights[header[ev.BEFORE_LAST_ROW], slot] += np.float32(WEIGHT_RATE) * slope


@inner(inline=False)
def _learn_slot(model, ballot, token, slot):
    """The same for the cells and weights of one slot; `ballot.scores` holds the errors."""
    cells, weights = model.cells, model.weights
    slope = np.float32(0.0)
    for row in range(ballot.header[ev.N_CANDIDATES]):
        cell = ballot.cells[slot, row]
        if cell == 0:
            continue
        error = np.float32(ballot.scores[row])
        step = error * cells[cell, STRENGTH]
        slope += step
        weights[ballot.named_by[row], slot] += np.float32(WEIGHT_RATE) * step
        if not _is_absence(cell):
            cells[cell, BIAS] += np.float32(BIAS_RATE) * error
        hit = np.float32(1.0 if ballot.tokens[row] == token else 0.0)
        n = min(cells[cell, TRIALS] + np.float32(1.0), np.float32(MAX_TRIALS))
        share = np.float32(1.0) / (n + np.float32(0.5))
        p = cells[cell, RATE]
        odds = p / (np.float32(1.0) - p)
        p += (hit - p) * share
        cells[cell, TRIALS], cells[cell, RATE] = n, p
        p = min(max(p, np.float32(MIN_RATE)), np.float32(1.0 - MIN_RATE))
        if hit > 0 or odds * share > np.float32(SMALL):
            cells[cell, STRENGTH] = np.float32(math.log(p / (np.float32(1.0) - p)))
        else:  # a miss, by far the most frequent case: log p grows by log(1 - share), log(1 - p) by nearly odds * share
            grown = odds * share
            grown *= np.float32(1.0) - grown * (np.float32(0.5) - grown * np.float32(1 / 3))
            weaker = cells[cell, STRENGTH] + LOG_KEPT[int(n)] - grown
            cells[cell, STRENGTH] = max(weaker, np.float32(MIN_STRENGTH))
    _learn_common(weights, ballot.header, slot, slope)
