"""Dense indexes: the folded map is its three steps, a search finds what comparing with all keys finds, a build stores what the
model thinks at each place, and everything that can be wrong is named."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from test_index_directory import edit_manifest
from test_index_directory import write as write_corpus
from tiny_models import VOCAB_SIZE, save_with_tokenizer, tiny_llama
from transformers import AutoTokenizer

from redraft.cli import main
from redraft.decoding import states
from redraft.decoding.states import Projection, states_of
from redraft.index_builders import dense as building
from redraft.index_builders.tokenizers import Tokenizer
from redraft.retrieval.dense_index import factory_for, make_faiss, open_dense, write_dense
from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.index_directory import open_index
from redraft.retrieval.index_files import read_manifest
from redraft.retrieval.index_verification import verify_index
from redraft.retrieval.state_map import Moments, StateMap, StateOrigin

torch.set_num_threads(1)
ORIGIN = StateOrigin("toy", "ab" * 32, "float32", -1)


def states_with_outliers(count: int, width: int = 40, seed: int = 0) -> np.ndarray:
    """As real models have them: a few dimensions a thousand times as large, one that never changes."""
    generator = np.random.default_rng(seed)
    low = generator.normal(size=(count, 12)) @ np.random.default_rng(9).normal(size=(12, width))
    made = low + 0.3 * generator.normal(size=(count, width))
    made[:, 3] = made[:, 3] * 900 + 7000
    made[:, 5] = 2.5
    return made.astype(np.float32)


def clustered_keys(count: int, dimension: int = 16, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    centres = np.random.default_rng(9).normal(size=(60, dimension))
    keys = centres[generator.integers(60, size=count)] + 0.4 * generator.normal(size=(count, dimension))
    return (keys / np.linalg.norm(keys, axis=1, keepdims=True)).astype(np.float32)


# --- The map ---------------------------------------------------------------------------------------------------------


def three_steps(states: np.ndarray, sample: np.ndarray, dimension: int) -> np.ndarray:
    """The specification: z-score, PCA by the singular vectors of the sample, length one."""
    sample, states = sample.astype(np.float64), states.astype(np.float64)
    changing = sample.std(axis=0) > 1e-9
    mean, deviation = sample.mean(axis=0)[changing], sample.std(axis=0)[changing]
    axes = np.linalg.svd((sample[:, changing] - mean) / deviation, full_matrices=False)[2][:dimension]
    reduced = (states[:, changing] - mean) / deviation @ axes.T
    return reduced / np.linalg.norm(reduced, axis=1, keepdims=True)


def test_the_folded_map_is_its_three_steps():
    sample, states = states_with_outliers(3000), states_with_outliers(50, seed=1)
    moments = Moments(40)
    for part in np.array_split(sample, 7):
        moments.add(part)
    state_map, kept = moments.map(8)
    wanted, got = three_steps(states, sample, 8), state_map.project(states)
    signs = np.sign((wanted * got).sum(axis=0))  # an axis has no sign of its own
    assert np.abs(got - wanted * signs).max() < 1e-4
    assert np.allclose(np.linalg.norm(got, axis=1), 1.0, atol=1e-6) and 0.5 < kept < 1.0
    assert StateMap.unpacked(state_map.packed(), 8, 40).digest == state_map.digest


def test_states_that_cannot_be_are_refused():
    moments = Moments(40)
    with pytest.raises(ValueError, match="NaN or infinity"):
        moments.add(np.full((1, 40), np.nan))
    moments.add(states_with_outliers(100))
    for dimension, message in ((0, "wanted 1..40"), (41, "wanted 1..40"), (40, None), (8, None)):
        if message:
            with pytest.raises(ValueError, match=message):
                moments.map(dimension)
    few = Moments(40)
    few.add(states_with_outliers(15))
    with pytest.raises(ValueError, match="8 directions need 16 states or more, got 15"):
        few.map(8)
    state_map, _ = moments.map(8)
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="NaN or infinity"):
            state_map.project(np.full((1, 40), bad, np.float32))
    with pytest.raises(ValueError, match=r"wanted shape \[n, 40\], got \[1, 39\]"):
        state_map.project(np.zeros((1, 39), np.float32))


# --- Searching -------------------------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path):
    generator = np.random.default_rng(3)
    with open_index(
        write_corpus(tmp_path / "my.index", [generator.integers(0, 50, 400).tolist() for _ in range(20)])
    ) as index:
        yield index


def write(path, corpus, keys, *, factory=None, force=False, state_map=None):
    state_map = state_map or StateMap(np.eye(keys.shape[1], 40, dtype=np.float32), np.zeros(keys.shape[1], np.float32))
    positions = np.arange(1, len(keys) + 1, dtype=np.int32)
    write_dense(path, corpus, keys, positions, state_map, ORIGIN, options={}, factory=factory, force=force)
    return path


def test_a_flat_search_is_a_comparison_with_all(corpus, tmp_path):
    keys, asked = clustered_keys(3000), clustered_keys(20, seed=5)
    with open_dense(write(tmp_path / "my.dense", corpus, keys), tokenizer_fingerprint="ab12", vocab_size=50) as index:
        assert index.manifest["options"]["factory"] == "Flat" and len(index) == 3000
        chosen = index.corpus.tokens[1:3001]
        for number, key in enumerate(asked):
            similarities, positions = index.search(key, number, 10)
            rows = np.flatnonzero(chosen == number)
            wanted = rows[np.argsort(-(keys[rows] @ key), kind="stable")[:10]]
            assert positions.tolist() == (wanted + 1).tolist()
            assert np.allclose(similarities, keys[wanted] @ key, atol=1e-6)
        assert index.corpus.locate(int(positions[0])) == (positions[0] // 400, positions[0] % 400)
        assert len(index.search(asked[0], 7, 5000)[0]) == (chosen == 7).sum()  # there are no more
        assert len(index.search(asked[0], 50, 10)[0]) == len(index.search(asked[0], -1, 10)[0]) == 0


@pytest.mark.parametrize("factory", ["IVF16,SQ8", "HNSW16", "PCA8,Flat"])
def test_other_structures_find_places_of_the_token_only(corpus, tmp_path, factory):
    keys = clustered_keys(3000)
    with open_dense(write(tmp_path / "my.dense", corpus, keys, factory=factory)) as index:
        found = 0
        for number, key in enumerate(clustered_keys(20, seed=5)):
            similarities, positions = index.search(key, number, 10)
            assert set(corpus.tokens[positions].tolist()) <= {number} and (np.diff(similarities) <= 0).all()
            found += len(positions)
        assert found > (190 if factory.startswith("IVF") else 10)


def test_lists_of_small_numbers_find_nearly_all_and_are_small():
    keys = clustered_keys(12_000, 64)
    index, described = make_faiss(keys)
    assert described["factory"] == "IVF128,SQ8" and described["recall_at_50"] >= 0.95
    asked = clustered_keys(50, 64, seed=7)
    found = index.search(asked, 50)[1]
    true = np.argsort(-(asked @ keys.T), axis=1)[:, :50]
    assert np.mean([len(set(a) & set(b)) / 50 for a, b in zip(found.tolist(), true.tolist())]) >= 0.95


def test_more_lists_are_visited_until_enough_is_found_or_no_more_can_be():
    """Keys without clusters lie in no list in particular; what four bytes a key lose, no number of lists brings back."""
    keys = np.random.default_rng(0).normal(size=(6000, 16)).astype(np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    described = make_faiss(keys, "IVF128,SQ8")[1]
    assert 16 < described["nprobe"] < 128 and described["recall_at_50"] >= 0.976
    described = make_faiss(keys, "IVF128,PQ4")[1]
    assert described["nprobe"] < 96 and described["recall_at_50"] < 0.9


def test_lists_that_faiss_searches_are_restricted_to_a_token_and_visited_twice_as_much(corpus, tmp_path):
    with open_dense(write(tmp_path / "my.dense", corpus, clustered_keys(3000), factory="IVF128,Flat")) as index:
        chosen = index._restricted(30, 60)
        assert chosen.nprobe == 2 * index.manifest["options"]["nprobe"] < 128
        assert [row for row in range(3000) if chosen.sel.is_member(row)] == list(range(30, 60))


def test_equal_keys_do_not_count_as_missed():
    """A text that repeats itself: any of the equal keys will do, and no number of lists finds particular ones."""
    keys = np.repeat(clustered_keys(60, 64), 200, axis=0)
    assert make_faiss(keys)[1]["nprobe"] == 16


def test_the_structure_follows_the_number_of_keys():
    assert [factory_for(n) for n in (1, 4000, 4001, 200_000, 10_000_000)] == [
        "Flat", "Flat", "IVF64,SQ8", "IVF1024,SQ8", "IVF4096,SQ8",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("count", "factory", "message"),
    [
        (0, None, "no document has two tokens"),
        (100, "IVF128,SQ8", "128 lists need as many keys, got 100"),
        (100, "Nonsense", "FAISS factory 'Nonsense'"),
        (100, "IVF0,Flat", "wanted 1 list or more, got 0"),
        (100, "HNSW0", "wanted 2 neighbours or more a node"),
        (100, "HNSW1", "wanted 2 neighbours or more a node"),
        (100, 7, "FAISS factory 7"),
    ],
)
def test_what_cannot_be_built(corpus, tmp_path, count, factory, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "my.dense", corpus, clustered_keys(max(count, 1))[:count], factory=factory)
    assert not (tmp_path / "my.dense").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda keys, positions: (keys, positions[:90]),
            r"positions: wanted one of each of 100 keys, got shape \[90\]",
        ),
        (
            lambda keys, positions: (keys[:90], positions),
            r"positions: wanted one of each of 90 keys, got shape \[100\]",
        ),
        (lambda keys, positions: (keys[:, :8], positions), r"keys: wanted shape \[n, 16\].*got \[100, 8\]"),
        (lambda keys, positions: (keys[0], positions[:16]), r"keys: wanted shape \[n, 16\].*got \[16\]"),
        (lambda keys, positions: (keys * 3, positions), r"keys: wanted length one, got lengths 3..3"),
        (lambda keys, positions: (keys * np.nan, positions), "keys: wanted finite numbers"),
        (lambda keys, positions: (keys, positions - 2), r"positions: wanted 0..7999, got -1..98"),
        (lambda keys, positions: (keys, positions + 7900), r"positions: wanted 0..7999, got 7901..8000"),
    ],
)
def test_keys_that_no_index_could_hold_are_refused(corpus, tmp_path, change, message):
    keys, positions = change(clustered_keys(100), np.arange(1, 101, dtype=np.int32))
    state_map = StateMap(np.eye(16, 40, dtype=np.float32), np.zeros(16, np.float32))
    with pytest.raises(ValueError, match=message):
        write_dense(tmp_path / "my.dense", corpus, keys, positions, state_map, ORIGIN, options={})
    assert not (tmp_path / "my.dense").exists()


# --- Building --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_with_tokenizer(tiny_llama(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def built(model_folder, tmp_path):
    """A corpus index over the tiny model's vocabulary, and the path of a dense index of it."""
    described = Tokenizer.from_transformers(AutoTokenizer.from_pretrained(model_folder), "toy").describe()
    generator = np.random.default_rng(1)
    lengths = (40, 1, 0, 90, 2, 60)
    documents = [generator.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]
    corpus = write_corpus(tmp_path / "my.index", documents, kind="suffix_array", tokenizer=described)
    return corpus, documents, tmp_path / "my.index.dense"


