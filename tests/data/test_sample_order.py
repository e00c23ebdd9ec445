"""The order of samples and the held-out split: laws for any size and seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.sample_order import permuted, split_samples

seeds = st.integers(-(2**70), 2**70)
laws = settings(max_examples=60, deadline=None)


@laws
@given(size=st.integers(1, 3000), seed=seeds, stream=st.integers(-1, 2**40))
def test_the_order_is_a_bijection(size: int, seed: int, stream: int) -> None:
    order = permuted(np.arange(size), size=size, seed=seed, stream=stream)
    assert np.array_equal(np.sort(order), np.arange(size))


@laws
@given(size=st.integers(1, 2**62), seed=seeds, data=st.data())
def test_elements_of_a_huge_order_are_inside_distinct_and_alone_equal_together(size, seed, data) -> None:
    index = data.draw(st.lists(st.integers(0, size - 1), max_size=20, unique=True))
    order = permuted(index, size=size, seed=seed, stream=3)
    assert all(0 <= place < size for place in order)
    assert len(set(order.tolist())) == len(index)
    assert [int(permuted(i, size=size, seed=seed, stream=3)[0]) for i in index] == order.tolist()


def test_epochs_and_seeds_give_other_orders_and_streams_mix_in_one_call() -> None:
    first, second = (permuted(np.arange(500), size=500, seed=7, stream=epoch) for epoch in (0, 1))
    other_seed = permuted(np.arange(500), size=500, seed=8)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other_seed)
    both = permuted(np.tile(np.arange(500), 2), size=500, seed=7, stream=np.repeat([0, 1], 500))
    assert np.array_equal(both, np.concatenate([first, second]))


def test_the_order_looks_random() -> None:
    order = permuted(np.arange(20_000), size=20_000, seed=1)
    assert abs(np.corrcoef(order, np.arange(20_000))[0, 1]) < 0.03
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.03
    reached = {tuple(permuted(np.arange(4), size=4, seed=seed)) for seed in range(400)}
    assert len(reached) == 24, "every order of four samples must be possible"


def test_the_order_is_pinned() -> None:
    """A change here silently reorders every resumed run: raise ORDER_VERSION with it."""
    assert permuted(np.arange(8), size=8, seed=0).tolist() == [5, 7, 6, 1, 4, 3, 2, 0]


@laws
@given(
    num_samples=st.integers(2, 3000),
    fraction=st.floats(0, 1, exclude_max=True, allow_nan=False),
    seed=seeds,
)
def test_train_and_held_out_are_disjoint_and_exhaustive(num_samples: int, fraction: float, seed: int) -> None:
    split = split_samples(num_samples, held_out_fraction=fraction, seed=seed)
    train = split.train(np.arange(split.num_train))
    held_out = split.held_out(np.arange(split.num_held_out)) if split.num_held_out else np.empty(0, np.int64)
    assert np.array_equal(np.sort(np.concatenate([train, held_out])), np.arange(num_samples))
    assert len(train) >= 1
    assert bool(len(held_out)) == (fraction > 0)
    wanted = num_samples * fraction
    assert abs(len(held_out) - wanted) <= max(1.0, 0.1 * wanted)


@pytest.mark.parametrize(("num_samples", "chunk_samples"), [(100, 1), (100_000, 16)])
def test_large_corpora_hold_out_neighbours_together(num_samples: int, chunk_samples: int) -> None:
    split = split_samples(num_samples, held_out_fraction=0.05, seed=0)
    assert split.chunk_samples == chunk_samples
    assert split.num_held_out == pytest.approx(0.05 * num_samples, rel=0.05)
