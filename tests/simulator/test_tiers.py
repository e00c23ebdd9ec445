"""Copies between tiers take time on their own lane, and tiers fill up one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from meshwright.core.cluster import Cluster, HostResources
from meshwright.core.plan import Plan
from meshwright.core.technique import Technique, technique_named
from meshwright.core.work import Copy, Resident, Work
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import profile
from meshwright.simulator.forecast import Forecast, forecast
from meshwright.simulator.pricing import price
from meshwright.simulator.simulate import simulate

PROFILE = profile("gpt2-124m")


def copying(**settings: Any) -> Technique:
    """A technique that keeps 10 GB on the host and copies as much each way, in every backward or once a step."""

    class Copying(Technique):
        name: ClassVar[str] = "copying"
        phase: ClassVar[str] = "optimizer"

        def price(self, work: Work) -> Work:
            common: dict[str, Any] = {"layer": "blocks", "repeat": 1, "bytes": 10e9, "origin": self.name}
            common |= {"phase": "backward"} | settings
            return work.with_tasks(
                Copy(**common, source="host", target="device"), Copy(**common, source="device", target="host")
            ).with_residents(
                Resident(layer="blocks", category="buffers", repeat=1, bytes=10e9, life="always", tier="host")
            )

    return Copying()


def told(*techniques: Technique, on: Cluster | None = None) -> Forecast:
    plan = Plan(techniques=techniques, batch=8, microbatch=8)
    return forecast(PROFILE, plan, on or cluster("h100"), sequence=1024)


def test_a_copy_that_does_not_hide_takes_its_time() -> None:
    seconds = 2 * cluster("h100").tiers["host"].copy_seconds(10e9, is_inward=True)
    bare, copied = told(), told(copying())
    assert copied.step_seconds == pytest.approx(bare.step_seconds + seconds)
    assert copied.seconds_by_origin["copying"] == pytest.approx(seconds)
    assert copied.seconds_by_cause["copy"] == pytest.approx(seconds)
    assert copied.bottleneck.startswith("copying copies to and from the host")


@pytest.mark.parametrize("per_step", [False, True])
def test_a_hidden_copy_shows_only_what_compute_cannot_cover(per_step: bool) -> None:
    blocks: dict[str, Any] = {"repeat": 12, "per_step": per_step}
    small = told(copying(**blocks, hidden=True, bytes=1e5)).step_seconds
    assert told().step_seconds <= small < told().step_seconds + 2e-4
    large = told(copying(**blocks, hidden=True, bytes=1e9)).step_seconds
    assert told(copying(**blocks, bytes=1e9)).step_seconds > large > small


def test_other_tiers_are_told_of_and_must_hold_what_they_get() -> None:
    bare, copied = told(), told(copying())
    assert bare.peak_bytes_by_tier == {}
    assert copied.peak_bytes_by_tier == {"host": 10_000_000_000}
    assert copied.peak_bytes == bare.peak_bytes
    assert copied.fits
    small = replace(cluster("h100"), host=HostResources(memory_bytes=9_000_000_000))
    assert not told(copying(), on=small).fits
    assert told(on=small).fits


LATER: tuple[dict[str, Any], ...] = ({"phase": "step"}, {"phase": "weight"}, {"phase": "step", "per_step": True})


@pytest.mark.parametrize("settings", LATER)
def test_a_hidden_copy_of_any_phase_shows_what_compute_cannot_cover(settings: dict[str, Any]) -> None:
    bare, seconds = told().step_seconds, 2 * cluster("h100").tiers["host"].copy_seconds(10e9, is_inward=True)
    hidden = told(copying(**settings, hidden=True)).step_seconds
    assert bare + 0.4 * seconds < hidden < told(copying(**settings)).step_seconds + 1e-9


def test_a_copy_of_no_layer_is_made_by_every_stage() -> None:
    pipeline = technique_named("pipeline")(size=2)  # type: ignore[call-arg]
    for early in (copying(layer="", bytes=1e6), copying(layer="", bytes=1e6, hidden=True)):
        type(early).phase = "swap"
        plan = Plan(techniques=(early, pipeline), batch=8, microbatch=4)
        for stage in (0, 1):
            work = price(PROFILE, plan, sequence=1024, stage=stage)
            assert [copy.repeat for copy in work.copies] == [1, 1]
        interleaved = technique_named("pipeline")(size=2, schedule="interleaved")  # type: ignore[call-arg]
        plan = replace(plan, techniques=(early, interleaved))
        each = [price(PROFILE, plan, sequence=1024, stage=1, chunk=chunk) for chunk in (0, 1)]
        assert [sum(copy.repeat for copy in work.copies) for work in each] == [2, 0]
        assert forecast(PROFILE, plan, cluster("2xh100"), sequence=1024).step_seconds > 0


@pytest.mark.parametrize("group", [0, 1])
def test_tiers_of_a_mixed_cluster_are_judged_group_by_group(group: int) -> None:
    plan = Plan(
        techniques=(copying(), technique_named("replicate")(size=2)),  # type: ignore[call-arg]
        batch=8,
        microbatch=4,
    )
    mixed = cluster("h100+a100-80")
    assert forecast(PROFILE, plan, mixed, sequence=1024).fits
    small = HostResources(memory_bytes=9_000_000_000)
    if group == 0:
        tight = replace(mixed, host=small)
    else:
        tight = replace(mixed, others=(replace(mixed.others[0], host=small),))
    told = forecast(PROFILE, plan, tight, sequence=1024)
    assert not told.fits
    assert told.peak_bytes_by_tier == {"host": 10_000_000_000}


@pytest.mark.parametrize(
    "settings",
    [{}, {"hidden": True}, {"per_step": True, "hidden": True}, {"phase": "step"}, {"phase": "step", "hidden": True}],
)
def test_copies_have_a_lane_of_their_own(settings: dict[str, Any]) -> None:
    plan = Plan(techniques=(copying(**settings),), batch=8, microbatch=8)
    timeline = simulate(PROFILE, plan, cluster("h100"), sequence=1024)
    copies = [span for span in timeline.spans if span.lane == "copy"]
    each = cluster("h100").tiers["host"].copy_seconds(10e9, is_inward=True)
    assert {span.origin for span in copies} == {"copying"}
    slower = forecast(PROFILE, plan, cluster("h100"), sequence=1024).step_seconds
    assert sum(span.seconds for span in copies) == pytest.approx(2 * each)
    assert timeline.seconds == pytest.approx(slower)
