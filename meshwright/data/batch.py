"""What one rank receives for one step, and which rows of the step's batch those are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.core.errors import MeshwrightError, Problem

Inputs = npt.NDArray[Any] | tuple[npt.NDArray[Any], ...]


class SampleRows(NamedTuple):
    """Samples as a model takes them; what each array holds is told in `Batch`."""

    inputs: Inputs
    targets: npt.NDArray[Any]
    weights: npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """This rank's rows of one step's batch.

                inputs                                              targets
        tokens  int64 (rows, sequence)                              int64 (rows, sequence): one token later
        packed  tokens and documents, int32 (rows, sequence)        the same
        images  float32 (rows, channels, height, width)             int64 (rows,): the class
        table   dense float32 (rows, D) and ids int64 (rows, T)     float32 (rows,): 0 or 1

    `documents` numbers the document of each token inside its row, from 0: attention and positions stay inside one.
    `num_tokens` is the sum of the weights over the WHOLE batch, all ranks together, so that the loss is
    divided once and without communication. It is 0 when every row of the step lies inside prompts.
    """

    inputs: Inputs
    targets: npt.NDArray[Any]
    weights: npt.NDArray[np.float32]  # the shape of targets: 0 = this target does not count
    num_tokens: float


def part_rows(batch: int, part: int, num_parts: int, shares: Sequence[int] = ()) -> slice:
    """The contiguous rows of part `part`: the parts in order are the batch, also when it does not divide.

    `shares`: what each of as many equal runs of parts gets, in any unit; empty: all parts alike.
    """
    shares = shares or (1,)
    each = num_parts // len(shares)
    run, place = divmod(part, each)
    before, whole = sum(shares[:run]) * each + place * shares[run], sum(shares) * each
    return slice(before * batch // whole, (before + shares[run]) * batch // whole)


def require_place(*, cursor: int, batch: int, part: int, num_parts: int) -> None:
    """Refuse a place in the stream that does not exist."""
    problems = []
    if cursor < 0:
        problems.append(Problem(where="data.cursor", what=f"{cursor} is negative.", fix="Start at 0."))
    if batch < 1:
        problems.append(Problem(where="data.batch", what=f"{batch} is not positive.", fix="Use 1 or more."))
    if num_parts < 1 or not 0 <= part < num_parts:
        what = f"part {part} of {num_parts} does not exist."
        problems.append(Problem(where="data.part", what=what, fix="Parts count from 0 to num_parts - 1."))
    if problems:
        raise MeshwrightError(problems)
