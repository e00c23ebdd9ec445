"""What a run file says about its data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from meshwright.core.errors import Problem, error_at, raise_problems

Kind = Literal["auto", "tokens", "images", "table"]
TokenDtype = Literal["auto", "uint8", "uint16", "uint32", "int32", "int64"]


@dataclass(frozen=True, kw_only=True)
class MixturePart:
    train: str | tuple[str, ...]
    """Files, as in `data.train`."""
    weight: float
    """Share of the samples that come from here, beside the other parts' weights."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise error_at("weight", f"is {self.weight}.", "Use more than 0.")


@dataclass(frozen=True, kw_only=True)
class DataSection:
    train: str | tuple[str, ...] = ()
    """Files, globs or folders: text, JSONL, Parquet, token files (.npy, .bin), Megatron .bin + .idx, images in a folder
    per class, .npz, .csv; "datasets:FOLDER"; "stdlib": the Python standard library's own source."""
    sequence: int = 0
    """Tokens in a sample; not used for images and tables."""
    held_out_fraction: float = 0.02
    """Share of the samples kept for evaluation."""
    seed: int = 0
    """Seed of the order of samples and of the choice of held-out ones."""
    kind: Kind = "auto"
    """What the files hold; auto: told from the files."""
    tokenizer: str = "byte"
    """byte, or a `tokenizers` JSON file, or a folder with a tokenizer.json."""
    packing: Literal["stream", "documents"] = "stream"
    """stream: one text after the other; documents: the same rows, attention and targets stay inside a document."""
    token_dtype: TokenDtype = "auto"
    """Type of the tokens in flat .bin files; auto: uint16."""
    text_key: str = "text"
    """The field of JSONL records, or the column, that holds the text."""
    prompt_key: str = "prompt"
    """The field or column that holds a prompt: given to the model, not learnt."""
    chat_template: str = ""
    """For records of `messages`: a Jinja file, or "chatml"; empty: the tokenizer's own (byte: chatml)."""
    mixture: tuple[MixturePart, ...] = ()
    """Several sources with weights, instead of `train`."""
    label: str = "label"
    """The column of a table to predict: 0 or 1."""

    def __post_init__(self) -> None:
        problems = []
        if self.sequence < 0:
            problems.append(Problem(where="sequence", what=f"is {self.sequence}.", fix="Use 1 or more."))
        if not 0 <= self.held_out_fraction < 1:
            what = f"is {self.held_out_fraction}."
            problems.append(Problem(where="held_out_fraction", what=what, fix="Use 0 to 1, 1 excluded."))
        raise_problems(problems)

    @property
    def patterns(self) -> tuple[str, ...]:
        return patterns_of(self.train)


def patterns_of(train: str | tuple[str, ...]) -> tuple[str, ...]:
    return (train,) if isinstance(train, str) else tuple(train)
