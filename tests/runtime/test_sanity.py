"""Steps that are not finite, and spikes: refused on all ranks before anything changes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.step_folders import step_folder
from meshwright.core.box import Box
from meshwright.core.codec import decode
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.launch.rank_pool import RankPool
from meshwright.optimizers.rule import rules
from meshwright.run.run_file import TrainSection
from meshwright.runtime.sanity import LEAST_STEPS, SpikeRule, Straggler, StragglerWatch

NAN = {"2": "nan"}
ASYNC = tiny.t("pipeline", size=2, schedule="async")
PLANS = {
    "one": (),
    "one lion": (),
    "replicate": (tiny.REPLICATE,),
    "shard": (tiny.SHARD3,),
    "tensor": (tiny.TENSOR,),
    "pipeline": (tiny.PIPELINE,),
    "zbv and replicate": (tiny.ZBV, tiny.REPLICATE),
    "host": (tiny.ON_HOST_AHEAD,),
    "host and shard": (tiny.ON_HOST_AHEAD, tiny.SHARD2),
    "islands": (tiny.t("local_steps", size=2, every=2), tiny.t("compress_gradients")),
    "gossip": (tiny.t("gossip", size=2),),
}


def ran(
    pool: RankPool, techniques: Any, *, steps: int = 5, factors: Any = NAN, name: str = "adamw", folder: str = "",
    jump: int = -1, flip: Any = None, **settings: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    plan = tiny.plan_of(*techniques, microbatch=8 if tiny.IN_BACKWARD in techniques else 2)
    optimizer = {"name": name, "lr": 1e-2, "schedule": "constant"}
    settings = {"on_mismatch": "roll_back"} | settings
    optimizer |= {"clip": 0.0} if plan.overlaps_steps or tiny.IN_BACKWARD in techniques else {}
    given = {"batch": plan.batch, "steps": steps, "optimizer": optimizer, **settings}
    arguments = {"plan": json.loads(plan.to_json()), "settings": given, "factors": factors, "folder": folder}
    return pool.run("sanity_jobs:train_job", arguments | {"jump": jump, "flip": flip}, num_ranks=plan.num_ranks)


@pytest.mark.parametrize("name", PLANS)
def test_a_skipped_step_leaves_every_bit_on_every_rank(name: str, pool: RankPool) -> None:
    about = {"name": "lion" if "lion" in name else "adamw"}
    told = ran(pool, PLANS[name], on_nan="skip", **about)
    wanted = ran(pool, PLANS[name], factors={}, jump=2, **about)
    for rank, other in zip(told, wanted, strict=True):
        assert rank["raised"] == []
        assert rank["last"] == other["last"], "the skipped step has left something"
        skipped = [(step, step == 2, "not finite" * (step == 2)) for step in range(5)]
        assert [(step[0], step[2], step[3]) for step in rank["steps"]] == skipped
    assert len({str(rank["steps"][2][:5]) for rank in told}) == 1, "ranks do not agree"


def test_islands_meet_at_the_end_also_where_the_last_step_is_skipped(pool: RankPool, tmp_path: Path) -> None:
    islands, models = (tiny.t("local_steps", size=2, every=100),), []
    for steps, factors in ((4, {"3": "nan"}), (3, {})):
        folder = tmp_path / f"{steps}"
        ran(pool, islands, steps=steps, factors=factors, on_nan="skip", save_every=1, folder=str(folder))
        reader, found = Reader(step_folder(folder, steps)), {}
        for name in (name for name in reader.tensor_names() if name.startswith("parameter.")):
            shape = reader.manifest.tensors[name].shape
            found[name] = out = torch.empty(shape)
            reader.read_into(name, Box.whole(shape), out)
        models.append(found)
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


ROLLED = ((), (tiny.SHARD3,), (tiny.IN_BACKWARD,), (ASYNC,), (tiny.ON_HOST_AHEAD,))
SPIKE = {"20": "1e5"}


@pytest.mark.parametrize("name", ["one", "replicate", "fp16"])
def test_a_spike_is_warned_of_skipped_or_ignored(name: str, pool: RankPool) -> None:
    techniques = PLANS.get(name, (tiny.t("precision", dtype="fp16"), tiny.REPLICATE))
    about = {"steps": 23, "factors": SPIKE}
    if name == "fp16":
        about["factors"] = {"20": "8"}
    answers = {action: ran(pool, techniques, on_spike=action, **about) for action in ("ignore", "warn", "skip")}
    for action, ranks in answers.items():
        assert all(rank["steps"][20][2] == (action == "skip") for rank in ranks)
        reasons = [step[3] for step in ranks[0]["steps"]]
        assert reasons == ["spike" * (at == 20 and action != "ignore") for at in range(23)], (action, reasons)
    assert answers["warn"][0]["last"] == answers["ignore"][0]["last"]
    wanted = ran(pool, techniques, steps=23, factors={}, jump=20)
    assert [rank["last"] for rank in answers["skip"]] == [rank["last"] for rank in wanted]


@pytest.mark.parametrize(
    "techniques", [(), (tiny.SHARD3,), (tiny.IN_BACKWARD,), (ASYNC,), (tiny.ON_HOST_AHEAD,)], ids=str
)
def test_a_roll_back_restores_the_checkpoint_and_goes_on_past_the_batch(
    techniques: Any, pool: RankPool, tmp_path: Path
) -> None:
    about: dict[str, Any] = {"steps": 8, "save_every": 3, "factors": {"4": "nan"}}
    told = ran(pool, techniques, on_nan="roll_back", folder=str(tmp_path), **about)
    for rank in told:
        assert [(each[0], each[2]) for each in rank["raised"]] == [(5, "roll_back")]
        assert rank["raised"][0][4] == (techniques not in ((ASYNC,), (tiny.IN_BACKWARD,)))
        rolled = next(step for step in rank["steps"] if step[3] == "rolled back")
        saved = next(step for step in rank["steps"] if step[0] == 2)
        assert rolled[0] == 3
        assert rolled[5] == saved[5], "not what was saved"
        assert rank["last"][:2] == [8, 10 * 8], "two batches are passed over"
    stopped = ran(pool, techniques, on_nan="stop", folder=str(tmp_path / "other"), **about)
    assert all("mw replay RUN 5" in rank["raised"][0][3] for rank in stopped)
    assert all(rank["last"][:2] == [4, 4 * 8] for rank in stopped)


def test_a_run_that_stays_bad_stops(pool: RankPool) -> None:
    every = {str(step): "nan" for step in range(2, 20)}
    (answer,) = ran(pool, (), steps=20, factors=every, on_nan="skip", most_bad_steps=3)
    assert [step[2] for step in answer["steps"]] == [False, False, True, True, True]
    assert answer["last"][:2] == [5, 5 * 8]
    assert "4 times in a row (train.most_bad_steps is 3)" in answer["raised"][0][3]
    assert answer["last"][2] == next(step[5] for step in answer["steps"][3:] if step[5])


def test_limits_are_of_the_median_and_forget_the_step_before() -> None:
    rule = SpikeRule()
    for step in range(LEAST_STEPS + 1):
        assert rule.limits(step).loss == float("inf")
        rule.add(step, 2.0 + 0.01 * (step % 3), 1.0)
    limits = rule.limits(LEAST_STEPS + 1)
    assert limits.loss == pytest.approx(2.01 * 1.25)
    assert limits.gradient_norm == 3.0
    rule.add(LEAST_STEPS + 1, 1e9, 1e9)
    assert rule.limits(LEAST_STEPS + 2) == limits
    assert SpikeRule(json.loads(json.dumps(list(rule.steps)))).limits(90) == rule.limits(90)


@pytest.mark.parametrize("key", ["on_nan", "on_spike"])
@pytest.mark.parametrize("technique", [ASYNC, tiny.IN_BACKWARD], ids=str)
def test_what_updates_early_cannot_skip(key: str, technique: Any) -> None:
    settings = TrainSection(batch=8, steps=1, **{key: "skip"})
    (problem,) = settings.problems_with(Plan(batch=8, techniques=(technique,)))
    assert problem.where == f"train.{key}"
    assert technique.name in problem.what
    assert not TrainSection(batch=8, steps=1).problems_with(Plan(batch=8, techniques=(technique,)))


@pytest.mark.parametrize(
    ("techniques", "kind", "who"),
    [
        ((tiny.t("replicate", size=4),), "parameter", "rank 2 holds other bits than the other 3: "),
        ((tiny.t("replicate", size=4),), "exp_avg_sq", "rank 2 holds other bits than the other 3: exp_avg_sq of "),
        ((tiny.REPLICATE, tiny.TENSOR), "parameter", "hold different bits, and which are wrong cannot be known: "),
    ],
    ids=["parameter", "state", "two"],
)
def test_one_flipped_bit_is_found_and_its_rank_named(
    techniques: Any, kind: str, who: str, pool: RankPool, tmp_path: Path
) -> None:
    about: dict[str, Any] = {"steps": 5, "save_every": 1, "factors": {}}
    flip = {"rank": 2, "step": 3, "kind": kind}
    ranks = ran(pool, techniques, flip=flip, folder=str(tmp_path), **about)
    wanted = ran(pool, techniques, **about)
    for rank, other in zip(ranks, wanted, strict=True):
        ((step, reason, action, text, is_good),) = rank["raised"]
        assert (step, reason, action, is_good) == (4, "mismatch", "roll_back", False)
        assert who in text
        assert rank["last"] == other["last"], "the run did not get over it"


@pytest.mark.parametrize("name", sorted(rules()))
def test_undisturbed_replicas_agree_whatever_the_optimizer(name: str, pool: RankPool) -> None:
    for techniques in ((tiny.REPLICATE, tiny.SHARD1), (tiny.REPLICATE, tiny.TENSOR)):
        for rank in ran(pool, techniques, steps=2, factors={}, name=name):
            assert rank["raised"] == []


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_rank_that_dawdles_is_flagged_with_the_part_it_dawdles_in(part: str, pool: RankPool) -> None:
    plan = json.loads(tiny.plan_of(tiny.t("replicate", size=2), microbatch=2).to_json())
    arguments = {"plan": plan, "slow_rank": 1, "part": part, "ratio": 2.0, "steps": 32}
    for told in pool.run("sanity_jobs:straggler_job", arguments, num_ranks=2):
        assert [(rank, where) for _, rank, where, _ in told][:1] == [(1, part)]
        assert 10 < told[0][0] <= 31, told


def test_a_rank_is_slow_only_among_those_that_do_the_same_and_only_if_it_stays_so() -> None:
    watch = StragglerWatch.__new__(StragglerWatch)
    watch.work, watch.slow = [[0, 0], [0, 0], [0, 0], [1, 0]], Counter()
    usual, slow = [0.0, 1.0, 2.0, 0.5], [0.0, 1.0, 3.0, 0.5]
    other_stage = [0.0, 9.0, 9.0, 9.0]
    assert [watch._newly_slow([usual, slow, usual, other_stage]) for _ in range(2)] == [None, None]
    assert watch._newly_slow([usual, usual, usual, other_stage]) is None
    found = [watch._newly_slow([usual, slow, usual, other_stage]) for _ in range(4)]
    assert found == [None, None, Straggler(rank=1, ratio=4.5 / 3.5, part="backward"), None]


def test_bad_settings_are_told() -> None:
    with pytest.raises(MeshwrightError, match="compare_replicas_every: is -1"):
        TrainSection(batch=1, steps=1, compare_replicas_every=-1)
    with pytest.raises(MeshwrightError, match="on_nan"):
        decode(TrainSection, {"batch": 1, "steps": 1, "on_nan": "ignore"}, "train")
    with pytest.raises(MeshwrightError, match="most_bad_steps: is 0"):
        TrainSection(batch=1, steps=1, most_bad_steps=0)
