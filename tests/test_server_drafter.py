"""The real drafter behind the server: the same trees as in process, nothing compiled after SERVING, the same text."""

from __future__ import annotations

import random
import shutil
import sys

import numpy as np
import pytest
from scripted_drafter import VOCAB_SIZE
from serving import TESTS, RawStream, ServerProcess, running, until
from test_client import PATIENT, same
from test_server import codes_of, commit, draft, open_

from redraft.client.draft_client import DraftClient
from redraft.retrieval.candidates import Candidates
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import Source
from redraft.retrieval.drafter import Drafter
from redraft.retrieval.index_directory import write_automaton_index
from redraft.retrieval.suffix_automaton import SuffixAutomaton
from redraft.v1 import drafting_pb2 as pb
from redraft.v1.wire import pack_float32, pack_int32

ONE = pack_int32([1])
CONFIG = DraftConfig(vocab_size=VOCAB_SIZE)


@pytest.fixture
def listen(tmp_path):
    return f"unix:{tmp_path}/s"


@pytest.fixture
def index(tmp_path):
    """A corpus of 3 000 tokens in which every run of 4 goes on in one way."""
    automaton = SuffixAutomaton()
    automaton.append(np.array(text(7, 3000), np.int32))
    path = tmp_path / "toy.index"
    write_automaton_index(path, automaton, tokenizer={"vocab_size": VOCAB_SIZE}, options={}, sources=[])
    return path


def text(seed: int, length: int) -> list[int]:
    """Tokens that repeat themselves now and then, as real text does."""
    rng, tokens = random.Random(seed), []
    while len(tokens) < length:
        if tokens and rng.random() < 0.5:
            start = rng.randrange(len(tokens))
            tokens += tokens[start : start + rng.randrange(1, 12)]
        else:
            tokens += [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 6))]
    return tokens[:length]


def some_candidates(rng: random.Random) -> Candidates:
    rows = rng.randrange(1, 5)
    ids = [rng.sample(range(VOCAB_SIZE), 4) for _ in range(rows)]
    probs = np.sort(np.array([[rng.random() / 4 for _ in range(4)] for _ in range(rows)]))[:, ::-1]
    tokens, previous = [[rng.randrange(VOCAB_SIZE) for _ in range(rows)] for _ in range(2)]
    return Candidates.checked(tokens, previous, ids, probs, VOCAB_SIZE)


def replay(drafter, seed: int) -> list:
    """A life of several sessions in two namespaces, the same for every drafter; returns all trees."""
    rng, sessions, trees = random.Random(seed), [], []
    for turn in range(150):
        if len(sessions) < 3 or rng.random() < 0.05:
            prompt = text(rng.randrange(4), rng.randrange(200))
            session = drafter.open(prompt, namespace=rng.choice(["default", "tenant"]))
            sessions.append((session, iter(text(rng.randrange(4), 5000)[len(prompt) :])))
        batch = []
        for session, tokens in rng.sample(sessions, rng.randrange(1, len(sessions) + 1)):
            emitted = [next(tokens) for _ in range(rng.randrange(4))]
            candidates = some_candidates(rng) if rng.random() < 0.5 else None
            proposal = [rng.randrange(VOCAB_SIZE) for _ in range(3)] if rng.random() < 0.2 else None
            batch.append((session, emitted, candidates, None, proposal))
        trees += drafter.step(batch)
        session = rng.choice(sessions)[0]
        trees.append(session.draft(max_nodes=rng.choice([1, 8, 64]), min_prob=rng.choice([0.0, 0.1])))
        if rng.random() < 0.05:
            session.truncate(rng.randrange(session.length + 1))
        if len(sessions) > 4:
            sessions.pop(rng.randrange(len(sessions)))[0].close()
    return trees


