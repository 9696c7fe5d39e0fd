"""The specification of `retrieval/blend.py` in plain Python: which tokens are candidates, what is said of each, and how
that becomes probabilities and is learned. Corpus indexes have twins of their own; here there are none.

Which cell describes a situation is `evidence.py`'s business: its functions and numbers are taken as they are.
"""

from __future__ import annotations

import math

from naive_memory import NaiveMemory
from naive_pointer import NaivePointer
from naive_recycling import NaiveRecycling

from redraft.retrieval import blend, model, namespace, session
from redraft.retrieval import evidence as ev
from redraft.retrieval.draft_tree import Source
from redraft.retrieval.neighbours import CONFIDENCE_EDGES, CURSORS, LENGTH, SHARPNESS
from redraft.retrieval.sources import contexts, copy_pointer

ALL_SOURCES = sum(1 << source for source in range(len(Source.NAMES)))


class NaiveNamespace:
    def __init__(self, budget=None, prompt_budget=0):
        self.memory = NaiveMemory(budget)
        self.prompts = NaiveMemory(prompt_budget)
        self.recycled = NaiveRecycling(namespace.RECYCLED_ROWS)
        start = model.new_model()
        self.cells = start.cells.astype(float).tolist()
        self.weights = start.weights.astype(float).tolist()


class Place:
    """Where the sources stand after a text: the session's own, or a node of a draft tree.

    `neighbours`: for the stores' search and the session's own, (length of the text then, confidence bucket, [(similarity,
    continuation)] of those that agree so far).
    """

    def __init__(self, text, pointers, proposed, neighbours=((0, 0, []), (0, 0, []))):
        self.text, self.pointers, self.proposed, self.neighbours = text, pointers, proposed, neighbours

    def after(self, token, proposal):
        """The place one token further on."""
        pointers = [pointer.copy() for pointer in self.pointers]
        for pointer in pointers:
            pointer.step(token)
        neighbours = [
            (found, confidence, [(s, c) for s, c in left if c[len(self.text) - found :][:1] == [token]])
            for found, confidence, left in self.neighbours
        ]
        return Place([*self.text, token], pointers, follow(proposal, self.proposed, token), neighbours)


def follow(proposal, at, token):
    """The child of node `at` (-1: the root) of the caller's draft that carries `token`; None if there is none."""
    if at is not None:
        for node, (other, parent, _) in enumerate(proposal):
            if parent == at and other == token:
                return node
    return None


class Evidence:
    """What is known of one candidate: a cell per slot, and the kinds of evidence that name it."""

    def __init__(self):
        self.cells, self.named_by = {}, 0


class Ballot(dict):
    """token -> Evidence, in the order in which candidates came; there is not room for all.

    `common` are the rows of weights that all candidates have in common, each with its rate of learning."""

    common: list

    def __init__(self, fitting):
        self.most = ev.FEWER_CANDIDATES
        self.fitting = fitting
        self.narrow(0.0)

    def narrow(self, taken):
        """No more candidates than could come into a tree, now that one has the probability `taken`."""
        further = int(ev.BREADTH * ev.FEWER_BREADTH * self.fitting * max(1 - taken, ev.LEAST_LEFT))
        self.most = min(self.most, max(ev.FEWER_BREADTH, further + 1))

    def named(self, token):
        if token in self or len(self) < self.most:
            return self.setdefault(token, Evidence())
        return None


