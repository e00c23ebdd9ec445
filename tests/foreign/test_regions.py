"""Regions of blocks that others wrote: what is found, and what must not be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from meshwright.core.plan import Plan
from meshwright.foreign.adapt import adapt
from meshwright.foreign.regions import find_regions
from meshwright.machine.named_clusters import cluster
from meshwright.techniques.tensor import Tensor as Split

SIZE = 8


class Wide(nn.Module):
    """norm -> up -> `between` -> down; `between` sees the block's input, too."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor], bias: bool = True):
        super().__init__()
        self.norm, self.between = nn.LayerNorm(SIZE), between
        self.up, self.down = nn.Linear(SIZE, 24, bias=bias), nn.Linear(24, SIZE, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(self.norm(x)), x))


def sample() -> tuple[Tensor]:
    return (torch.zeros(2, 6, SIZE, requires_grad=True),)


def test_columns_and_a_row_are_found() -> None:
    (region,), why = find_regions(Wide(lambda up, x: up.relu()), sample(), {})
    assert (region.columns, region.row, region.units, region.is_tail, why) == (("up",), "down", 12, True, "")


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(lambda up, x: up * x.mean(-1, keepdim=True), id="another way from the input"),
        pytest.param(lambda up, x: up / up.norm(dim=-1, keepdim=True), id="a norm of what is split"),
        pytest.param(lambda up, x: up.flip(-1), id="another order"),
    ],
)
def test_what_pieces_cannot_do_is_refused(between: Callable[[Tensor, Tensor], Tensor]) -> None:
    found, why = find_regions(Wide(between), sample(), {})
    assert found == []
    assert "are not pieces of what down reads" in why


def test_what_runs_on_tokens_chosen_by_their_values_is_refused() -> None:
    class Chosen(Wide):
        def forward(self, x: Tensor) -> Tensor:
            mine = x[..., 0] > 0
            return x.masked_scatter(mine.unsqueeze(-1), self.down(self.up(self.norm(x[mine])).relu()))

    found, why = find_regions(Chosen(lambda up, x: up), sample(), {})
    assert found == []
    assert "depends on their values" in why


def test_a_split_of_nothing_is_refused_and_not_offered() -> None:
    convolutions = nn.Sequential(*(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU()) for _ in range(3)))
    _, profile = adapt(nn.Sequential(*convolutions, nn.Flatten()), torch.zeros(1, 2, 4, 4), name="convolutions")
    (problem,) = Plan(techniques=(Split(size=2),), batch=2, microbatch=1).check(profile)
    assert "none of its blocks has linears" in str(problem)
    assert Split.options(profile, cluster("8xh100")) == ()