def test_the_same_trees_as_in_process(listen, index):
    expected = replay(Drafter(CONFIG, indexes=[index]), 1)
    with running(Drafter(CONFIG, indexes=[index]), listen), DraftClient(listen, **PATIENT) as client:
        trees = replay(client, 1)
        assert len(trees) == len(expected) and all(map(same, trees, expected))
        assert client.stats.served == len(trees) and not client.stats.fallbacks
    # the comparison says something only if the trees do
    sources = np.concatenate([tree.sources for tree in trees])
    assert {Source.SESSION, Source.MEMORY, Source.CORPUS, Source.RECYCLING} <= set(sources.tolist())


def test_outputs_join_the_memory_of_their_namespace_only(listen):
    answer = text(11, 300)
    with running(Drafter(CONFIG), listen), DraftClient(listen, **PATIENT) as client:
        with client.open([1, 2, 3], namespace="one") as session:
            session.commit(answer)
        for namespace, knows in (("one", True), ("two", False)):
            tree = client.open(answer[:20], namespace=namespace).draft()
            assert (Source.MEMORY in tree.sources) is knows
            assert (answer[20] in tree.tokens) is knows
        client.forget("one")
        assert Source.MEMORY not in client.open(answer[:20], namespace="one").draft().sources


@pytest.mark.parametrize(
    "wrong",
    [
        {"candidates": pb.Candidates(tokens=ONE, previous=ONE, ids=pack_int32([-1]), probs=pack_float32([0.5]))},
        {"candidates": pb.Candidates(tokens=ONE, previous=ONE, ids=pack_int32([64]), probs=pack_float32([0.5]))},
        {"candidates": pb.Candidates(tokens=ONE, previous=pack_int32([-2]), ids=ONE, probs=pack_float32([0.5]))},
        {"candidates": pb.Candidates(tokens=ONE, previous=ONE, ids=ONE, probs=pack_float32([float("nan")]))},
        {"candidates": pb.Candidates(tokens=ONE, ids=ONE, probs=pack_float32([0.5]))},
        {"hidden": pack_float32([1.0])},
    ],
)
def test_what_the_wire_brings_is_checked_before_anything_is_learned(listen, wrong):
    with running(Drafter(CONFIG), listen), RawStream(listen) as stream:
        stream.ask(open_(1, [1, 2, 3]))
        reply = stream.ask(commit(1, 3, [4], **wrong))
        assert codes_of(reply) == {1: "INVALID_ARGUMENT"}
        assert not stream.ask(commit(1, 3, [4]), draft(1)).errors


def test_an_index_is_loaded_and_unloaded_while_sessions_run(listen, index):
    corpus = text(7, 3000)
    with running(Drafter(CONFIG), listen), DraftClient(listen, **PATIENT) as client:
        session = client.open(corpus[100:120])
        assert Source.CORPUS not in session.draft().sources
        client.load_index(index)
        session.commit(corpus[120:121])
        tree = session.draft()
        assert Source.CORPUS in tree.sources and corpus[121] in tree.tokens
        client.unload_index(index)
        assert client.index_paths == []
        session.commit(corpus[121:122])
        assert Source.CORPUS not in session.draft().sources


def test_nothing_is_compiled_after_serving(listen, index, tmp_path):
    """Everything a client can do meets only kernels, and only types of arguments, that the warm-up has met."""
    with ServerProcess(listen, watch=True) as server:
        with DraftClient(listen, DraftConfig(vocab_size=VOCAB_SIZE), **PATIENT) as client:
            replay(client, 3)
            long = client.open(text(1, 6000))  # read in a worker thread
            long.commit(text(2, 3000), some_candidates(random.Random(1)))
            long.draft(max_nodes=512)
            long.close()
            client.forget("tenant")
            client.load_index(index)
            replay(client, 4)
            shutil.copytree(index, tmp_path / "other.index")
            client.load_index(tmp_path / "other.index")
            replay(client, 5)
            client.unload_index(index)
            replay(client, 6)
            assert not client.stats.fallbacks
        assert server.terminate() == 0
    new = [line for line in server.lines if line.startswith("compiled after ready")]
    assert new == ["compiled after ready: none\n"], "".join(server.lines)


