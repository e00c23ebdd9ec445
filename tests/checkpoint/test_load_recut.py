"""Saved under one cutting, read under any other: bit for bit the same tensor.

Tests of `core/box.py`, `runtime/checkpointing.py`.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import grid, holds, ragged, same_bits, save, toy
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.manifest import DTYPES, cover_problem
from meshwright.checkpoint.save import begin, commit, write_rank_file
from meshwright.checkpoint.step_folders import read_manifest, verify
from meshwright.core.box import Box
from meshwright.core.errors import MeshwrightError
from meshwright.runtime.checkpointing import as_it_lies


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, dice: random.Random) -> torch.Tensor:
    """Any bit pattern: NaN payloads and denormals must come back too. Strided, like slices of parameters."""
    generator = torch.Generator().manual_seed(dice.randrange(1 << 30))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    wide = (*shape, 2 * dtype.itemsize)
    raw = torch.randint(0, 256, wide, generator=generator, dtype=torch.uint8)
    return raw.view(dtype)[..., 1]


@settings(max_examples=50, deadline=None)
@given(
    shape=st.lists(st.integers(0, 7), max_size=4).map(tuple),
    dtype=st.sampled_from(sorted(DTYPES)),
    cuts=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    num_ranks=st.integers(1, 4),
    seed=st.integers(0, 1 << 30),
)
def test_any_cutting_reads_any_other(
    shape: tuple[int, ...], dtype: str, cuts: tuple[int, int], num_ranks: int, seed: int
) -> None:
    dice = random.Random(seed)
    tensor = random_bits(shape, getattr(torch, dtype), dice)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tmp = begin(root, 1)
        dealt: list[list[tuple[str, Box, torch.Tensor]]] = [[] for _ in range(num_ranks)]
        for box in ragged(shape, cuts[0], dice):
            dealt[dice.randrange(num_ranks)].append(("t", box, tensor[box.slices]))
        entries = [write_rank_file(tmp, rank, pieces) for rank, pieces in enumerate(dealt)]
        final = commit(root, 1, tmp, entries, {}, keep=1)
        assert verify(final) == ()
        reader = Reader(final)
        for box in ragged(shape, cuts[1], dice):
            out = torch.empty(box.size, dtype=tensor.dtype)
            reader.read_into("t", box, out)
            assert same_bits(out, tensor[box.slices])


@pytest.mark.parametrize("dim", [0, 1])
def test_pieces_of_fused_matrices_are_read_by_any_other_plan(tmp_path: Path, dim: int) -> None:
    """Two ranks hold a chunk of each of three matrices in one weight, cut again by rows as shards are."""
    groups, shape = (8, 4, 4), (16, 16)
    whole = torch.arange(256.0).view(shape)
    pieces = []
    for index in range(2):
        box = Box.whole(shape).grouped(dim, groups, 2).chunk(dim, index, 2)
        held = torch.cat([part.chunk(2, dim)[index] for part in whole.split(groups, dim)], dim)
        for shard in range(3):
            rows = box.chunk(0, shard, 3)
            pieces.append((rows, held[rows.offset[0] - box.offset[0] :][: rows.size[0]]))
    tmp = begin(tmp_path, 1)
    entries = [write_rank_file(tmp, rank, as_it_lies("w", *piece)) for rank, piece in enumerate(pieces)]
    reader = Reader(commit(tmp_path, 1, tmp, entries, {}, keep=1))
    for count in (1, 2, 4):
        for index in range(count):
            out = torch.empty([16 // count if each == dim else 16 for each in range(2)])
            box = Box.whole(shape).grouped(dim, groups, count).chunk(dim, index, count)
            for _, each, part in as_it_lies("w", box, out):
                reader.read_into("w", each, part)
            assert torch.equal(
                out, torch.cat([part.chunk(count, dim)[index] for part in whole.split(groups, dim)], dim)
            )


def test_two_by_two_to_rows_and_columns(tmp_path: Path) -> None:
    tensors = toy(3)
    reader = Reader(save(tmp_path, 3, tensors, counts=(2, 2), num_ranks=4))
    assert (reader.step, reader.state["seed"]) == (3, 7)
    assert reader.tensor_names() == ("weight", "bias", "count")
    for counts in [(1, 1), (4, 1), (1, 5), (3, 2)]:
        for box in grid((4, 6), counts):
            out = torch.empty(box.size)
            reader.read_into("weight", box, out)
            assert torch.equal(out, tensors["weight"][box.slices])


def test_reads_into_a_parameter_and_a_strided_view(tmp_path: Path) -> None:
    reader = Reader(save(tmp_path, 3, toy(3)))
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    reader.read_into("weight", Box.whole((4, 6)), parameter)
    strided = torch.zeros(6, 4).t()
    reader.read_into("weight", Box.whole((4, 6)), strided)
    assert torch.equal(parameter.detach(), strided)
    assert torch.equal(strided, toy(3)["weight"])


def test_the_shards_are_plain_safetensors(tmp_path: Path) -> None:
    final = save(tmp_path, 3, toy(3), counts=(1, 1), num_ranks=1)
    keys = {piece.tensor: piece.key for piece in read_manifest(final).pieces}
    with safe_open(final / "rank-00000.safetensors", framework="pt") as shard:
        assert {name: shard.get_tensor(key).shape for name, key in keys.items()} == {
            name: tensor.shape for name, tensor in toy(3).items()
        }
        assert torch.equal(shard.get_tensor(keys["weight"]), toy(3)["weight"])


def test_a_rank_may_hold_nothing(tmp_path: Path) -> None:
    assert holds(save(tmp_path, 1, {"count": torch.tensor(1)}, num_ranks=3), {"count": torch.tensor(1)})


def test_a_large_piece_is_written_in_blocks(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(3_000_000, dtype=torch.float32)}
    final = save(tmp_path, 1, tensors, counts=(1,), num_ranks=1)
    assert verify(final) == ()
    assert holds(final, tensors)


@pytest.mark.parametrize(
    ("name", "box", "out", "said"),
    [
        ("wieght", Box.whole((4, 6)), torch.empty(4, 6), 'Did you mean "weight"?'),
        ("weight", Box.whole((6, 4)), torch.empty(6, 4), "shape (4, 6) here, the model wants (6, 4)"),
        ("weight", Box.whole((4, 6)), torch.empty(4, 6).double(), "float32 here, the model wants float64"),
        ("weight", Box((4, 6), (0, 0), (2, 6)), torch.empty(4, 6), "its box (2, 6)"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, name: str, box: Box, out: torch.Tensor, said: str) -> None:
    with pytest.raises(MeshwrightError) as error:
        Reader(save(tmp_path, 3, toy(3))).read_into(name, box, out)
    assert said in str(error.value)
    assert name in str(error.value)


def brute_cover(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    count = torch.zeros(shape)
    for box in boxes:
        count[box.slices] += 1
    return bool((count == 1).all())


@settings(max_examples=150, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 1 << 30),
    data=st.data(),
)
def test_cover_agrees_with_counting_every_element(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    dice = random.Random(seed)
    boxes = ragged(shape, dice.randrange(6), dice)
    if data.draw(st.booleans()):  # move one piece: often the volume stays right and the cover does not
        box = boxes.pop(dice.randrange(len(boxes)))
        offset = tuple(dice.randint(0, limit - size) for limit, size in zip(shape, box.size, strict=True))
        boxes.append(Box(shape, offset, box.size))
    assert (cover_problem(shape, boxes) is None) == brute_cover(shape, boxes)
