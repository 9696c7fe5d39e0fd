"""Dense retrieval around a real model: the text stays what the target writes alone, in process and through a server; states come
from where the tokens were chosen; spans name where they stand; NEST, which is lossy, copies from the corpus and says so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from serving import running
from test_index_directory import write as write_corpus
from tiny_models import VOCAB_SIZE, random_prompts, save_with_tokenizer, tiny_llama
from transformers import AutoTokenizer

from redraft.cli import main
from redraft.client.draft_client import DraftClient
from redraft.decoding import nest
from redraft.decoding.generate import generate
from redraft.decoding.stats import GenerationStats
from redraft.index_builders.dense import DenseOptions, build_dense
from redraft.index_builders.progress import Progress
from redraft.index_builders.tokenizers import Tokenizer
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.draft_tree import Source
from redraft.retrieval.drafter import Drafter
from redraft.retrieval.errors import IndexFormatError
from redraft.retrieval.index_directory import open_index
from redraft.retrieval.provenance import Occurrence

torch.set_num_threads(1)
CONFIG = DraftConfig(vocab_size=VOCAB_SIZE)
ONLY_DENSE = DraftConfig(vocab_size=VOCAB_SIZE, disabled=frozenset(Source.NAMES) - {"dense", "rerank"})
PROMPTS = random_prompts(6, seed=3)


def plain(prompt, **options):
    return generate(tiny_llama(), prompt, None, max_new_tokens=40, **options).sequences


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_with_tokenizer(tiny_llama(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def store(model_folder, tmp_path_factory):
    """The model's own answers to some prompts, as a corpus index and a dense index of it."""
    folder = tmp_path_factory.mktemp("store")
    described = Tokenizer.from_transformers(AutoTokenizer.from_pretrained(model_folder), "toy").describe()
    answers = [plain(prompt)[0].tolist() for prompt in [*random_prompts(8, seed=1), *PROMPTS[:2]]]
    corpus = write_corpus(folder / "my.index", answers, kind="suffix_array", tokenizer=described)
    with open_index(corpus) as opened:
        build_dense(
            opened, tiny_llama(), folder / "my.dense", name="tiny", options=DenseOptions(dimension=16), force=False,
            progress=Progress(quiet=True),
        )  # fmt: skip
    return folder / "my.dense"


SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 5}


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("config", [CONFIG, ONLY_DENSE], ids=["all", "dense"])
def test_the_text_is_the_targets_own(store, options, config):
    with Drafter(config, dense=store) as drafter:
        accepted = 0
        for prompt in [*PROMPTS, *PROMPTS[:2]]:
            result = generate(tiny_llama(), prompt, drafter, max_new_tokens=40, adaptive=False, **options)
            assert torch.equal(result.sequences, plain(prompt, **options))
            assert not result.stats.failures and result.stats.seconds["states"] > 0
            accepted += result.stats.accepted
        assert accepted > 40  # the first prompts' answers lie in the store, and in the memory by the end


def test_a_batch_and_a_gate_that_closes(store):
    longest = max(prompt.shape[1] for prompt in PROMPTS)
    ids = torch.stack([torch.nn.functional.pad(prompt[0], (longest - prompt.shape[1], 0)) for prompt in PROMPTS])
    mask = torch.stack([torch.arange(longest) >= longest - prompt.shape[1] for prompt in PROMPTS])
    with Drafter(CONFIG, dense=store) as drafter:
        for adaptive in (False, True):
            result = generate(
                tiny_llama(), ids, drafter, attention_mask=mask, max_new_tokens=40, adaptive=adaptive, eos_token_id=-1
            )  # fmt: skip
            for row, prompt in zip(result.sequences, PROMPTS):
                wanted = plain(prompt, eos_token_id=-1)[0, prompt.shape[1] :]
                assert row[longest : longest + len(wanted)].tolist() == wanted.tolist()
            assert not result.stats.failures


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_through_a_server(store, tmp_path, options):
    drafter = Drafter(CONFIG, dense=store)
    drafter.warmup()
    with (
        running(drafter, f"unix:{tmp_path}/s"),
        DraftClient(f"unix:{tmp_path}/s", CONFIG, timeout=5, require=True) as client,
    ):
        state_map, origin = client.states
        assert state_map.digest == drafter.states[0].digest and origin == drafter.states[1]
        assert client.hidden_size == 16
        for prompt in PROMPTS[:4]:
            result = generate(tiny_llama(), prompt, client, max_new_tokens=40, adaptive=False, **options)
            assert torch.equal(result.sequences, plain(prompt, **options))
            assert not result.stats.failures
        assert client.stats.hidden_dropped == 0 and not client.stats.fallbacks
        assert len(drafter._namespaces["default"].dense) > 60  # the states came and joined the memory
        with client.open([1, 2, 3]) as session:  # what is wrong with a state is this session's own error
            session.commit([4], hidden=np.ones(15))
            session.commit([5], hidden=np.eye(1, 16))
            assert session.draft() is not None
    assert drafter.n_sessions == 0


def test_states_are_those_that_the_tokens_were_chosen_from(store):
    """Whatever was accepted together: the keys that a drafter is told are those of plain forwards."""

    class Listening:
        def __init__(self, drafter):
            self.inner, self.told = drafter, []

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def step(self, items):
            self.told += [(list(item[1]), item[3]) for item in items]
            return self.inner.step(items)

    with Drafter(CONFIG, dense=store) as drafter:
        for prompt in PROMPTS[:2]:
            listening = Listening(drafter)
            text = generate(tiny_llama(), prompt, listening, max_new_tokens=40, adaptive=False).sequences[0]
            with torch.no_grad():
                hidden = tiny_llama()(text[None], output_hidden_states=True).hidden_states[-1][0].numpy()
            wanted = drafter.states[0].project(hidden)
            at = prompt.shape[1]
            lengths = set()
            for tokens, keys in listening.told:
                end = at + len(tokens)
                assert text[at:end].tolist() == tokens
                assert np.allclose(keys, wanted[end - 1 - len(keys) : end - 1], atol=1e-4)
                lengths.add(len(keys))
                at = end
            assert len(listening.told[0][1]) == prompt.shape[1] and len(lengths) > 2


