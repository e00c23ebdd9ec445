"""The built-in tokenizer: every byte of UTF-8 text is one token.

It needs no vocabulary file, so a first run works on a laptop without a network, and any text round-trips.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteTokenizer:
    """256 tokens; 0 (never part of ordinary text) separates documents."""

    name: ClassVar[str] = "byte"
    vocab_size: ClassVar[int] = 256
    separator: ClassVar[int] = 0
    num_bytes_per_token: ClassVar[float] = 1.0

    def encode(self, text: bytes | str) -> TokenArray:
        """The tokens of a text, without a copy where it is given as bytes."""
        return np.frombuffer(text.encode("utf-8") if isinstance(text, str) else text, dtype=np.uint8)

    def decode(self, tokens: npt.ArrayLike) -> str:
        """The text of tokens; what is not UTF-8 becomes U+FFFD: sampled text is often cut mid-character."""
        wide = np.asarray(tokens, dtype=np.int64).reshape(-1)
        # A padded vocabulary has tokens past 255; 0xFF is never valid UTF-8, so they show as U+FFFD.
        known = np.where((wide >= 0) & (wide < self.vocab_size), wide, 0xFF)
        return known.astype(np.uint8).tobytes().decode("utf-8", errors="replace")
