"""The published formulas at numbers made by hand, against our own rounds, and the page made from what was measured."""

from __future__ import annotations

import json

import pytest

from benchmarks import collectives
from meshwright.core.all_reduce import AllReduce, Hop


def test_formulas_at_numbers_made_by_hand() -> None:
    """Four workers: a link takes 10 s, adding 2 s, updating 1 s."""
    seconds = {name: formula(10.0, 2.0, 1.0, 4) for name, formula in collectives.FORMULAS.items()}
    assert seconds == {
        "naive server": 80 + 6 + 1,
        "async server": 40 + 1,
        "binomial tree": 60 + 4 + 1,
        "recursive doubling": 24 + 1,
        "scatter-reduce, broadcast": 35 + 1.5 + 1,
        "ring": 15 + 1.5 + 1,
        "n-sharded server": 15 + 1.5 + 0.25,
    }


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_our_rounds_pass_on_what_the_formulas_say(ranks: int) -> None:
    def passed(name: str) -> float:
        one = AllReduce(algorithm=name)  # type: ignore[arg-type]
        return float(one.seconds(ranks, ranks, Hop(0, 1), Hop(0, 1), 1.0))

    def published(name: str) -> float:
        return collectives.FORMULAS[name](1.0, 0.0, 0.0, ranks)

    assert passed("ring") == pytest.approx(published("ring"))
    assert passed("scatter_gather") == pytest.approx(published("ring"))
    assert passed("doubling") == pytest.approx(published("recursive doubling"))
    assert passed("tree") == pytest.approx(published("binomial tree") - 2)  # a server is one more node


def test_a_fit_gives_back_what_it_was_made_of() -> None:
    for name in (collectives.OWN, "tree", "hierarchical"):
        made = {}
        for size in collectives.FITTED:
            rounds, passed = collectives.parts(name, 6, collectives.SIZES[size])
            made[size] = rounds * 2e-4 + passed * 3e-9
        assert collectives.fit(name, 6, made) == pytest.approx((2e-4, 3e-9))


def test_the_page_and_its_picture_are_made_from_the_results() -> None:
    results = json.loads(collectives.RESULTS.read_text(encoding="utf-8"))
    assert collectives.PAGE.read_text(encoding="utf-8") == collectives.render(results)
    assert collectives.PICTURE.read_text(encoding="utf-8") == collectives.picture()
    assert list(results["seconds"]) == [str(n) for n in range(2, 9)]
