"""A dense index: the target model's hidden states over a corpus as keys, places in the corpus as values.

Where no string of tokens matches, the state from which the target chose its last token may still lie near states from
which it would choose alike: nearest-neighbour language models (Khandelwal et al. 2020), used for drafting by NEST (Li
et al. 2024) and DReSD (Gritta et al. 2025). Each key is a state projected to 64 numbers (`state_map`), its value the
position of the token that was chosen from it, in the token array of a corpus index beside this one. So the index holds
no tokens, and document and offset of every draft come for free.

Keys lie in FAISS: flat while a scan of all is quicker than anything else, else inverted lists of 8-bit numbers, 73 bytes
a key (`factory_for`), which a kernel of our own searches (`inverted_lists.py`). The number of lists that a search visits is
chosen when the index is built, as the smallest that finds 97.6 % of the true 50 nearest. On text that repeats itself word
for word a suffix match says the same, cheaper.

Only neighbours are of use whose token is the one that the target has just chosen. Taking the 50 nearest and keeping those
(DReSD) leaves none in a third of all searches (17 000 keys of SmolLM2). So rows are in order of token, and a search looks at
one token's rows only. Of the other structures that a factory string may name, FAISS can restrict flat ones and inverted
lists; the rest gets the filter.

Searching from several threads is safe: nothing is ever added to an open index.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from redraft.retrieval.errors import IndexFormatError, import_extra
from redraft.retrieval.index_directory import CorpusIndex, open_index
from redraft.retrieval.index_files import check_digests, check_tokenizer, open_arrays, read_manifest
from redraft.retrieval.index_format import DENSE, DENSE_FAISS, DENSE_MAP, DENSE_POSITIONS, Progress, no_progress
from redraft.retrieval.index_writer import IndexWriter
from redraft.retrieval.inverted_lists import InvertedLists
from redraft.retrieval.state_map import StateMap, StateOrigin

__all__ = [
    "NEIGHBOURS",
    "DenseIndex",
    "factory_for",
    "make_faiss",
    "new_faiss",
    "open_dense",
    "verify_dense",
    "write_dense",
]

NEIGHBOURS = 50  # asked for by default, and what recall is measured with
WANTED_RECALL = 0.976  # of stored keys; that of new ones is up to 0.02 lower, and is to be 0.95
_FLAT_UP_TO = 4000  # keys, a tenth of a millisecond
_KEYS_PER_LIST = 64  # FAISS warns below 39; the centres of lists are 4 bytes a key then
_PROBES = (16, 24, 32, 48, 64, 96, 128, 192, 256)
_MORE_PROBES = 2  # times as many lists are visited where only one token's rows in them are compared


def factory_for(count: int) -> str:
    """The FAISS factory string for so many keys."""
    if count <= _FLAT_UP_TO:
        return "Flat"
    lists = min(2.3 * count**0.5, count / _KEYS_PER_LIST)
    return f"IVF{1 << int(np.log2(lists) + 0.1)},SQ8"


def make_faiss(keys: np.ndarray, factory: str | None = None) -> tuple[object, dict]:
    """A FAISS index over `keys` (float32[n, d], of length one), and what is worth recording of it.

    Raises ValueError for a factory string that FAISS refuses or that wants more lists than there are keys.
    """
    faiss = import_extra("faiss", "dense")
    factory = factory or factory_for(len(keys))
    index = new_faiss(keys.shape[1], factory)
    lists = _lists(faiss, index)
    if lists is not None and lists.nlist > len(keys):
        raise ValueError(f"FAISS factory {factory!r}: {lists.nlist} lists need as many keys, got {len(keys)}")
    try:
        index.train(keys)
        index.add(keys)
    except RuntimeError as error:
        raise ValueError(f"FAISS factory {factory!r}, {len(keys)} keys: {_reason(error)}") from error
    described = {"factory": factory}
    if lists is not None:
        described |= _choose_probes(index, lists, keys)
    return index, described


def new_faiss(dimension: int, factory: str):
    """An untrained FAISS index; raises ValueError for a factory string that FAISS refuses."""
    faiss = import_extra("faiss", "dense")
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"FAISS factory {factory!r}: {_reason(error)}") from error
    lists = _lists(faiss, index)
    if lists is not None and lists.nlist < 1:
        raise ValueError(f"FAISS factory {factory!r}: wanted 1 list or more, got {lists.nlist}")
    graph = getattr(faiss.downcast_index(index), "hnsw", None)
    if graph is not None:
        try:
            graph.nb_neighbors(1)
        except RuntimeError:  # FAISS makes such a graph, and ends the process when keys are added
            raise ValueError(f"FAISS factory {factory!r}: wanted 2 neighbours or more a node of the graph") from None
    return index


def _choose_probes(index, lists, keys: np.ndarray) -> dict:
    """Set and return the smallest `nprobe` that finds enough of the true neighbours of a sample of the keys.

    A found key counts if it is as near as the last of the true ones: text that repeats itself has equal keys by the hundred.
    What 8 bits lose, no number of lists brings back; so the search ends where doubling it adds nothing.
    """
    chosen = np.linspace(0, len(keys) - 1, min(256, len(keys))).astype(int)
    wanted = min(NEIGHBOURS, len(keys))
    near_enough = [np.partition(keys @ keys[i], -wanted)[-wanted] - 1e-6 for i in chosen]
    best = 0, 0.0
    for probes in (*(n for n in _PROBES if n < lists.nlist), lists.nlist):
        lists.nprobe = probes
        rows = index.search(keys[chosen], wanted)[1]
        found = [(keys[row[row >= 0]] @ keys[i] >= least).sum() for i, row, least in zip(chosen, rows, near_enough)]
        recall = float(np.sum(found)) / (wanted * len(chosen))
        if recall < best[1] + 0.002:
            break
        best = probes, recall
        if recall >= WANTED_RECALL:
            break
    lists.nprobe = best[0]
    return {"nprobe": best[0], f"recall_at_{wanted}": round(best[1], 4)}


def _lists(faiss, index):
    """The inverted lists of a FAISS index; None where it has none."""
    try:
        return faiss.extract_index_ivf(index)
    except RuntimeError:
        return None


def _reason(error: Exception) -> str:
    """The last line of what FAISS says, without the function that said it."""
    return str(error).strip().splitlines()[-1].rpartition(": ")[2].strip()


def write_dense(
    path: str | os.PathLike,
    corpus: CorpusIndex,
    keys: np.ndarray,
    positions: np.ndarray,
    state_map: StateMap,
    origin: StateOrigin,
    *,
    options: dict,
    factory: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> dict:
    """Write a dense index of `corpus`; returns the options as recorded.

    keys: float32[n, d] of length one; positions: int32[n] in the corpus' tokens, of the token chosen from each state.
    The rest is as for `index_directory.write_array_index`. Raises ValueError for no keys and as `make_faiss`.
    """
    progress = progress or no_progress
    if len(keys) == 0:
        raise ValueError(f"{corpus.path}: no document has two tokens, so there is no state to store")
    _check_keys(keys, positions, state_map.dimension, len(corpus.tokens))
    faiss = import_extra("faiss", "dense")
    order = np.lexsort((positions, corpus.tokens[positions]))
    keys, positions = np.ascontiguousarray(keys[order], np.float32), positions[order]
    with IndexWriter(path, kind=DENSE, force=force) as writer:
        progress("building FAISS index", 0, len(keys))
        index, described = make_faiss(keys, factory)
        progress("building FAISS index", len(keys), len(keys))
        writer.write(DENSE_MAP, state_map.packed())
        writer.write(DENSE_POSITIONS, positions)
        writer.write(DENSE_FAISS, faiss.serialize_index(index))
        options = {
            **options, **origin._asdict(), **described, "map_sha256": state_map.digest,
            "corpus": os.path.relpath(os.path.realpath(corpus.path), writer.path),
            "corpus_tokens_sha256": corpus.tokens_sha256,
        }  # fmt: skip
        writer.publish(
            tokenizer=corpus.manifest["tokenizer"],
            options=options,
            sources=[],
            counts={"vectors": len(positions), "dimension": state_map.dimension, "width": state_map.width},
            progress=progress,
        )
    return options


def _check_keys(keys: np.ndarray, positions: np.ndarray, dimension: int, tokens: int) -> None:
    """Raise ValueError for keys and positions that no open index could hold."""
    if keys.ndim != 2 or keys.shape[1] != dimension:
        raise ValueError(f"keys: wanted shape [n, {dimension}], which the map gives, got {list(keys.shape)}")
    if not np.isfinite(keys).all():
        raise ValueError("keys: wanted finite numbers, got NaN or infinity")
    norms = np.linalg.norm(keys, axis=1)
    if not (np.abs(norms - 1.0) < 0.01).all():
        raise ValueError(f"keys: wanted length one, got lengths {norms.min():g}..{norms.max():g}")
    if positions.shape != (len(keys),):
        raise ValueError(f"positions: wanted one of each of {len(keys)} keys, got shape {list(positions.shape)}")
    if positions.min() < 0 or positions.max() >= tokens:
        raise ValueError(f"positions: wanted 0..{tokens - 1}, got {positions.min()}..{positions.max()}")


class DenseIndex:
    """An open dense index.

    Attributes:
        path, manifest: where it was opened, and the parsed manifest.
        corpus: the CorpusIndex whose tokens its values are places in.
        map: StateMap, from the model's states to keys; origin: StateOrigin, whose states.
        positions: int32[n], value of each key; in order of the tokens there, those of one token ascending.
    """

    def __init__(self, path: Path, manifest: dict, corpus: CorpusIndex, state_map: StateMap, positions, index) -> None:
        self.path, self.manifest, self.corpus = path, manifest, corpus
        self.map, self.positions = state_map, positions
        self.origin = StateOrigin(*(manifest["options"][name] for name in StateOrigin._fields))
        self._tokens, self._starts = np.unique(corpus.tokens[positions], return_index=True)
        faiss = import_extra("faiss", "dense")
        # The kernel's copy, or FAISS's own: never both in memory.
        self._lists = InvertedLists(faiss, index, self._starts) if InvertedLists.fits(faiss, index) else None
        self._index = index if self._lists is None else None
        self._restricted = None if self._index is None else _restriction(faiss, index)

    def __len__(self) -> int:
        return len(self.positions)

    def nearest(self, key: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(similarities, positions) of the nearest places to `key`, whatever token was chosen there; nearest first."""
        key = self._checked(key)
        if self._lists is not None:
            similarities, rows = self._lists.search(key, count)
            return similarities, self.positions[rows]
        similarities, rows = self._index.search(key[None], count)
        found = rows[0] >= 0
        return similarities[0][found], self.positions[rows[0][found]]

    def search(self, key: np.ndarray, token: int, count: int = NEIGHBOURS) -> tuple[np.ndarray, np.ndarray]:
        """The nearest places to `key` (float32[d], of length one) at which `token` was chosen.

        Returns (similarities float32[m], positions int32[m]), nearest first; m <= count.
        """
        key = self._checked(key)
        at = int(self._tokens.searchsorted(token))
        if at == len(self._tokens) or self._tokens[at] != token:
            return np.empty(0, np.float32), np.empty(0, np.int32)
        low = int(self._starts[at])
        high = int(self._starts[at + 1]) if at + 1 < len(self._starts) else len(self)
        if self._lists is not None:
            similarities, rows = self._lists.search(key, count, (low, high))
            return similarities, self.positions[rows]
        if self._restricted is not None:
            similarities, rows = self._index.search(key[None], count, params=self._restricted(low, high))
        else:
            similarities, rows = self._index.search(key[None], NEIGHBOURS)
        found = (rows[0] >= low) & (rows[0] < high)
        return similarities[0][found][:count], self.positions[rows[0][found][:count]]

    def _checked(self, key: np.ndarray) -> np.ndarray:
        key = np.ascontiguousarray(key, np.float32)
        if key.shape != (self.map.dimension,):
            raise ValueError(f"key: wanted shape [{self.map.dimension}], got {list(key.shape)}")
        return key

    def close(self) -> None:
        """Let go of the files."""
        self._index = self._lists = self.positions = None
        self.corpus.close()

    def __enter__(self) -> DenseIndex:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def open_dense(
    path: str | os.PathLike, *, tokenizer_fingerprint: str | None = None, vocab_size: int | None = None
) -> DenseIndex:
    """Open a dense index, and the corpus index that it was made over.

    Arguments as for `index_directory.open_index`. Raises IndexFormatError if either cannot be used, or the corpus is no
    longer the one whose states these are.
    """
    path = Path(path)
    manifest = read_manifest(path)
    if manifest["kind"] != DENSE:
        raise IndexFormatError(f"{path}: kind {manifest['kind']!r}, wanted {DENSE!r} (redraft index build-dense)")
    check_tokenizer(path, manifest, tokenizer_fingerprint)
    _check_options(path, manifest["options"])
    arrays = open_arrays(path, manifest)
    corpus = _open_corpus(path, manifest["options"], tokenizer_fingerprint, vocab_size)
    try:
        state_map = StateMap.unpacked(arrays[DENSE_MAP], manifest["dimension"], manifest["width"])
    except ValueError as error:
        raise IndexFormatError(f"{path / DENSE_MAP}: {error}") from error
    if state_map.digest != manifest["options"]["map_sha256"]:
        raise IndexFormatError(
            f"{path / DENSE_MAP}: sha256 {state_map.digest}, the keys were made with the map"
            f" {manifest['options']['map_sha256']}"
        )
    positions = arrays[DENSE_POSITIONS]
    if len(positions) != manifest["vectors"] or len(positions) == 0:
        raise IndexFormatError(
            f"{path}: {len(positions)} positions, the manifest says {manifest['vectors']}, wanted 1 up"
        )
    if positions.min() < 0 or positions.max() >= len(corpus.tokens):
        raise IndexFormatError(f"{path / DENSE_POSITIONS}: holds numbers outside the {len(corpus.tokens)} tokens")
    if (np.diff(corpus.tokens[positions]) < 0).any():
        raise IndexFormatError(f"{path / DENSE_POSITIONS}: not in order of the tokens there")
    index = _load_faiss(path, manifest, arrays[DENSE_FAISS])
    try:
        return DenseIndex(path, manifest, corpus, state_map, positions, index)
    except ValueError as error:
        raise IndexFormatError(f"{path / DENSE_FAISS}: {error}") from error