class NaiveSession:
    """`proposal`: the caller's draft as [(token, parent, path probability)]."""

    def __init__(self, shared: NaiveNamespace, prompt, enabled=ALL_SOURCES, name="session"):
        self.shared, self.enabled, self.name = shared, enabled, name
        self.recycled = NaiveRecycling(session.RECYCLED_ROWS)
        self.proposal = []
        self.prompt = list(prompt)
        self.remembered = max(len(prompt) - session.PROMPT_TAIL, 0)
        self.own = NaiveMemory()
        self.own.write("text", prompt)
        self.place = Place(list(prompt), [NaivePointer(), NaivePointer()], None)

    def propose(self, proposal):
        self.proposal = proposal
        self.place.proposed = -1 if proposal else None

    def find(self, own, neighbours, confidence):
        """What a search with the target's state found, best first, is followed from here on."""
        bucket = sum(confidence > edge for edge in CONFIDENCE_EDGES)
        found = list(self.place.neighbours)
        found[own] = len(self.place.text), bucket, [(s, list(c)[:LENGTH]) for s, c in neighbours[:CURSORS]]
        self.place.neighbours = found

    def commit(self, tokens, candidates=None):
        """Learn `tokens`; returns what was said of each beforehand: [{token: (Evidence, probability)}]."""
        said = []
        for token in tokens:
            ballot = self.gather(self.place)
            scores = self.score(ballot)
            said.append({candidate: (ballot[candidate], scores[candidate]) for candidate in ballot})
            self.learn(ballot, scores, token)
            self.place = self.place.after(token, self.proposal)
            self.own.write("text", [token])
        if len(self.place.text) - self.remembered >= session.SHARE_LAG + session.SHARE_STEP:
            self._remember(len(self.place.text) - session.SHARE_LAG)
        if candidates is not None:
            self.recycled.learn(*candidates)
            self.shared.recycled.learn(*candidates)
        return said

    def _remember(self, end):
        self.shared.memory.append(self.name, self.place.text[self.remembered : end])
        self.remembered = end

    def close(self):
        self._remember(len(self.place.text))
        self.shared.prompts.append(self.name, self.prompt)

    # --- evidence ----------------------------------------------------------------------------------------------------
    def uses(self, source):
        return bool(self.enabled >> source & 1)

    def gather(self, place, fitting=1e9):
        """The candidates at a place, of which no more than `fitting` could be of use, as a Ballot. Seats the place's pointers."""
        ballot = Ballot(fitting)
        in_a_copy = self._is_sure(place.pointers[0])
        if self.uses(Source.CALLER):
            self._add_proposal(ballot, place)
        matched, lengths = [], {}
        for source, memory, pointer, slots, cells, named_by in self._texts(place):
            if not self.uses(source) or (in_a_copy and source != Source.SESSION):
                continue
            length, spoken = memory.longest(place.text), memory
            if source == Source.MEMORY and self.shared.prompts.longest(place.text) > length:
                spoken = self.shared.prompts
            if self.uses(Source.POINTER):
                self._add_pointer(ballot, memory, pointer, place.text, length, slots[2], cells[3])
            match, total, distinct, latest = self._add_contexts(
                ballot, spoken, place.text, slots[:2], cells[:2], named_by
            )
            ballot.narrow(self.shared.cells[latest][model.RATE])
            lengths[source] = match
            if match:
                matched.append((slots[0], ev.absent_cell(cells[2], match, total, distinct)))
        if not in_a_copy:
            self._add_other_sources(ballot, place, matched)
        situation = ev.situation(lengths.get(Source.SESSION, 0), lengths.get(Source.MEMORY, 0), 0)
        ballot.common = [
            (ev.IN_A_COPY if in_a_copy else situation, blend.WEIGHT_RATE),
            (ev.LAST_ROWS + (place.text[-1] if place.text else -1) % ev.N_TOKEN_ROWS, blend.LAST_RATE),
            (ev.BEFORE_LAST_ROWS + (place.text[-2] if len(place.text) > 1 else -1) % ev.N_TOKEN_ROWS, blend.WEIGHT_RATE),
        ]
        for slot, cell in matched:
            for evidence in ballot.values():
                evidence.cells.setdefault(slot, cell)
        if not in_a_copy:
            if self.uses(Source.SESSION):
                self._add_ages(ballot, place.text)
            self._add_track_records(ballot, place.text)
        return ballot

    def _add_other_sources(self, ballot, place, matched):
        if self.uses(Source.RECYCLING):
            self._add_recycled(ballot, place.text)
        for own, slot, cells, absent in (
            (0, ev.DENSE, ev.DENSE_CELLS, ev.DENSE_ABSENT_CELLS),
            (1, ev.RERANK, ev.RERANK_CELLS, ev.RERANK_ABSENT_CELLS),
        ):
            if (best := self._add_neighbours(ballot, place, own, slot, cells)) is not None:
                matched.append((slot, ev.dense_absent_cell(absent, *best)))
        if self.uses(Source.SKIP):
            for memory, slot, base in (
                (self.own, ev.SESSION_SKIP, ev.SESSION_SKIP_CELLS),
                (self.shared.memory, ev.MEMORY_SKIP, ev.MEMORY_SKIP_CELLS),
            ):
                self._add_skips(ballot, memory, place.text, slot, base)
        if self.uses(Source.FREQUENT):
            for rank, token in enumerate(self.shared.memory.frequent):
                if (evidence := ballot.named(token)) is not None:
                    evidence.cells[ev.FREQUENT] = ev.FREQUENT_CELLS + rank

    def _texts(self, place):
        yield (
            Source.SESSION, self.own, place.pointers[0],
            (ev.SESSION_FIRST, ev.SESSION_NEXT, ev.SESSION_POINTER),
            (ev.SESSION_FIRST_CELLS, ev.SESSION_NEXT_CELLS, ev.SESSION_ABSENT_CELLS, ev.SESSION_POINTER_CELLS),
            ev.BY_SESSION,
        )  # fmt: skip
        yield (
            Source.MEMORY, self.shared.memory, place.pointers[1],
            (ev.MEMORY_FIRST, ev.MEMORY_NEXT, ev.MEMORY_POINTER),
            (ev.MEMORY_FIRST_CELLS, ev.MEMORY_NEXT_CELLS, ev.MEMORY_ABSENT_CELLS, ev.MEMORY_POINTER_CELLS),
            ev.BY_MEMORY,
        )  # fmt: skip

    def _add_proposal(self, ballot, place):
        children = [node for node, (_, parent, _) in enumerate(self.proposal) if parent == place.proposed]
        above = 1.0 if place.proposed in (None, -1) else self.proposal[place.proposed][2]
        for rank, node in enumerate(children):
            token, _, prob = self.proposal[node]
            evidence = ballot.named(token)
            bucket = ev.probability_bucket(prob / above if above > 0 else 0.0)
            if evidence is not None:
                at_root = int(place.proposed == -1)
                evidence.cells[ev.CALLER] = ev.CALLER_CELLS + (bucket * 8 + min(rank, 7)) * 2 + at_root
                evidence.named_by |= ev.BY_CALLER

    def _add_contexts(self, ballot, memory, text, slots, cells, named_by):
        """The longest context, then shorter ones that occurred more often; (length, total, distinct, cell of its latest
        successor) of the longest."""
        longest, levels, latest = (0, 0, 0), 0, 0
        last_total = 0
        for length in range(memory.longest(text), 0, -1):
            key = "plain", tuple(text[-length:])
            total = len(memory.seen[key])
            if total <= last_total or levels == contexts.MAX_LEVELS:
                continue
            successors = memory.successors(key)[: min(contexts.MAX_SUCCESSORS, ballot.most // 2)]
            # a session's own text is timed from 1: what follows it next would be written at len(text) + 1
            age = len(text) + 1 - memory.latest[key] if memory is self.own else 10**9
            for rank, (token, count) in enumerate(successors):
                cell = ev.first_cell(cells[0], levels, length, count, total, ev.recency(rank, age))
                if rank == levels == 0:
                    latest = cell
                evidence = ballot.named(token)
                if evidence is None:
                    continue
                if slots[0] not in evidence.cells:
                    evidence.cells[slots[0]] = cell
                    evidence.named_by |= named_by
                elif slots[1] not in evidence.cells:
                    evidence.cells[slots[1]] = ev.next_cell(cells[1], length, count, total)
            if levels == 0:
                longest = length, total, len(successors)
            levels, last_total = levels + 1, total
        return *longest, latest

    def _add_pointer(self, ballot, memory, pointer, text, match, slot, base):
        if match:
            time = memory.latest["plain", tuple(text[-match:])]
            document, at = memory.place_of(time) if time is not None else (None, None)
            pointer.seat(document and document.tokens, at, match)
        if pointer.at is None:
            return
        evidence = ballot.named(pointer.proposed())
        if evidence is not None:
            evidence.cells[slot] = self._pointer_cell(pointer, base)
            evidence.named_by |= ev.BY_POINTER
            ballot.narrow(self.shared.cells[evidence.cells[slot]][model.RATE])

    @staticmethod
    def _pointer_cell(pointer, base):
        recent = int("".join(map(str, pointer.misses[4:])), 2)
        older = int(any(pointer.misses[:4]))
        return base + (ev.run_bucket(pointer.run) * 16 + recent) * 2 + older

    def _is_sure(self, pointer):
        """Whether only the session's text is to be asked: its pointer is seated, and hardly ever wrong in such a state."""
        if pointer.at is None or pointer.run < copy_pointer.LONG:
            return False
        return self.shared.cells[self._pointer_cell(pointer, ev.SESSION_POINTER_CELLS)][model.RATE] >= copy_pointer.SURE

    def _add_recycled(self, ballot, text):
        for n, slot, base in (
            (2, ev.RECYCLED_PAIR, ev.RECYCLED_PAIR_CELLS),
            (1, ev.RECYCLED, ev.RECYCLED_CELLS),
        ):
            if len(text) < n:
                continue
            key = (text[-2] if n == 2 else -1), text[-1]
            ids, probs = self.recycled.find(*key) or self.shared.recycled.find(*key) or ([], [])
            for rank, (token, prob) in enumerate(zip(ids, probs)):
                evidence = ballot.named(token)
                if evidence is not None and slot not in evidence.cells:
                    evidence.cells[slot] = base + rank * 8 + ev.probability_bucket(prob)
                    evidence.named_by |= ev.BY_RECYCLING

    @staticmethod
    def _add_neighbours(ballot, place, own, slot, base):
        """The next tokens of the neighbours; returns (greatest similarity, depth), None where none speaks."""
        found, confidence, left = place.neighbours[own]
        depth = len(place.text) - found
        speaking = [(s, c[depth]) for s, c in left if depth < len(c)]
        total = sum(math.exp(SHARPNESS * (s - 1)) for s, _ in speaking)
        for similarity, token in speaking:
            evidence = ballot.named(token)
            if evidence is not None and slot not in evidence.cells:
                share = sum(math.exp(SHARPNESS * (s - 1)) for s, t in speaking if t == token) / total
                evidence.cells[slot] = ev.dense_cell(base, similarity, share, depth, confidence)
                if not own:
                    evidence.named_by |= ev.BY_DENSE
        return (max(s for s, _ in speaking), depth) if speaking else None

    @staticmethod
    def _add_skips(ballot, memory, text, slot, base):
        key = ("skip", (text[-2],)) if len(text) > 1 else None
        total = len(memory.seen.get(key, []))
        for rank, (token, count) in enumerate(memory.successors(key)[: min(contexts.MAX_SKIPS, ballot.most)]):
            evidence = ballot.named(token)
            if evidence is not None:
                counts = 0 if count == 1 else 1 if count == 2 else 2 if count <= 5 else 3
                totals = total - 1 if total <= 2 else min(ev.rest_bucket(total) - 1, 5)
                evidence.cells[slot] = base + (rank * 4 + counts) * 6 + totals
                evidence.named_by |= ev.BY_SKIP

    def _add_ages(self, ballot, text):
        """Age by the last use that had a successor: 0 = none, else 1 + log2 of the distance."""
        for token, evidence in ballot.items():
            used = self.own.latest.get(("plain", (token,)))
            # `used` is the time of the successor: tokens are timed from 1, so the token itself stands at place used - 2
            age = 0 if used is None else min(int(math.log2(max(len(text) - (used - 2), 1))) + 1, 15)
            repeats = 2 * (text[-1:] == [token]) + (text[-2:-1] == [token])
            evidence.cells[ev.AGE] = ev.AGE_CELLS + age * 4 + repeats

    @staticmethod
    def _add_track_records(ballot, text):
        last = text[-1] if text else -1
        for token, evidence in ballot.items():
            alone = (token * 0x9E3779B1 >> 13) % (1 << ev.TRACK_RECORD_BITS)
            pair = ((token * 0x9E3779B1 + last) * 0x2545F491 >> 20) % (1 << ev.TRACK_RECORD_PAIR_BITS)
            evidence.cells[ev.TRACK_RECORD] = ev.TRACK_RECORD_CELLS + alone
            evidence.cells[ev.TRACK_RECORD_PAIR] = ev.TRACK_RECORD_PAIR_CELLS + pair

    # --- arithmetic --------------------------------------------------------------------------------------------------
    def score(self, ballot):
        """{token: probability}: a softmax over the candidates and "none of them", which has logit 0."""
        exponentials = {}
        for token, evidence in ballot.items():
            rows = [self.shared.weights[number] for number, _ in [(evidence.named_by, 0), *ballot.common]]
            logit = sum(row[ev.N_SLOTS] for row in rows)
            for slot, cell in evidence.cells.items():
                logit += (
                    sum(row[slot] for row in rows) * self.shared.cells[cell][model.STRENGTH]
                    + self.shared.cells[cell][model.BIAS]
                )
            exponentials[token] = math.exp(min(logit, 30.0))
        total = 1.0 + sum(exponentials.values())
        return {token: exponential / total for token, exponential in exponentials.items()}

    def learn(self, ballot, scores, truth):
        for token, evidence in ballot.items():
            hit = float(token == truth)
            error = hit - scores[token]
            rows = [(evidence.named_by, blend.WEIGHT_RATE), *ballot.common]
            for row, rate in rows:
                self.shared.weights[row][ev.N_SLOTS] += rate * error
            for slot, number in sorted(evidence.cells.items()):
                cell = self.shared.cells[number]
                for row, rate in rows:
                    self.shared.weights[row][slot] += rate * error * cell[model.STRENGTH]
                if not ev.SESSION_ABSENT_CELLS <= number < ev.SESSION_POINTER_CELLS:
                    cell[model.BIAS] += blend.BIAS_RATE * error
                self._count(cell, hit)

    @staticmethod
    def _count(cell, hit):
        trials = min(cell[model.TRIALS] + 1, blend.MAX_TRIALS)
        share = 1 / (trials + 0.5)
        rate = cell[model.RATE] + (hit - cell[model.RATE]) * share
        clipped = min(max(rate, blend.MIN_RATE), 1 - blend.MIN_RATE)
        strength = math.log(clipped / (1 - clipped))
        cell[:] = rate, trials, strength, cell[model.BIAS]
