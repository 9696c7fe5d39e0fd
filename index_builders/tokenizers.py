"""Text to token ids, with the tokenizer of the model that will be helped.

An index holds token ids, so it serves only models whose tokenizer gives the same ids for the same text. That is
what the fingerprint is for: the SHA-256 of the tokenizer's own serialised form (vocabulary, merges, normaliser,
pre-tokenizer, added tokens), after truncation and padding, which callers switch on and off, have been taken out.

Everything runs on the Rust `tokenizers` library, which spreads a batch over all cores (TOKENIZERS_PARALLELISM=false
keeps it to one). transformers is needed only to read its own folders, hub names and GGUF files.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np

from redraft.retrieval.errors import import_extra

__all__ = ["Tokenizer", "load_tokenizer"]

# The library keeps about 150 bytes per token while it works on a text, so texts beyond this many characters are
# encoded in pieces, in parallel. The usual pre-tokenizers split at a lone line break anyway, so a cut there is harmless.
_PIECE_CHARACTERS = 1 << 20
_LONE_LINE_BREAK = re.compile(r"(?<=\S)\n(?=\S)")


class Tokenizer:
    """A `tokenizers.Tokenizer` as redraft uses it: no special tokens added, int32 arrays out.

    Special tokens that are written out in a text (`<|im_start|>`, say) become their own ids, as they do in prompts.

    Attributes:
        name: how the tokenizer was named, for people to read.
        vocab_size: one more than the largest id, added tokens included.
        fingerprint: hexadecimal SHA-256, equal for tokenizers that are configured equally.
        backend: the `tokenizers.Tokenizer` underneath.
    """

    def __init__(self, backend, name: str, chat_writer=None) -> None:
        """`chat_writer`: a transformers tokenizer whose chat template `render_chat` uses, if it has one."""
        self.backend = type(backend).from_str(backend.to_str())  # a copy: the caller's truncation stays as it was
        self.backend.no_truncation()
        self.backend.no_padding()
        self.name = name
        self._chat_writer = chat_writer
        self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.fingerprint = _fingerprint(self.backend)

    @classmethod
    def from_transformers(cls, tokenizer, name: str | None = None) -> Tokenizer:
        """Wrap a loaded transformers tokenizer. Raises ValueError for one without a fast (Rust) backend."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        name = name or tokenizer.name_or_path
        if backend is None:
            raise ValueError(f"tokenizer {name!r}: {type(tokenizer).__name__} has no fast version; wanted one that has")
        return cls(backend, name, tokenizer)

    def encode(self, text: str) -> np.ndarray:
        """int32[n]: the ids of one text, no special tokens added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One int32 array for each text, in order, no special tokens added; all cores take part."""
        pieces, owners = [], []
        for number, text in enumerate(texts):
            for piece in _pieces(text):
                pieces.append(piece)
                owners.append(number)
        parts: list[list[np.ndarray]] = [[] for _ in texts]
        for owner, encoding in zip(owners, self.backend.encode_batch_fast(pieces, add_special_tokens=False)):
            parts[owner].append(np.array(encoding.ids, np.int32))
        return [part[0] if len(part) == 1 else np.concatenate(part) for part in parts]

    def decode(self, ids, skip_special_tokens: bool = False) -> str:
        """The text of token ids (any iterable of ints)."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: list[dict]) -> str:
        """A whole chat (role, content) as the model reads it. Raises ValueError where there is no template or it fails."""
        if getattr(self._chat_writer, "chat_template", None) is None:
            raise ValueError(
                f"tokenizer {self.name!r} has no chat template; wanted a transformers folder or a .gguf file that has one"
            )
        try:
            return self._chat_writer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # a template is a program of the model's makers and may raise anything
            raise ValueError(f"the chat template fails: {type(error).__name__}: {error}") from error

    def describe(self) -> dict:
        """What an index says of its tokenizer: name, vocab_size, fingerprint."""
        return {"name": self.name, "vocab_size": self.vocab_size, "fingerprint": self.fingerprint}


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Load a tokenizer from a `tokenizer.json`, a `.gguf` file, a transformers folder or a hub name.

    A folder is read by transformers, so the ids are those that the model in it is given. Raises FileNotFoundError
    for a path that is not there, ValueError for a file that is no tokenizer, MissingExtraError where tokenizers
    (extra `text`) or transformers (extra `models`) is missing.
    """
    path = Path(spec).expanduser()
    if path.is_dir():
        return _from_transformers_files(path.name or str(path), str(path))
    if path.suffix == ".gguf" and path.is_file():
        import_extra("gguf", "models")
        return _from_transformers_files(path.name, str(path.parent), gguf_file=path.name)
    if path.is_file():
        return _from_json(path)
    if path.suffix in (".json", ".gguf") or str(spec).startswith((".", "/", "~")) or str(spec).count("/") > 1:
        raise FileNotFoundError(f"tokenizer {str(spec)!r}: no such file or folder")
    return _from_transformers_files(str(spec), str(spec))


def _from_json(path: Path) -> Tokenizer:
    tokenizers = import_extra("tokenizers", "text")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for anything it cannot parse
        raise ValueError(
            f"tokenizer {str(path)!r}: wanted a tokenizer.json of the tokenizers library, a .gguf file"
            f" or a transformers folder ({error})"
        ) from error
    return Tokenizer(backend, f"{path.resolve().parent.name}/{path.name}")


def _from_transformers_files(name: str, where: str, **options) -> Tokenizer:
    transformers = import_extra("transformers", "models")
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(where, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        kind = "no tokenizer could be read there" if Path(where).is_dir() else "neither a path here nor on the hub"
        raise ValueError(f"tokenizer {name!r}: {kind} ({type(error).__name__}: {reason})") from error
    return Tokenizer.from_transformers(loaded, name)


def _fingerprint(backend) -> str:
    # Serialised again with sorted keys: the library's own key order has changed between releases.
    content = json.loads(backend.to_str())
    content.pop("truncation", None)
    content.pop("padding", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _pieces(text: str) -> list[str]:
    """`text` cut after line breaks into pieces of at most `_PIECE_CHARACTERS` (elsewhere if none is near)."""
    if len(text) <= _PIECE_CHARACTERS:
        return [text]
    pieces, start = [], 0
    while len(text) - start > _PIECE_CHARACTERS:
        end = start + _PIECE_CHARACTERS
        near_end = max(start, end - (64 << 10))
        lone = [match.end() for match in _LONE_LINE_BREAK.finditer(text, near_end, end)]
        end = lone[-1] if lone else text.rfind("\n", near_end, end) + 1 or end
        pieces.append(text[start:end])
        start = end
    pieces.append(text[start:])
    return pieces
