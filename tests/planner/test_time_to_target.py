"""Plans are ranked by seconds of a step times how many more steps the same loss needs, where techniques may need more.

Tests of `ask/exchange.py`.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_spaces import Space, machine, model

from meshwright.ask.exchange import advise_exchange, with_bandwidth
from meshwright.ask.question import Question
from meshwright.cli.main import main
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named, technique_names
from meshwright.core.work import ADAM
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import profile
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.planner.best_first import BestFirst
from meshwright.planner.search import search
from meshwright.planner.wishes import SearchInputs, read_wishes
from meshwright.simulator.forecast import forecast

BANNED = tuple(name for name in technique_names() if name not in ("replicate", "local_steps"))


def _times(plan: Plan) -> float:
    """By hand: the geometric mean of 1 and what was measured with nesterov, momentum 0.5."""
    used = plan.technique("local_steps")
    if used is None:
        return 1.0
    settings: Any = used
    assert settings.outer == "nesterov"
    assert settings.outer_momentum == 0.5
    return math.sqrt({16: 1.34, 64: 1.44, 256: 1.65}[settings.every])


@pytest.mark.parametrize("names", [("replicate", "local_steps"), ("shard", "local_steps")])
def test_the_search_finds_the_soonest_of_all_plans(names: tuple[str, ...]) -> None:
    has_islands = set[bool]()
    for seed in range(5):
        draw = random.Random(seed)
        place = machine(draw, "2x2xh100")
        # From a link that hardly matters to one that nothing but islands can stand.
        inner, outer = (replace(link, latency_seconds=1e-9) for link in (place.inner, place.outer))
        fast = replace(place, inner=replace(inner, bytes_per_second=1e13), outer=outer)
        place = with_bandwidth(fast, 10.0 ** (13 - 2 * seed))
        space = Space(
            profile=model(draw, 2, 1),
            machine=place,
            batch=4,
            sequence=16,
            names=names,
            microbatch=1,
            allow="approximate",
        )
        seconds = {}
        for plan in space.plans():
            told = forecast(space.profile, plan, space.machine, sequence=space.sequence, replays=False)
            seconds[plan] = told.step_seconds * _times(plan)
        found = search(space.profile, space.machine, **space.question, epsilon=0.0, top=1)
        assert found.best is not None
        assert found.gap_fraction == 0
        assert found.best.seconds_to_target == pytest.approx(min(seconds.values()), rel=1e-5)
        has_islands.add(found.best.plan.technique("local_steps") is not None)
        islands = {plan: each for plan, each in seconds.items() if plan.technique("local_steps")}
        assert islands
        pinned = search(space.profile, space.machine, **space.question, epsilon=0.0, top=1, pin=["local_steps"])
        assert pinned.best is not None
        assert pinned.best.seconds_to_target == pytest.approx(min(islands.values()), rel=1e-5)
    assert has_islands == {True, False}


def test_bounds_of_candidates_have_their_own_factor() -> None:
    place = with_bandwidth(machine(random.Random(1), "2x2xh100"), 1e7)
    space = Space(
        profile=model(random.Random(1), 2, 1), machine=place, batch=4, sequence=16, names=("replicate", "local_steps")
    )
    space = replace(space, microbatch=1, allow="approximate")
    wishes = read_wishes((), space.question["ban"], allow="approximate", microbatch=1)
    settings = {"profile": space.profile, "cluster": place, "optimizer": ADAM, "batch": 4, "sequence": 16}
    pool = BestFirst(SearchInputs(**settings, wishes=wishes, epsilon=0.0), rescues=False)
    pool._add("fp32")
    columns = pool.candidates
    least: dict[tuple[int, int], float] = {}  # by updates between meetings (0: no islands) and islands
    for at, index, bound in zip(columns.leaf_of, columns.index_of, columns.least_seconds, strict=True):
        (islands,) = (each for each in pool.leaves[at].techniques if each.name == "local_steps")
        size = int(pool.leaves[at].grid.columns["local"][index])
        key = (islands.every if size > 1 else 0, size)  # type: ignore[attr-defined]
        least[key] = min(least.get(key, math.inf), float(bound))
    best: dict[tuple[int, int], float] = {}
    for plan in space.plans():
        used: Any = plan.technique("local_steps")
        key = (used.every, used.size) if used else (0, 1)
        told = forecast(space.profile, plan, place, sequence=16, replays=False)
        best[key] = min(best.get(key, math.inf), told.step_seconds * _times(plan))
    assert least.keys() == best.keys() == {(0, 1), (16, 2), (64, 2), (256, 2)}
    for key, seconds in best.items():
        # One stage, but for axes in either order: nearly what it takes.
        assert 0.7 * seconds <= least[key] <= seconds * (1 + 1e-9), key


def _question(rate: float, **changes: Any) -> Question:
    settings: dict[str, Any] = {"batch": 16, "sequence": 128, "allow": "approximate", "ban": BANNED}
    place = with_bandwidth(cluster("2x1xh100"), rate)
    return Question(profile=profile("byte-3m"), cluster=place, optimizer=OptimizerConfig(), **{**settings, **changes})


def _without(*names: str) -> tuple[str, ...]:
    return tuple(each for each in BANNED if each not in names)


def test_islands_are_for_slow_links_and_the_break_even_is_where_the_answer_changes() -> None:
    found = []
    for rate in (1e7, 1e11):
        question = _question(rate)
        best = question.ask().best
        assert best is not None
        advice = advise_exchange(question, best, lambda text: None)
        assert advice is not None
        assert advice.other is not None
        is_slow = rate == 1e7
        assert (best.plan.technique("local_steps") is not None) is is_slow
        assert (advice.other.plan.technique("local_steps") is None) is is_slow
        assert advice.best.seconds_to_target < advice.other.seconds_to_target
        assert advice.break_even_bytes_per_second is not None
        assert (rate < advice.break_even_bytes_per_second) is is_slow
        assert f"{'above' if is_slow else 'below'} " in advice.lines()[-1]
        assert any("Douillard et al. 2023" in line for line in advice.lines())
        found.append(advice.break_even_bytes_per_second)
    for rate, has_islands in ((0.9 * min(found), True), (1.1 * max(found), False)):
        again = _question(rate).ask().best
        assert again is not None
        assert (again.plan.technique("local_steps") is not None) is has_islands
    assert found[0] == pytest.approx(found[1], rel=0.05)


def test_a_pinned_exchange_that_is_slower_anywhere_is_not_called_faster() -> None:
    question = _question(1e11, pin=("compress_gradients.codec=sign",), ban=_without("compress_gradients", "replicate"))
    best = question.ask().best
    assert best is not None
    advice = advise_exchange(question, best, lambda text: None)
    assert advice is not None
    assert advice.other is not None
    is_faster = advice.other.seconds_to_target < advice.best.seconds_to_target
    assert is_faster
    assert "is faster at any bandwidth" in advice.lines()[-1] or "would be faster above" in advice.lines()[-1]


@pytest.mark.parametrize("asked", [{"pin": ("gossip=2",)}, {"cluster": cluster("2xh100")}])
def test_nothing_is_recommended_where_a_price_is_unknown_or_nothing_is_between_nodes(asked: dict[str, Any]) -> None:
    question = replace(_question(1e7, ban=_without("gossip")), **asked)
    best = question.ask().best
    assert best is not None
    assert advise_exchange(question, best, lambda text: None) is None


def test_what_if_compares_by_what_is_learnt() -> None:
    question = _question(1e7)
    before = question.ask().best
    after = replace(question, cluster=with_bandwidth(question.cluster, 1e9)).ask().best
    assert before is not None
    assert after is not None
    assert before.plan.steps_factor.source
    assert after.tokens_to_target_per_second >= before.tokens_to_target_per_second
    tokens = before.plan.batch * question.sequence
    assert before.tokens_to_target_per_second == pytest.approx(tokens / before.seconds_to_target)


def test_without_leave_nothing_has_a_statistical_price() -> None:
    allowed, usual = _question(1e7), _question(1e7, allow="rounded")
    plans = [each.plan for each in usual.ask(top=4).ranked]
    assert plans == [each.plan for each in replace(allowed, ban=(*BANNED, "local_steps")).ask(top=4).ranked]
    assert all(plan.steps_factor == (1.0, 1.0, 1.0, "") for plan in plans)
    one_node = replace(allowed, cluster=cluster("2xh100"))
    best = one_node.ask().best
    assert best is not None
    assert advise_exchange(one_node, best, lambda text: None) is None


def test_factors_of_techniques_multiply_and_an_axis_of_one_rank_has_none() -> None:
    islands, coded = technique_named("local_steps"), technique_named("compress_gradients")
    settings: dict[str, Any] = {"every": 64, "outer_momentum": 0.5}
    both = Plan(techniques=(islands(size=2, **settings), coded(codec="powersgd")), batch=4).steps_factor
    assert both[:3] == pytest.approx((1.0, math.sqrt(1.44 * 1.37), 1.44 * 1.37))
    assert "Douillard" in both.source
    assert "Vogels" in both.source
    alone = Plan(techniques=(islands(size=1, **settings),), batch=4)
    assert alone.steps_factor == (1.0, 1.0, 1.0, "")
    for kind in map(technique_named, technique_names()):  # bounds leave factors out, so none may be below one
        if kind.steps_factor is not technique_named("replicate").steps_factor:
            sizes = {"size": 2} if kind.axis else {}
            low, mid, high, source = kind(**sizes).steps_factor
            assert 1 <= mid <= high
            assert low <= mid
            assert source


def test_the_command_says_which_exchange_and_where_another_is_as_fast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "slow.json"
    file.write_text(_question(1e7).cluster.to_json())
    words = ["plan", "--model", "byte-3m", "--cluster", str(file), "--seq", "128", "--batch", "16"]
    words += [word for name in BANNED for word in ("--ban", name)]
    assert main([*words, "--json"]) == 0
    assert "exchange" not in json.loads(capsys.readouterr().out)
    assert main([*words, "--json", "--allow", "approximate"]) == 0
    told = json.loads(capsys.readouterr().out)["exchange"]
    best = told["best"]
    assert best["exchange"].startswith("local_steps(size=2")
    step = best["forecast"]["step_seconds"]
    assert best["seconds_to_target"]["mid"] == pytest.approx(step * best["steps_factor"]["mid"])
    high = best["forecast"]["step_seconds_high"] * best["steps_factor"]["high"]
    assert best["seconds_to_target"]["high"] == pytest.approx(high)
    assert told["bytes_per_second"] == 1e7 < told["break_even_bytes_per_second"]
    assert main([*words, "--allow", "approximate"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "to target" in shown
    assert "break-even: gradients summed every step would be faster above" in shown
    assert main([*words, "--allow", "approximate", "--why", "local_steps.every"]) == 0
    table = " ".join(capsys.readouterr().out.split()).partition("why local_steps.every")[2]
    assert "step to target memory" in table, "a percentage that no column explains"
    assert main([*words, "--why", "replicate"]) == 0
    assert "to target" not in capsys.readouterr().out
