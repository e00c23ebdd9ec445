"""Text to tokens and back. The built-in tokenizer makes every byte of UTF-8 text one token.

It needs no vocabulary file, so a first run works on a laptop without a network, and any text round-trips.
Others come from a `tokenizers` JSON file, as every Hugging Face folder holds one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import xxhash

from meshwright.core.errors import error_at
from meshwright.core.units import MIB
from meshwright.data.file_list import readable
from meshwright.data.sample_order import Index

TokenArray = npt.NDArray[Any]
"""Tokens in the smallest unsigned type that holds the vocabulary."""
Weights = npt.NDArray[np.uint8]
Spans = Sequence[tuple[int, int]]

# Tokenizers slow down on one huge text; a cut at a line end changes next to nothing.
_PIECE_BYTES = MIB

# What tokenizers call the end of a text, most common first.
_SEPARATORS = (
    *("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|endofsentence|>", "<｜end▁of▁sentence｜>"),
    *("[EOS]", "<|im_end|>", "[SEP]", "<sep>"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteTokenizer:
    """256 tokens; 0 (never part of ordinary text) separates documents."""

    name: ClassVar[str] = "byte"
    """Another name wherever the same text gives other tokens."""
    vocab_size: ClassVar[int] = 256
    separator: ClassVar[int] = 0
    """The token that ends a document."""

    def encode(self, text: bytes | str) -> TokenArray:
        """The tokens of a text, without a copy where it is given as bytes."""
        return np.frombuffer(text.encode("utf-8") if isinstance(text, str) else text, dtype=np.uint8)

    def encode_all(self, texts: Sequence[bytes]) -> tuple[TokenArray, Index]:
        """The tokens of all texts one after the other, and how many each has."""
        return self.encode(b"".join(texts)), _lengths(texts)

    def encode_spans(self, texts: Sequence[bytes], spans: Sequence[Spans]) -> tuple[TokenArray, Index, Weights]:
        """The same, and 1 for each token that begins in one of its text's spans of characters."""
        flat, lengths = self.encode_all(texts)
        pieces = np.split((flat & 0xC0) != 0x80, np.cumsum(lengths)[:-1])  # not the bytes that go on with a character
        return flat, lengths, _are_inside([np.cumsum(begins) - 1 for begins in pieces], spans)

    def decode(self, tokens: npt.ArrayLike) -> str:
        """The text of tokens; what is not UTF-8 becomes U+FFFD: sampled text is often cut mid-character."""
        wide = np.asarray(tokens, dtype=np.int64).reshape(-1)
        # A padded vocabulary has tokens past 255; 0xFF is never valid UTF-8, so they show as U+FFFD.
        known = np.where((wide >= 0) & (wide < self.vocab_size), wide, 0xFF)
        return known.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizers` JSON file. Nothing is added to a text but the separator after each document."""

    def __init__(self, content: bytes, separators: Iterable[str | int]):
        """`separators` are words or tokens, best first. Raises ValueError where the content is no tokenizer."""
        from tokenizers import Tokenizer as Engine

        try:
            self._engine: Any = Engine.from_buffer(content)
        except BaseException as error:  # the library panics (not an Exception) on some malformed files
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise ValueError(f"is not a tokenizers file: {error}") from None
        self.content = content
        self._engine.no_truncation()
        self._engine.no_padding()
        vocabulary: dict[str, int] = self._engine.get_vocab(with_added_tokens=True)
        tokens = set(vocabulary.values())
        candidates = (vocabulary.get(word) if isinstance(word, str) else word for word in separators)
        separator = next((token for token in candidates if token in tokens), None)
        if separator is None:
            raise ValueError("has no token that ends a text")
        self.name = f"tokenizers:{xxhash.xxh3_64_hexdigest(content)}:{separator}"
        self.vocab_size = max(vocabulary.values()) + 1
        self.separator = separator
        self.dtype = np.min_scalar_type(self.vocab_size - 1)

    def encode(self, text: bytes | str) -> TokenArray:
        content, cuts = text.encode("utf-8") if isinstance(text, str) else text, [0]
        while cuts[-1] + _PIECE_BYTES < len(content):
            cuts.append(content.find(b"\n", cuts[-1] + _PIECE_BYTES) + 1 or len(content))
        cuts += [len(content)] if cuts[-1] < len(content) else []
        return self.encode_all([content[a:b] for a, b in pairwise(cuts)])[0]

    def encode_all(self, texts: Sequence[bytes]) -> tuple[TokenArray, Index]:
        words = [text.decode("utf-8", errors="replace") for text in texts]
        return self._flat(self._engine.encode_batch_fast(words, add_special_tokens=False))

    def encode_spans(self, texts: Sequence[bytes], spans: Sequence[Spans]) -> tuple[TokenArray, Index, Weights]:
        encoded = self._engine.encode_batch([text.decode("utf-8") for text in texts], add_special_tokens=False)
        places = [np.asarray([first for first, _ in each.offsets], np.int64) for each in encoded]
        return *self._flat(encoded), _are_inside(places, spans)

    def _flat(self, encoded: Sequence[Any]) -> tuple[TokenArray, Index]:
        ids = [each.ids for each in encoded]
        lengths = _lengths(ids)
        return np.fromiter(chain.from_iterable(ids), dtype=self.dtype, count=int(lengths.sum())), lengths

    def decode(self, tokens: npt.ArrayLike) -> str:
        wide = np.asarray(tokens, dtype=np.int64).reshape(-1)
        known = wide[(wide >= 0) & (wide < self.vocab_size)]  # a padded vocabulary has more
        return str(self._engine.decode(known.tolist(), skip_special_tokens=False))


Tokenizer = ByteTokenizer | FileTokenizer


def _are_inside(places: Sequence[Index], spans: Sequence[Spans]) -> Weights:
    """1 for each place of a text that lies in one of its spans, which are in order; all texts one after the other."""
    inside = []
    for own, each in zip(places, spans, strict=True):
        first, stop = np.asarray(each, dtype=np.int64).reshape(-1, 2).T
        inside.append(np.searchsorted(first, own, side="right") > np.searchsorted(stop, own, side="right"))
    return np.concatenate(inside).astype(np.uint8)


def _lengths(parts: Sequence[Any]) -> Index:
    return np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))


def open_tokenizer(name: str) -> Tokenizer:
    """ "byte", a tokenizers JSON file, or a folder with a tokenizer.json."""
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    path = Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        fix = 'Use "byte", a tokenizers JSON file, or a folder with a tokenizer.json.'
        raise error_at(file, f"cannot be read: {(error.strerror or 'unknown error').lower()}.", fix) from None
    own = special_token(tokenizer_settings(file.parent), "eos_token")  # what the folder itself calls the end of a text
    try:
        return FileTokenizer(content, (*([] if own is None else [own]), *_SEPARATORS))
    except ImportError:
        raise error_at(file, "reading it needs the tokenizers package.", "Run: pip install meshwright[text]") from None
    except ValueError as error:
        fix = f"Add one of these as a special token: {', '.join(_SEPARATORS[:3])}." if "ends" in str(error) else ""
        raise error_at(file, f"{error}.", fix) from None


def tokenizer_settings(folder: Path) -> Mapping[str, Any]:
    """The tokenizer_config.json of a folder; nothing where there is none."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    with readable(str(path), "a readable JSON object"):
        settings = json.loads(path.read_bytes())
        if not isinstance(settings, Mapping):
            raise ValueError(f"it holds a {type(settings).__name__}")
        return settings


def special_token(settings: Mapping[str, Any], key: str) -> str | None:
    token = settings.get(key)
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None