def test_an_index_of_another_model_is_refused_when_a_session_starts(store):
    other = tiny_llama(seed=1)
    with Drafter(CONFIG, dense=store) as drafter:
        with pytest.raises(IndexFormatError, match="was built with states of model 'tiny'.*the target is"):
            generate(other, PROMPTS[0], drafter, max_new_tokens=4)
        with pytest.raises(IndexFormatError, match="float32, layer -1.*bfloat16, layer -1"):
            generate(_bfloat16(), PROMPTS[0], drafter, max_new_tokens=4)
        assert generate(other, PROMPTS[0], None, max_new_tokens=4).sequences is not None


def _bfloat16():
    tiny_llama.cache_clear()
    model = tiny_llama().bfloat16()
    tiny_llama.cache_clear()
    return model


# --- Provenance ------------------------------------------------------------------------------------------------------


def test_spans_join_where_a_place_goes_on():
    stats, place = GenerationStats(), Occurrence("my.index", 3, 7)
    stats.add_places(0, 0, [place, place._replace(offset=8), None, place._replace(offset=9)])
    stats.add_places(0, 4, [place._replace(offset=10), place._replace(document=4, offset=11)])
    assert [(s.begin, s.end, s.place.document, s.place.offset) for s in stats.spans] == [
        (0, 2, 3, 7), (3, 5, 3, 9), (5, 6, 4, 11),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["dense", "corpus"])
def test_spans_name_where_the_text_stands(store, kind):
    config = DraftConfig(vocab_size=VOCAB_SIZE, disabled=frozenset(Source.NAMES) - {kind})
    corpus_path = store.with_name("my.index")
    more = {"dense": store} if kind == "dense" else {"indexes": [corpus_path]}
    with Drafter(config, **more) as drafter, open_index(corpus_path) as corpus:
        prompt = PROMPTS[0]
        result = generate(tiny_llama(), prompt, drafter, max_new_tokens=40, adaptive=False, provenance=True)
        written = result.sequences[0, prompt.shape[1] :].tolist()
        assert sum(span.end - span.begin for span in result.stats.spans) > 10
        for row, begin, end, (index, document, offset) in result.stats.spans:
            start = int(corpus.document_ends[document - 1]) if document else 0
            assert row == 0 and index.endswith("my.index")
            assert corpus.tokens[start + offset : start + offset + end - begin].tolist() == written[begin:end]
        assert not generate(tiny_llama(), prompt, drafter, max_new_tokens=40).stats.spans


def test_the_command_names_sources(store, model_folder, capsys):
    words = ["generate", "--model", str(model_folder), "abcabc", "--max-new-tokens", "30"]
    assert main([*words, "--plain"]) == 0
    text = capsys.readouterr().out
    assert main([*words, "--dense", str(store), "--index", str(store.with_name("my.index")), "--show-sources"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(text) and ("document" in out or "no accepted token stands in a corpus" in out)
    for wrong in (["--plain", "--dense", str(store)], ["--acceptance", "nest"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, *wrong])
        assert ended.value.code == 2 and "--dense" in capsys.readouterr().err


# --- NEST ------------------------------------------------------------------------------------------------------------


def test_nest_copies_spans_and_names_them(store):
    with Drafter(CONFIG, dense=store) as drafter:
        result = generate(tiny_llama(), PROMPTS[0], drafter, max_new_tokens=40, acceptance="nest")
        again = generate(tiny_llama(), PROMPTS[0], drafter, max_new_tokens=40, acceptance="nest")
        assert torch.equal(result.sequences, again.sequences)
        tokens = drafter.dense.corpus.tokens
        written = result.sequences[0, PROMPTS[0].shape[1] :].tolist()
        assert result.stats.accepted > 10 and result.stats.spans
        used = set()
        for _, begin, end, (_, document, offset) in result.stats.spans:
            start = int(drafter.dense.corpus.document_ends[document - 1]) if document else 0
            places = range(start + offset, start + offset + end - begin)
            assert tokens[places.start : places.stop].tolist() == written[begin:end]
            assert not used & set(places)  # no place is copied twice
            used |= set(places)
        sampled = generate(tiny_llama(), PROMPTS[0], drafter, max_new_tokens=40, acceptance="nest", **SAMPLED)
        assert sampled.stats.new_tokens == 40 or sampled.sequences[0, -1] == 2


def test_nest_with_a_retrieval_that_is_never_trusted_is_the_target_alone(store, monkeypatch):
    monkeypatch.setattr(nest, "relative_confidence", lambda similarities: 1.0)
    with Drafter(CONFIG, dense=store) as drafter:
        for prompt in PROMPTS[:3]:
            result = generate(tiny_llama(), prompt, drafter, max_new_tokens=40, acceptance="nest")
            assert torch.equal(result.sequences, plain(prompt)) and result.stats.accepted == 0


def test_nest_is_asked_for_and_needs_a_dense_index():
    with Drafter(CONFIG) as drafter, pytest.raises(ValueError, match="with a dense index"):
        generate(tiny_llama(), PROMPTS[0], drafter, max_new_tokens=4, acceptance="nest")
    with pytest.raises(ValueError, match="'lossless' or 'nest', got 'lossy'"):
        generate(tiny_llama(), PROMPTS[0], None, max_new_tokens=4, acceptance="lossy")
