"""Provenance: a drafted token is where its tree says it is, and that is the first place of its longest passage."""

from __future__ import annotations

import pickle
import random

import grpc
import naive_automaton as naive
import numpy as np
import pytest
from serving import running
from test_client import PATIENT
from test_corpus_source import CONFIG, KINDS, V, many_documents, path_to, some_context, write

from redraft.client.draft_client import DraftClient
from redraft.decoding.pruning import not_deeper
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import DraftTree, Source
from redraft.retrieval.drafter import Drafter
from redraft.retrieval.provenance import PASSAGE_TOKENS, Occurrence
from redraft.v1 import drafting_pb2 as pb
from redraft.v1 import drafting_pb2_grpc as rpc


def first_place(corpora: dict[str, list[list[int]]], passage: list[int]) -> Occurrence | None:
    """The first place of the longest suffix of two tokens or more; of equally long ones, that in the first index."""
    best, place = 1, None
    for path, documents in corpora.items():
        suffix = naive.longest_suffix(documents, passage, PASSAGE_TOKENS)
        if len(suffix) > best:
            best = len(suffix)
            place = Occurrence(path, *naive.locate(documents, naive.occurrences(documents, suffix)[0]))
    return place


def check(tree: DraftTree, corpora: dict[str, list[list[int]]], context: list[int]) -> int:
    """Every place against plain Python; returns how many there are."""
    places = tree.provenance()
    assert len(places) == len(tree)
    for node, place in enumerate(places):
        if tree.sources[node] != Source.CORPUS:
            assert place is None
            continue
        passage = context + path_to(tree, node) + [int(tree.tokens[node])]
        assert place == first_place(corpora, passage)
        assert corpora[place.index][place.document][place.offset] == tree.tokens[node]
    return sum(place is not None for place in places)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_places(seed, kind, tmp_path):
    """Sessions that are opened, committed to and truncated, with one index and with three."""
    rng = random.Random(seed)
    corpora = {
        str(write(tmp_path / str(i), documents, kind)): documents
        for i, documents in enumerate(many_documents(rng) for _ in range(rng.choice([1, 3])))
    }
    found = 0
    with Drafter(CONFIG, indexes=corpora) as drafter:
        for _ in range(3):
            documents = rng.choice(list(corpora.values()))
            context = some_context(rng, documents)
            session = drafter.open(context)
            for _ in range(4):
                found += check(session.draft(max_nodes=64), corpora, context)
                tokens = some_context(rng, documents)
                session.commit(tokens)
                context = context + tokens
            context = context[: rng.randint(0, len(context))]
            session.truncate(len(context))
            found += check(session.draft(), corpora, context)
    assert found or all(len(document) < 2 for documents in corpora.values() for document in documents)


def test_only_nodes_of_the_corpus_have_a_place(tmp_path):
    """All sources on: what the session or the caller proposed is not looked up."""
    documents = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10]]
    path = str(write(tmp_path / "i", documents, "suffix_automaton"))
    with Drafter(DraftConfig(vocab_size=V), indexes=[path]) as drafter:
        session = drafter.open([20, 21, 22, 20, 21, 22, 7, 8, 20, 21, 22, 7, 8])
        tree = session.draft(proposal=[30, 31])
        assert check(tree, {path: documents}, [7, 8])
        assert Source.CALLER in tree.sources


def test_the_place_is_that_of_the_drafted_token(tmp_path):
    """A worked example: the longest passage decides, not the first place of a shorter one."""
    documents = [[5, 3, 9], [1], [0, 1, 2, 3, 9, 8]]
    path = str(write(tmp_path / "i", documents, "suffix_array"))
    with Drafter(CONFIG, indexes=[path]) as drafter:
        tree = drafter.open([1, 2]).draft()
        assert tree.tokens.tolist() == [3, 9, 8]
        assert tree.provenance() == [Occurrence(path, 2, 3), Occurrence(path, 2, 4), Occurrence(path, 2, 5)]
        assert drafter.open([4, 3]).draft().provenance()[0] == Occurrence(path, 0, 2)  # 3 9, first seen after 5


