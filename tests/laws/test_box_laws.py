"""Pieces tile the whole, two pieces agree on what both hold, and weights do not depend on how they are cut.

Tests of `ops/initial_weights.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.box import Box
from meshwright.ops import initial_weights as init

laws = settings(max_examples=60, deadline=None)
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, length)) for length in shape)
    size = tuple(draw(st.integers(0, length - start)) for start, length in zip(offset, shape, strict=True))
    return Box(shape, offset, size)


def marked(box: Box) -> np.ndarray:
    whole = np.zeros(box.shape, dtype=int)
    whole[box.slices] = 1
    return whole


def tiles(shape: tuple[int, ...], counts: list[int]) -> list[Box]:
    pieces = [Box.whole(shape)]
    for dim, count in enumerate(counts):
        pieces = [piece.chunk(dim, index, count) for piece in pieces for index in range(count)]
    return pieces


@laws
@given(shape=shapes, data=st.data())
def test_chunks_tile_the_whole_as_torch_cuts_it(shape: tuple[int, ...], data: st.DataObject) -> None:
    dim, count = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 12))
    chunks = [Box.whole(shape).chunk(dim, index, count) for index in range(count)]
    assert (sum(marked(chunk) for chunk in chunks) == 1).all()
    pieces = torch.arange(int(np.prod(shape))).view(shape).chunk(count, dim)
    for index, chunk in enumerate(chunks):
        if index < len(pieces):
            assert tuple(pieces[index].shape) == chunk.size
        else:
            assert chunk.is_empty


@laws
@given(shape=shapes, data=st.data())
def test_chunks_of_chunks_tile_the_whole(shape: tuple[int, ...], data: st.DataObject) -> None:
    counts = [data.draw(st.integers(1, 4)) for _ in shape]
    assert (sum(marked(piece) for piece in tiles(shape, counts)) == 1).all()


@laws
@given(shape=shapes, data=st.data())
def test_overlap_is_what_both_hold(shape: tuple[int, ...], data: st.DataObject) -> None:
    first, second = data.draw(boxes(shape)), data.draw(boxes(shape))
    both = first.overlap(second)
    assert both == second.overlap(first)
    common = marked(first) * marked(second)
    assert (common == (0 if both is None else marked(both))).all()
    if both is not None:
        values = np.arange(common.size).reshape(shape)
        assert (values[both.slices] == values[first.slices][both.within(first)]).all()
        assert (values[both.slices] == values[second.slices][both.within(second)]).all()


@laws
@given(shape=shapes, seed=st.integers(0, 2**40), block=st.integers(1, 40), data=st.data())
def test_weights_are_the_same_however_they_are_cut(
    shape: tuple[int, ...], seed: int, block: int, data: st.DataObject
) -> None:
    counts = [data.draw(st.integers(1, 3)) for _ in shape]
    usual, init._BLOCK_ELEMENTS = init._BLOCK_ELEMENTS, block  # so that small tensors have several blocks
    try:
        source = init.seeded(lambda name: (0.5, 2.0), seed)
        whole = source("weight", Box.whole(shape), torch.float64)
        pasted = torch.full(shape, torch.nan, dtype=torch.float64)
        for piece in tiles(shape, counts):
            if not piece.is_empty:
                pasted[piece.slices] = source("weight", piece, torch.float64)
    finally:
        init._BLOCK_ELEMENTS = usual
    assert torch.equal(pasted, whole)


@laws
@given(shape=shapes, data=st.data())
def test_given_weights_are_the_same_however_they_are_cut(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.randn(shape)
    source = init.from_tensors({"weight": whole})
    piece = data.draw(boxes(shape))
    assert torch.equal(source("weight", piece, torch.float32), whole[piece.slices])


def test_other_names_seeds_and_rows_give_other_weights() -> None:
    def drawn(name: str, seed: int) -> torch.Tensor:
        return init.seeded(lambda _: (0.0, 1.0), seed)(name, Box.whole((64, 8)), torch.float32)

    first = drawn("a", 0)
    assert not torch.equal(first, drawn("b", 0))
    assert not torch.equal(first, drawn("a", 1))
    assert len({tuple(row.tolist()) for row in first}) == 64
    assert abs(float(first.mean())) < 0.2
    assert abs(float(first.std()) - 1) < 0.1