def build(model_folder, corpus, *more) -> int:
    return main(["index", "build-dense", str(corpus), "--model", str(model_folder), "--dim", "16", *more])


@pytest.mark.parametrize(("layer", "window"), [(-1, "1024"), (-2, "1024"), (-1, "32")])
def test_a_key_for_every_token_that_was_chosen(model_folder, built, layer, window):
    corpus, documents, path = built
    assert build(model_folder, corpus, "--layer", str(layer), "--window", window, "--batch", "128") == 0
    assert not list(path.parent.glob("*.work"))
    with open_dense(path) as index:
        flat = [token for document in documents for token in document]
        ends = np.cumsum([len(document) for document in documents])
        starts = ends - [len(document) for document in documents]
        assert sorted(index.positions.tolist()) == [p for p in range(len(flat)) if p not in starts]
        assert index.origin == states_of(tiny_llama(), layer, model_folder.name)
        for position in (1, 17, 45, 100, 134, 192):
            document = int(np.searchsorted(ends, position, side="right"))
            if window == "32" and position - starts[document] > 31:
                continue  # seen with less context
            prompt = torch.tensor([flat[starts[document] : position]])
            with torch.no_grad():
                state = tiny_llama()(prompt, output_hidden_states=True).hidden_states[layer][0, -1:].numpy()
            similarities, positions = index.search(index.map.project(state)[0], flat[position], 1)
            assert positions.tolist() == [position] and similarities[0] > 0.9999