def test_copies(tmp_path):
    """A part of a tree knows its places; a tree sent to another process leaves the indexes behind."""
    path = str(write(tmp_path / "i", [[1, 2, 3, 4]] * 100, "suffix_automaton"))
    with Drafter(CONFIG, indexes=[path]) as drafter:
        tree = drafter.open([1]).draft()
        assert (
            not_deeper(tree, 2).provenance()
            == tree.provenance()[:2]
            == [Occurrence(path, 0, 1), Occurrence(path, 0, 2)]
        )
        sent = pickle.loads(pickle.dumps(tree))
        assert sent.tokens.tolist() == tree.tokens.tolist() == [2, 3, 4]
        assert sent.provenance() == [None] * 3
        assert len(pickle.dumps(tree)) < 2000


def test_a_tree_keeps_the_indexes_it_was_drafted_from(tmp_path):
    """Unloading or replacing an index does not change what an earlier tree says."""
    path = str(write(tmp_path / "i", [[1, 2, 3]], "suffix_automaton"))
    with Drafter(CONFIG, indexes=[path]) as drafter:
        session = drafter.open([1])
        tree = session.draft()
        write(tmp_path / "i", [[0], [1, 2, 3]], "suffix_automaton", force=True)
        drafter.load_index(path)
        assert tree.provenance()[0] == Occurrence(path, 0, 1)
        assert session.draft().provenance()[0] == Occurrence(path, 1, 1)
        drafter.unload_index(path)
        assert tree.provenance()[0] == Occurrence(path, 0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_places_by_a_server(kind, tmp_path):
    """The same places as in process, asked when somebody wants to know: in the indexes that are open by then."""
    rng = random.Random(7)
    corpora = {
        str(write(tmp_path / str(i), documents, kind)): documents
        for i, documents in enumerate(many_documents(rng) for _ in range(2))
    }
    listen, found = f"unix:{tmp_path}/s", 0
    with (
        running(Drafter(CONFIG, indexes=corpora), listen) as server,
        DraftClient(listen, DraftConfig(vocab_size=V), **PATIENT) as client,
    ):
        for _ in range(4):
            documents = rng.choice(list(corpora.values()))
            context = some_context(rng, documents)
            session = client.open(context)
            for _ in range(3):
                found += check(session.draft(), corpora, context)
                tokens = some_context(rng, documents)
                session.commit(tokens)
                context = context + tokens
            found += check(client.step([(session, [])])[0], corpora, context)
        assert found and not client.stats.fallbacks
        tree = session.draft()
        for path in corpora:
            client.unload_index(path)
        assert tree.provenance() == [None] * len(tree)
        with pytest.raises(ValueError, match="passages"):
            client.locate([[V]])
        with grpc.insecure_channel(listen) as channel:
            stub = rpc.DraftingServiceStub(channel)
            for bad in (b"123", np.array([V], "<i4").tobytes(), np.array([-1], "<i4").tobytes()):
                with pytest.raises(grpc.RpcError) as error:
                    stub.Locate(pb.LocateRequest(passages=[bad]))
                assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert server.service.drafter.index_paths == []


def test_a_tree_from_elsewhere_knows_no_places():
    tree = DraftTree.chain([1, 2], source=Source.CORPUS)
    assert tree.provenance() == [None, None]
    assert DraftTree.empty().provenance() == []


def test_locate_checks_ids(tmp_path):
    with Drafter(CONFIG, indexes=[write(tmp_path / "i", [[1, 2]], "suffix_array")]) as drafter:
        assert drafter.locate([np.array([1, 2]), [2, 1], [1, 1], []]) == [
            Occurrence(str(tmp_path / "i"), 0, 1),
            None,
            None,
            None,
        ]
        with pytest.raises(ValueError, match="passages"):
            drafter.locate([[V]])