def test_generate_through_the_server_writes_the_same_text(listen, index):
    pytest.importorskip("transformers")
    from tiny_models import random_prompts, tiny_model

    from redraft.decoding.generate import generate

    with running(Drafter(CONFIG, indexes=[index]), listen), DraftClient(listen, CONFIG, **PATIENT) as client:
        for name in ("llama", "qwen3"):
            model = tiny_model(name)
            prompts = random_prompts(200, seed=3)
            for prompt in prompts:
                greedy = model.generate(prompt, do_sample=False, max_new_tokens=16)
                drafted = generate(model, prompt, client, max_new_tokens=16)
                assert drafted.sequences.tolist() == greedy.tolist()
            for prompt in prompts[:6]:
                options = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 5}
                plain = generate(model, prompt, max_new_tokens=24, **options)
                drafted = generate(model, prompt, client, max_new_tokens=24, **options)
                assert drafted.sequences.tolist() == plain.sequences.tolist()
        assert client.stats.served and not client.stats.fallbacks


def test_generate_writes_the_same_text_whatever_happens_to_the_server(listen):
    """kill -9 in mid-generation, nobody there, and a new server on the same address."""
    pytest.importorskip("transformers")
    from tiny_models import random_prompts, tiny_llama

    from redraft.decoding.generate import generate

    model = tiny_llama()
    prompts = random_prompts(5, seed=4)
    plain = [generate(model, prompt, max_new_tokens=30).sequences.tolist() for prompt in prompts]
    steps = 0

    def watch(step) -> None:
        nonlocal steps
        steps += 1
        if steps == 20:
            servers[0].kill()

    with DraftClient(listen, CONFIG, timeout=0.5, open_timeout=5.0) as client:
        servers = [ServerProcess(listen, "--vocab-size", str(VOCAB_SIZE))]
        try:
            assert client.wait_until_ready(60)
            for prompt, expected in zip(prompts[:3], plain):
                drafted = generate(model, prompt, client, max_new_tokens=30, on_step=watch)
                assert drafted.sequences.tolist() == expected
            assert steps > 20 and not client.connected and client.stats.served and client.stats.fallbacks
            servers.append(ServerProcess(listen, "--vocab-size", str(VOCAB_SIZE)))
            until(lambda: client.connected)
            served = client.stats.served
            for prompt, expected in zip(prompts[3:], plain[3:]):
                assert generate(model, prompt, client, max_new_tokens=30).sequences.tolist() == expected
            assert client.stats.served > served
        finally:
            for server in servers:
                server.kill()


def watch_compiler() -> None:
    """`test_server_drafter.py LISTEN`: a real server that says at its end which kernels were compiled or loaded late."""
    from redraft.server.draft_server import ServerSettings, serve
    from redraft.server.listen_address import ListenAddress

    known: set = set()

    def ready(server) -> None:
        known.update(signatures())
        print("the watched server is ready", flush=True)

    settings = ServerSettings(listen=ListenAddress.parse(sys.argv[1]))
    serve(lambda: Drafter(CONFIG), settings, ready)
    late = sorted({f"{module}.{name}" for module, name, _ in signatures() - known})
    print("compiled after ready:", *(late or ["none"]), flush=True)


def signatures() -> set[tuple]:
    """Every kernel of the package with every type of arguments that it was used with, compiled or from the cache."""
    from numba.core.registry import CPUDispatcher

    modules = [module for name, module in sys.modules.items() if name.startswith("redraft.")]
    kernels = {value for module in modules for value in vars(module).values() if isinstance(value, CPUDispatcher)}
    return {(kernel.__module__, kernel.__name__, signature) for kernel in kernels for signature in kernel.overloads}


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    watch_compiler()
