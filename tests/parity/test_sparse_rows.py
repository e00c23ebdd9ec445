"""Replicas that gather the rows of embedding tables train as one device does, and send what is priced.

Tests of `techniques/replicate.py`, `ops/gradient_exchange.py`, `core/profile.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import test_local_steps as islands
import test_rows
import tiny
from tiny import t

from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Choice, Technique
from meshwright.launch.rank_pool import RankPool
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.cost_samples import dlrm_profile
from meshwright.models.presets import PRESETS, DLRMConfig, profile
from meshwright.planner.search import search
from meshwright.simulator.forecast import forecast
from meshwright.simulator.pricing import price
from meshwright.simulator.stage_seconds import routes

Run = Callable[..., list[dict[str, Any]]]
VOCABULARY, HIDDEN = 1000, 16
WORDS = tiny.LLAMA | {"vocab_size": VOCABULARY, "num_layers": 2}
DEEP = WORDS | {"num_layers": 4}
POSITIONS = WORDS | {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True}
TABLE = VOCABULARY * HIDDEN * 8


def rows_of(size: int = 2, *, sparse_rows: bool = True, **settings: Any) -> Technique:
    return t("replicate", size=size, sparse_rows=sparse_rows, **settings)


def gathered(answer: dict[str, Any]) -> dict[int, int]:
    """Bytes of a gather over the replicas -> how many."""
    return {size: count for kind, axis, size, count in answer["observed"] if (kind, axis) == ("all_gather", "dp")}


@pytest.mark.parametrize(
    ("techniques", "config", "tokens"),
    [
        ((rows_of(),), WORDS, 64),
        pytest.param((rows_of(),), POSITIONS, 64, marks=pytest.mark.slow),
        pytest.param((rows_of(4), tiny.RECOMPUTE), WORDS, 32, marks=pytest.mark.slow),
        pytest.param((rows_of(shares=(4, 4)), tiny.INTERLEAVED), DEEP, 64, marks=pytest.mark.slow),
        pytest.param((rows_of(), tiny.RING), WORDS, 32, marks=pytest.mark.slow),
        pytest.param((rows_of(), tiny.ZBV, tiny.EVERY_STEP), DEEP, 64, marks=pytest.mark.slow),
    ],
    ids=["two", "positions", "four", "interleaved", "ring", "zbv"],
)
def test_as_on_one_device_and_as_priced(
    techniques: tuple[Technique, ...], config: dict[str, Any], tokens: int, ran: Run
) -> None:
    plan = tiny.plan_of(*techniques, microbatch=1)
    answers = ran(plan, config)
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []
    ways = plan.mesh["dp"]
    for answer in answers:
        sums = [size for kind, axis, size, _ in answer["observed"] if (kind, axis) == ("all_reduce", "dp")]
        assert sum(size >= TABLE for size in sums) <= 1, "the head is summed, the table is not"
    # Ids of 8 bytes, rows of doubles; on the stage that has the table.
    wanted = {ways * tokens * 8: 1, ways * tokens * HIDDEN * 8: 1}
    assert gathered(answers[0]) == wanted
    assert sum(gathered(answer) == wanted for answer in answers) == len(answers) // plan.mesh.get("pp", 1)


@pytest.mark.parametrize("config", [test_rows.model(600, 31, 9, 3), test_rows.model(1, 2, 9, 1)], ids=["any", "hot"])
def test_large_tables_go_by_rows_and_small_ones_whole(config: dict[str, Any], ran: Run) -> None:
    tables = [600, 31, 9, 3]
    config["section"]["change"] = {"tables": tables}
    answers = ran(tiny.plan_of(rows_of(), microbatch=2), config)
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []
    ids = 4  # samples of a rank
    by_rows = [rows for rows in tables if 2 * ids * (8 * 8 + 8) < 2 * rows * 8 * 8]
    assert by_rows == [600, 31, 9]
    for answer in answers:
        assert gathered(answer) == {2 * ids * 3 * 8: 1, 2 * ids * 3 * 8 * 8: 1}
        assert ["all_reduce", "dp", 3 * 8 * 8, 1] in answer["observed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("techniques", "config"),
    [
        ((rows_of(),), tiny.LLAMA),
        ((rows_of(), tiny.TENSOR), WORDS),
        ((rows_of(), tiny.ROWS), test_rows.MODEL),
    ],
    ids=["small table", "cut by tensor", "cut by rows"],
)
def test_what_does_not_pay_or_is_cut_is_summed_whole(
    techniques: tuple[Technique, ...], config: dict[str, Any], ran: Run
) -> None:
    answers = ran(tiny.plan_of(*techniques, microbatch=1), config)
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences([answer for answer in answers if answer["holds_largest"]]) == []
    assert not any(gathered(answer) for answer in answers)


def test_in_bf16_sums_stay_in_float32(ran: Run) -> None:
    answers = ran(tiny.plan_of(rows_of(), tiny.BF16), WORDS, dtype="float32")
    assert tiny.price_differences(answers) == []
    assert gathered(answers[0]) == {2 * 64 * 8: 1, 2 * 64 * HIDDEN * 4: 1}


def test_replicas_have_the_same_bits_and_checkpoints_are_those_of_whole_sums(pool: RankPool, tmp_path: Any) -> None:
    plain = tiny.SGD | {"momentum": 0.0, "clip": 0.0}
    models = []
    for name, technique in (("rows", rows_of(4)), ("whole", t("replicate", size=4))):
        question = islands.asked(tmp_path / name, technique, steps=3, config=WORDS, optimizer=plain)
        answers = pool.run("local_jobs:trained_job", question, num_ranks=4)
        assert all(answer["held"] == answers[0]["held"] for answer in answers)
        models.append(islands.shared_model(tmp_path / name, 3))
    assert islands.close(*models)


def test_only_tables_that_nothing_else_uses_can_be_gathered() -> None:
    assert list(tiny.profile_of(WORDS).lookup_tables) == [("embed", "tokens.weight")]
    assert not tiny.profile_of(WORDS | {"tied": True}).lookup_tables
    assert len(test_rows.PROFILE.lookup_tables) == len(test_rows.TABLES)
    frozen = [
        replace(layer, params=tuple(replace(param, frozen=True) for param in layer.params))
        for layer in test_rows.PROFILE.layers
    ]
    assert not replace(test_rows.PROFILE, layers=tuple(frozen)).lookup_tables


@pytest.mark.parametrize(
    ("techniques", "config", "said"),
    [
        ((rows_of(),), WORDS | {"tied": True}, "no trained embedding table that is not tied"),
        ((rows_of(algorithm="ring"),), WORDS, "ring sums whole tables"),
        ((rows_of(shares=(2, 6)),), WORDS, "with shares ranks look up differently many rows"),
        ((rows_of(), tiny.SHARD2), WORDS, "shard takes or sums gradients layer by layer, not when rows are gathered"),
        ((rows_of(), tiny.KEEP_ALL), WORDS, "compress_gradients takes or sums gradients"),
        ((rows_of(), tiny.ON_HOST), WORDS, "offload_states takes or sums gradients"),
        ((rows_of(), t("pipeline", size=2, schedule="async")), WORDS, "steps that overlap look up rows for two"),
    ],
)
def test_what_cannot_gather_rows_is_refused(
    techniques: tuple[Technique, ...], config: dict[str, Any], said: str
) -> None:
    problems = tiny.plan_of(*techniques, microbatch=1).check(tiny.profile_of(config))
    assert any(said in str(problem) and problem.fix for problem in problems), problems


def test_plans_without_it_are_written_as_before() -> None:
    assert "sparse_rows" not in tiny.plan_of(tiny.REPLICATE).to_json()
    plan = tiny.plan_of(rows_of())
    assert Plan.from_json(plan.to_json()) == plan


def seconds(model: Profile, technique: Technique, place: Any, batch: int, sequence: int) -> float:
    plan = tiny.plan_of(technique, batch=batch, microbatch=batch // place.num_devices)
    return forecast(model, plan, place, sequence=sequence).step_seconds


def test_the_price_takes_rows_for_many_words_and_few_tokens_over_a_slow_link_only() -> None:
    """A vocabulary of 128 Ki that is a fifth of the model, on two devices of a 1 GB/s link."""
    shape: Any = PRESETS["llama3.2-1b"]
    model = decoder_profile(replace(shape, tied=False, num_layers=4), "words")
    place = cluster("2xa100-80")
    slow = replace(place, inner=replace(place.inner, bytes_per_second=1e9))
    assert any(isinstance(each, Choice) for each in rows_of().options(model, slow))
    few, many = (
        [seconds(model, rows_of(sparse_rows=by_rows), slow, batch, 512) for by_rows in (True, False)]
        for batch in (2, 512)
    )
    road = routes(slow, {"dp": 2})["dp"]
    gathers = [float(road.seconds("all_gather", 2 * 512 * size)) for size in (8, 2048 * 4)]
    saved = float(road.seconds("all_reduce", 128256 * 2048 * 4)) - sum(gathers)
    assert saved > 1
    assert few[1] - few[0] == pytest.approx(saved, rel=0.02)  # the rest hides behind more
    assert many[0] == many[1]
    bans = ["shard", "tensor", "pipeline", "context"]
    found = search(model, slow, batch=2, sequence=512, ban=bans)
    assert found.best is not None
    assert found.best.plan.technique("replicate") == rows_of()
    large = search(model, slow, batch=512, sequence=512, ban=[*bans, "recompute", "compile"])
    assert large.best is not None
    assert large.best.plan.technique("replicate") == t("replicate", size=2)


def test_search_does_not_try_it_where_tables_are_a_small_part() -> None:
    kind, place = type(rows_of()), cluster("8xh100")
    assert not any(isinstance(each, Choice) for each in kind.options(profile("llama3-8b"), place))
    many = dlrm_profile(DLRMConfig(tables=(100000,), embedding_size=8, num_dense=5, bottom=(16,), top=(32, 16)), "m")
    assert any(isinstance(each, Choice) for each in kind.options(many, place))


def test_a_model_of_many_tokens_has_the_price_of_whole_sums() -> None:
    model, each = profile("llama3-8b"), []
    for by_rows in (True, False):
        plan = tiny.plan_of(rows_of(8, sparse_rows=by_rows), batch=128, microbatch=1)
        tasks = price(model, plan, sequence=8192).collectives
        each.append(sorted((task.kind, task.bytes) for task in tasks if task.repeat))
    assert each[0] == each[1]
    plan = tiny.plan_of(rows_of(8), batch=8, microbatch=1)
    kinds = {task.kind for task in price(model, plan, sequence=2048).collectives if task.repeat}
    assert kinds == {"all_reduce", "all_gather"}
    assert json.loads(plan.to_json())["techniques"][0]["sparse_rows"] is True