def _restriction(faiss, index) -> Callable[[int, int], object] | None:
    """Makes the search parameters that restrict this FAISS index to rows low..high-1; None where it takes none."""
    if isinstance(index, faiss.IndexIVF):
        probes = min(_MORE_PROBES * index.nprobe, index.nlist)
        return lambda low, high: faiss.SearchParametersIVF(sel=faiss.IDSelectorRange(low, high, True), nprobe=probes)
    if isinstance(index, faiss.IndexFlat):
        return lambda low, high: faiss.SearchParameters(sel=faiss.IDSelectorRange(low, high, True))
    return None


def _check_options(path: Path, options: dict) -> None:
    wanted = dict(zip(StateOrigin._fields, (str, str, str, int)))
    for name, kind in {**wanted, "map_sha256": str, "corpus": str, "corpus_tokens_sha256": str}.items():
        if not isinstance(options.get(name), kind):
            raise IndexFormatError(f'{path}: "options.{name}" is {options.get(name)!r}, wanted {kind.__name__}')


def _open_corpus(path: Path, options: dict, tokenizer_fingerprint: str | None, vocab_size: int | None) -> CorpusIndex:
    where = Path(os.path.normpath(Path(os.path.realpath(path)) / options["corpus"]))
    try:
        corpus = open_index(where, tokenizer_fingerprint=tokenizer_fingerprint, vocab_size=vocab_size)
    except IndexFormatError as error:
        raise IndexFormatError(f"{path}: the corpus index that it was made over cannot be opened: {error}") from error
    found = corpus.tokens_sha256
    if found != options["corpus_tokens_sha256"]:
        raise IndexFormatError(
            f"{path}: made over a corpus whose tokens have sha256 {options['corpus_tokens_sha256']}, those of {where} have"
            f" {found}: build the dense index anew"
        )
    return corpus


def _load_faiss(path: Path, manifest: dict, content: np.ndarray):
    faiss = import_extra("faiss", "dense")
    try:
        index = faiss.deserialize_index(content)
    except RuntimeError as error:
        raise IndexFormatError(f"{path / DENSE_FAISS}: FAISS cannot read it: {_reason(error)}") from error
    if index.ntotal != manifest["vectors"] or index.d != manifest["dimension"]:
        raise IndexFormatError(
            f"{path / DENSE_FAISS}: {index.ntotal} keys of {index.d} numbers, wanted {manifest['vectors']} of"
            f" {manifest['dimension']}"
        )
    return index


def verify_dense(path: str | os.PathLike, progress: Progress) -> dict:
    """Read a whole dense index; returns the manifest. Raises IndexFormatError that names the first file that is wrong."""
    check_digests(Path(path), read_manifest(path), progress)
    with open_dense(path) as index:
        return index.manifest