def test_max_tokens_and_the_summary(model_folder, built, capsys):
    corpus, _, path = built
    assert build(model_folder, corpus, "--max-tokens", "100") == 0
    with open_dense(path) as index:
        assert 40 <= len(index) <= 100
    assert "keys in Flat" in capsys.readouterr().err
    assert main(["index", "inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "keys of 16 numbers" in out and "bytes per key" in out and "dtype float32" in out
    assert main(["index", "verify", str(path)]) == 0
    assert build(model_folder, corpus) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("sample", [50, 100_000])
def test_an_interrupted_build_goes_on(model_folder, built, monkeypatch, sample):
    corpus, _, path = built
    options = building.DenseOptions(dimension=8, batch=64, sample=sample)

    def run(output):
        with open_index(corpus) as opened:
            building.build_dense(
                opened, tiny_llama(), output, name="toy", options=options, force=False, progress=building.Progress(quiet=True)
            )  # fmt: skip

    run(path.with_name("whole"))
    forwards, forward = [], building._states

    def failing(*arguments):
        forwards.append(1)
        if len(forwards) == 3:
            raise KeyboardInterrupt
        return forward(*arguments)

    monkeypatch.setattr(building, "_states", failing)
    with pytest.raises(KeyboardInterrupt):
        run(path)
    assert not path.exists()
    run(path)
    again = len(forwards) - 3
    forwards.clear()
    monkeypatch.setattr(building, "_states", lambda *arguments: forwards.append(1) or forward(*arguments))
    run(path.with_name("third"))
    assert again == len(forwards) - 2  # the two batches that were done are not run again
    for name in ("map.npy", "positions.npy", "faiss.npy"):
        assert (path / name).read_bytes() == (path.with_name("whole") / name).read_bytes()


def test_a_factory_that_faiss_refuses_is_refused_before_the_model_runs(model_folder, built, monkeypatch, capsys):
    monkeypatch.setattr(building, "_states", None)
    assert build(model_folder, built[0], "--factory", "Nonsense") == 1
    assert "FAISS factory 'Nonsense'" in capsys.readouterr().err
    assert not list(built[2].parent.glob("*.work"))


def test_another_models_corpus_is_refused(model_folder, tmp_path, capsys):
    corpus = write_corpus(tmp_path / "my.index")
    assert build(model_folder, corpus) == 1
    assert "fingerprint" in capsys.readouterr().err
    with pytest.raises(ValueError, match="max_tokens: wanted 1 or more, got 0"):
        building.DenseOptions(max_tokens=0)
    empty = write_corpus(tmp_path / "empty.index", [[3], []], tokenizer={"vocab_size": 50})
    with open_index(empty) as opened, pytest.raises(ValueError, match="no document has two tokens"):
        building.build_dense(
            opened, tiny_llama(), tmp_path / "x", name="toy", options=building.DenseOptions(), force=False,
            progress=building.Progress(quiet=True),
        )  # fmt: skip


# --- What can be wrong -----------------------------------------------------------------------------------------------


@pytest.fixture
def dense(corpus, tmp_path):
    return write(tmp_path / "my.dense", corpus, clustered_keys(500))


@pytest.mark.parametrize("name", ["map.npy", "positions.npy", "faiss.npy"])
def test_damaged_files(dense, name):
    assert verify_index(dense)["vectors"] == 500
    file = dense / name
    content = file.read_bytes()
    file.write_bytes(content[:-4])
    with pytest.raises(IndexFormatError, match=f"{name}: {len(content) - 4} bytes, the manifest wants {len(content)}"):
        open_dense(dense)
    flipped = bytearray(content)
    flipped[-2] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(IndexFormatError, match=f"{name}: sha256"):
        verify_index(dense)


def test_a_faiss_file_that_is_cut_short_with_its_manifest(dense):
    content = np.load(dense / "faiss.npy")[:-100]
    np.save(dense / "faiss.npy", content)
    files = read_manifest(dense)["files"]
    files["faiss.npy"]["bytes"] = (dense / "faiss.npy").stat().st_size
    edit_manifest(dense, files=files)
    with pytest.raises(IndexFormatError, match=r"faiss.npy: FAISS cannot read it"):
        open_dense(dense)


def test_indexes_are_not_taken_for_one_another(dense, corpus, tmp_path):
    with pytest.raises(IndexFormatError, match="a dense index, wanted an index of a corpus"):
        open_index(dense)
    with pytest.raises(IndexFormatError, match="kind 'suffix_automaton', wanted 'dense'"):
        open_dense(corpus.path)


def test_numbers_that_cannot_be_are_refused(dense):
    for changes, message in (
        ({"vectors": 499}, "500 positions, the manifest says 499"),
        ({"dimension": 15}, "are no map from 40 to 15"),
        ({"options": read_manifest(dense)["options"] | {"map_sha256": "cd34"}}, "the keys were made with the map cd34"),
        ({"options": {}}, '"options.model" is None, wanted str'),
    ):
        before = read_manifest(dense)
        edit_manifest(dense, **changes)
        with pytest.raises(IndexFormatError, match=message):
            open_dense(dense)
        edit_manifest(dense, **before)
    with pytest.raises(IndexFormatError, match="wanted fingerprint 'cd34'"):
        open_dense(dense, tokenizer_fingerprint="cd34")
    positions = np.load(dense / "positions.npy")
    np.save(dense / "positions.npy", positions[::-1].copy())
    with pytest.raises(IndexFormatError, match="positions.npy: not in order of the tokens there"):
        open_dense(dense)
    np.save(dense / "positions.npy", np.full(500, 8000, np.int32))
    with pytest.raises(IndexFormatError, match="positions.npy: holds numbers outside the 8000 tokens"):
        open_dense(dense)


def test_the_corpus_must_be_there_and_the_same(dense, corpus):
    shutil.move(corpus.path, corpus.path.with_name("moved"))
    with pytest.raises(IndexFormatError, match="the corpus index that it was made over cannot be opened"):
        open_dense(dense)
    write_corpus(corpus.path)
    with pytest.raises(IndexFormatError, match="build the dense index anew"):
        open_dense(dense)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights_sha256": "00" * 32}, "weights 000000000000"),
        ({"dtype": "bfloat16"}, "bfloat16, layer -1.*the target is .*float32"),
        ({"layer": -9}, r"layer: wanted -3\.\.-1"),
    ],
)
def test_another_targets_states_are_refused(change, message):
    state_map = StateMap(np.eye(8, 48, dtype=np.float32), np.zeros(8, np.float32))
    Projection(tiny_llama(), state_map, states_of(tiny_llama(), -1))
    with pytest.raises((IndexFormatError, ValueError), match=message):
        Projection(tiny_llama(), state_map, states_of(tiny_llama(), -1)._replace(**change))


def test_another_width_is_refused():
    state_map = StateMap(np.eye(8, 40, dtype=np.float32), np.zeros(8, np.float32))
    with pytest.raises(IndexFormatError, match="40 numbers, the target has 48"):
        Projection(tiny_llama(), state_map, states_of(tiny_llama(), -1))


def test_a_projection_is_the_map():
    generator = np.random.default_rng(0)
    state_map = StateMap(generator.normal(size=(8, 48)), generator.normal(size=8))
    model = tiny_llama()
    projection = Projection(model, state_map, states_of(model, -2))
    with torch.no_grad(), projection.tap:
        hidden = model(torch.arange(3, 9)[None], output_hidden_states=True).hidden_states[-2]
        assert torch.equal(projection.tap.states, hidden)
        assert np.allclose(
            projection.keys(0, 0, np.array([1, 4])), state_map.project(hidden[0, [1, 4]].numpy()), atol=1e-6
        )
    assert projection.tap.states is None
    assert states.state_width(model) == 48
