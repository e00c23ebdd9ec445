"""Plans on groups of different devices: where ranks lie, what a step takes, what fits, what is refused.

Tests of `core/placement.py`, `simulator/mixed_groups.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from meshwright.core.cluster import Cluster, Device, DeviceGroup, Link
from meshwright.core.errors import MeshwrightError
from meshwright.core.placement import group_of_units, placed
from meshwright.core.plan import Plan
from meshwright.core.technique import Technique, technique_named
from meshwright.core.work import ADAM
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import DecoderConfig
from meshwright.simulator.forecast import forecast
from meshwright.simulator.pricing import stage_plan
from meshwright.simulator.simulate import simulate

SEQUENCE = 2048
PROFILE = decoder_profile(
    DecoderConfig(
        num_layers=12, hidden_size=2048, num_heads=16, num_kv_heads=8, ffn_size=8192, vocab_size=8192, max_sequence=2048
    ),
    "small",
)
BOTH = cluster("8xh100+8xa100-80")


def t(name: str, **settings: Any) -> Technique:
    return technique_named(name)(**settings)


def plan_of(*techniques: Technique, batch: int = 64, microbatch: int = 1, **settings: Any) -> Plan:
    return Plan(techniques=techniques, batch=batch, microbatch=microbatch, **settings)


def slower(device: Device, times: float) -> Device:
    """The same device, everything on it so many times as slow."""
    return replace(
        device,
        flops_per_second={dtype: rate / times for dtype, rate in device.flops_per_second.items()},
        memory_bytes_per_second=device.memory_bytes_per_second / times,
        launch_seconds=device.launch_seconds * times,
        kernel_seconds=device.kernel_seconds * times,
    )


def beside(first: Cluster, device: Device, *, num_devices: int, between: Link | None = None) -> Cluster:
    other = DeviceGroup(device=device, inner=first.inner, outer=first.outer, devices_per_node=num_devices)
    return replace(first, name="one+other", others=(other,), between=between)


class TestTheCluster:
    def test_names_count_and_views(self) -> None:
        found = cluster("8xH100 + 2x8xa100")
        assert (found.num_devices, found.group_names) == (24, ("8xh100", "2x8xa100"))
        assert [group.num_devices for group in found.groups] == [8, 16]
        second = found.view(1)
        assert (second.num_nodes, second.devices_per_node, second.others) == (2, 8, ())
        assert second.device == cluster("a100").device
        assert Cluster.from_json(found.to_json()) == found

    def test_a_file_of_version_2_is_read_as_it_was(self) -> None:
        value = json.loads(cluster("8xh100").to_json())
        del value["others"], value["between"]
        assert Cluster.from_json(json.dumps({**value, "version": 2})) == cluster("8xh100")

    def test_everything_wrong_with_a_name_is_told_at_once(self) -> None:
        with pytest.raises(MeshwrightError) as told:
            cluster("8xh1000+0xa100+x")
        assert len(told.value.problems) == 3

    def test_devices_that_cannot_talk_are_refused(self) -> None:
        with pytest.raises(MeshwrightError, match=r"others\[0\].device.kind: is cpu, the first group cuda"):
            cluster("8xh100+laptop")
        with pytest.raises(MeshwrightError, match="nothing lies between groups"):
            replace(cluster("8xh100"), between=cluster("8xh100").outer)
        bad = replace(BOTH.others[0], num_nodes=0, inner=replace(BOTH.inner, latency_seconds=-1))
        with pytest.raises(MeshwrightError) as told:
            replace(BOTH, others=(bad,))
        assert [problem.where for problem in told.value.problems] == [
            "others[0].inner.latency_seconds",
            "others[0].num_nodes",
        ]

    def test_only_what_is_there_can_be_asked_for(self) -> None:
        assert BOTH.resized(16) == BOTH
        with pytest.raises(MeshwrightError, match=r"groups of 8 \+ 8 devices; 4 ranks do not say whose"):
            BOTH.resized(4)

    def test_what_joins_groups(self) -> None:
        mixed = cluster("8xh100+8xa100+8xv100")
        assert mixed.link_between((0, 1)) == min(
            (cluster("h100").outer, cluster("a100").outer), key=lambda link: link.bytes_per_second
        )
        given = Link(name="WAN", bytes_per_second=1e8, latency_seconds=0.05)
        assert replace(mixed, between=given).link_between((0, 1)) == given

    def test_equal_neighbours_are_one_group(self) -> None:
        (found,) = cluster("8xh100+8xh100").merged().groups
        assert found == cluster("2x8xh100").groups[0]
        kept = cluster("8xh100+8xh100+8xa100").merged()
        assert [(group.num_nodes, group.devices_per_node) for group in kept.groups] == [(2, 8), (1, 8)]
        island = replace(cluster("8xh100+8xh100"), between=replace(cluster("h100").outer, latency_seconds=0.01))
        assert island.merged() is island


BF16 = t("precision", dtype="bf16")
ACROSS = {
    "stages": plan_of(BF16, t("pipeline", size=2), t("tensor", size=8)),
    "two stages a group": plan_of(BF16, t("pipeline", size=4), t("shard", size=2), t("tensor", size=2)),
    "chunks": plan_of(BF16, t("pipeline", size=4, schedule="interleaved"), t("tensor", size=4)),
    "a vee": plan_of(t("pipeline", size=4, schedule="zbv"), t("replicate", size=4)),
    "never flushed": plan_of(t("pipeline", size=4, schedule="async"), t("replicate", size=4)),
    "replicas": plan_of(BF16, t("replicate", size=16)),
    "replicas of shards": plan_of(BF16, t("replicate", size=2), t("shard", size=8)),
    "replicas of stages": plan_of(
        t("replicate", size=2), t("pipeline", size=4), t("tensor", size=2), axis_order=("dp", "pp", "tp")
    ),
}


class TestTheForecast:
    @pytest.mark.parametrize("name", ACROSS)
    def test_equal_groups_joined_like_nodes_are_a_cluster_of_one_kind(self, name: str) -> None:
        plan, alike = ACROSS[name], cluster("2x8xh100")
        joined = replace(cluster("8xh100+8xh100"), between=replace(alike.outer, name="by another name"))
        assert placed(plan, joined).others, "else it would not be priced by groups"
        assert not plan.check(PROFILE, joined)
        one, two = (forecast(PROFILE, plan, each, sequence=SEQUENCE) for each in (alike, joined))
        assert replace(two, bottleneck=one.bottleneck) == one

    @pytest.mark.parametrize("name", ACROSS)
    def test_a_faster_group_is_never_slower(self, name: str) -> None:
        plan = ACROSS[name]
        seconds = [
            forecast(PROFILE, plan, each, sequence=SEQUENCE).step_seconds
            for each in (
                replace(found, jitter_fraction=0.0) for found in (cluster("2x8xh100"), BOTH, cluster("2x8xa100"))
            )
        ]
        assert seconds[0] < seconds[1] < seconds[2] * 1.001

    def test_a_stage_takes_its_own_groups_time(self) -> None:
        """One microbatch through two stages: the second's time counts twice where its device is half as fast."""
        plan = plan_of(t("pipeline", size=2, stages=(7, 5)), batch=1)
        here = replace(cluster("2xh100"), jitter_fraction=0.0)
        alone = stage_plan(PROFILE, plan, here, sequence=SEQUENCE, optimizer=ADAM)
        mixed = beside(here.resized(1), slower(here.device, 2.0), num_devices=1, between=here.inner)
        first, second = (each.forward + each.backward for each in alone.spans)
        told = forecast(PROFILE, plan, mixed, sequence=SEQUENCE)
        tail = 2 * alone.stages[1].tail_seconds
        assert told.step_seconds == pytest.approx(first + 2 * second + 2 * alone.send_seconds + tail, rel=1e-9)

    def test_messages_between_peers_are_not_between_stages(self) -> None:
        """Peers send a layer's parameters to each other, stages a microbatch's activations."""
        between = replace(BOTH.inner, bytes_per_second=5e9)
        mixed = beside(cluster("4xh100").resized(2), slower(BOTH.device, 1.5), num_devices=2, between=between)
        idle = []
        for other in (t("replicate", size=2), t("gossip", size=2)):
            plan = plan_of(t("pipeline", size=2, stages=(7, 5)), other, batch=8, axis_order=("pp", other.axis))
            assert not plan.check(PROFILE, mixed)
            idle.append(forecast(PROFILE, plan, mixed, sequence=SEQUENCE).seconds_by_origin["pipeline"])
        assert idle[1] == pytest.approx(idle[0], rel=0.02)

    def test_a_step_is_the_slowest_replicas(self) -> None:
        here = replace(cluster("2xh100"), jitter_fraction=0.0)
        mixed = beside(here.resized(1), slower(here.device, 2.0), num_devices=1, between=here.inner)
        alone = stage_plan(PROFILE, plan_of(t("replicate", size=2)), here, sequence=SEQUENCE, optimizer=ADAM)
        each = alone.spans[0].forward + alone.spans[0].backward

        def seconds(*shares: int) -> float:
            plan = plan_of(t("replicate", size=2, shares=shares), batch=sum(shares))
            assert not plan.check(PROFILE, mixed)
            return forecast(PROFILE, plan, mixed, sequence=SEQUENCE).step_seconds

        # From 8 + 2 microbatches on, the first is the slower one; from 4 + 4 on the second.
        assert seconds(9, 2) - seconds(8, 2) == pytest.approx(each, rel=1e-9)
        assert seconds(4, 5) - seconds(4, 4) == pytest.approx(2 * each, rel=1e-9)
        assert seconds(8, 2) == seconds(8, 1)
        assert seconds(5, 4) == seconds(3, 4)

    def test_only_the_message_between_groups_waits_for_the_slow_link(self) -> None:
        """One microbatch, three stages on two groups: it crosses the slow link once forward and once back."""
        plan = plan_of(t("pipeline", size=3), batch=1)
        here = replace(cluster("2xh100"), jitter_fraction=0.0)
        near = Link(name="near", bytes_per_second=1e10, latency_seconds=1e-5)
        seconds = [
            forecast(PROFILE, plan, beside(here, here.device, num_devices=1, between=link), sequence=SEQUENCE)
            for link in (near, replace(near, latency_seconds=1.0 + 1e-5))
        ]
        assert seconds[1].step_seconds - seconds[0].step_seconds == pytest.approx(2.0, rel=1e-6)

    def test_gradients_are_summed_over_the_slow_link(self) -> None:
        plan = plan_of(t("replicate", size=2), batch=2)
        here = replace(cluster("h100"), jitter_fraction=0.0)
        slow = Link(name="far", bytes_per_second=1e6, latency_seconds=0.0)
        told = forecast(PROFILE, plan, beside(here, here.device, num_devices=1, between=slow), sequence=SEQUENCE)
        # Twice (n - 1) / n of float32 gradients; what backward hides of it is small beside it.
        assert told.step_seconds == pytest.approx(PROFILE.num_params * 4 / 1e6, rel=0.01)
        assert "over far" in told.bottleneck

    def test_the_tightest_rank_decides(self) -> None:
        roomy = replace(cluster("2xh100"), jitter_fraction=0.0)
        plan = plan_of(t("pipeline", size=2, stages=(11, 1)))
        tight = replace(roomy.device, memory_bytes=16 << 30)
        whole = forecast(PROFILE, plan, roomy, sequence=SEQUENCE)
        assert (whole.worst_stage, whole.fits) == (0, True)
        told = forecast(PROFILE, plan, beside(roomy.resized(1), tight, num_devices=1), sequence=SEQUENCE)
        assert (told.worst_stage, told.memory_bytes) == (1, 16 << 30)
        assert told.peak_bytes < whole.peak_bytes
        too_small = replace(roomy.device, memory_bytes=2 << 30)
        assert not forecast(PROFILE, plan, beside(roomy.resized(1), too_small, num_devices=1), sequence=SEQUENCE).fits
        first = replace(beside(roomy.resized(1), roomy.device, num_devices=1), device=too_small)
        assert not forecast(PROFILE, plan, first, sequence=SEQUENCE).fits

    def test_utilisation_is_of_all_devices_peaks(self) -> None:
        told = forecast(PROFILE, ACROSS["replicas"], BOTH, sequence=SEQUENCE)
        peak = 8 * (989e12 + 312e12)
        flops = PROFILE.model_flops(64 * SEQUENCE, SEQUENCE).published
        assert told.mfu == pytest.approx(flops / told.step_seconds / peak, rel=1e-9)

    @pytest.mark.parametrize("name", ["two stages a group", "chunks", "replicas of stages", "replicas"])
    def test_the_timeline_ends_when_the_step_does(self, name: str) -> None:
        plan = ACROSS[name]
        shown = simulate(PROFILE, plan, BOTH, sequence=SEQUENCE)
        told = forecast(PROFILE, plan, BOTH, sequence=SEQUENCE)
        end = max(span.start_seconds + span.seconds for span in shown.spans)
        assert end == pytest.approx(told.step_seconds, rel=1e-6)

    def test_the_slowest_replica_is_shown(self) -> None:
        shown = simulate(PROFILE, ACROSS["replicas of stages"], BOTH, sequence=SEQUENCE)
        assert {span.device for span in shown.spans} == {8, 10, 12, 14}


class TestWhereRanksLie:
    def test_group_after_group(self) -> None:
        assert group_of_units(ACROSS["two stages a group"], BOTH) == (0, 0, 1, 1)
        uneven = cluster("8xh100+2x8xa100")
        assert group_of_units(plan_of(t("pipeline", size=6), t("tensor", size=4)), uneven) == (0, 0, 1, 1, 1, 1)

    def test_other_orders_and_some_of_the_groups(self) -> None:
        turned = replace(ACROSS["stages"], groups=(1, 0))
        assert placed(turned, BOTH).group_names == ("8xa100-80", "8xh100")
        alone = plan_of(BF16, t("shard", size=8), groups=(1,))
        assert not alone.check(PROFILE, BOTH)
        told = forecast(PROFILE, alone, BOTH, sequence=SEQUENCE)
        assert told == forecast(PROFILE, replace(alone, groups=()), BOTH.view(1), sequence=SEQUENCE)
        same = replace(cluster("8xa100-80"), jitter_fraction=BOTH.jitter_fraction)
        assert told.step_seconds == forecast(PROFILE, alone, same, sequence=SEQUENCE).step_seconds
        assert Plan.from_json(alone.to_json()) == alone
        # Few ranks lie in the first group, whatever comes after it.
        few = plan_of(BF16, t("shard", size=8))
        assert forecast(PROFILE, few, BOTH, sequence=SEQUENCE) == forecast(
            PROFILE, few, BOTH.view(0), sequence=SEQUENCE
        )

    @pytest.mark.parametrize(
        ("plan", "where", "words"),
        [
            (plan_of(t("shard", size=16)), "axis_order", "fsdp (shard) is the outermost axis"),
            (plan_of(t("replicate", size=2), t("shard", size=8), groups=(0, 2)), "groups", "has groups 0 to 1"),
            (plan_of(t("replicate", size=2), t("shard", size=8), groups=(0, 0)), "groups", "each to be named once"),
            (plan_of(t("replicate", size=32)), "mesh", "needs 32 ranks"),
            (plan_of(t("replicate", size=2), t("shard", size=8), groups=(1,)), "mesh", "8xa100-80 has 8"),
        ],
    )
    def test_what_cannot_be(self, plan: Plan, where: str, words: str) -> None:
        told = [problem for problem in plan.check(PROFILE, BOTH) if problem.where == where]
        assert any(words in problem.what for problem in told), told

    def test_a_stage_or_replica_across_two_groups(self) -> None:
        lopsided = cluster("6xh100+10xa100")
        for name in ("pipeline", "replicate"):
            plan = plan_of(t(name, size=4), t("tensor", size=4))
            (problem,) = plan.check(PROFILE, lopsided)
            assert problem.where == name
            assert "1 has ranks 4 to 7, of which 6xh100 has those up to 5 and 10xa100 the rest" in problem.what
            with pytest.raises(MeshwrightError, match="1 has ranks 4 to 7"):
                forecast(PROFILE, plan, lopsided, sequence=SEQUENCE)

    def test_every_group_must_have_the_dtype(self) -> None:
        old = cluster("8xh100+8xv100")
        assert "bf16" not in old.others[0].device.flops_per_second
        told = ACROSS["stages"].check(PROFILE, old)
        assert any(problem.where == "precision" for problem in told)
        assert not ACROSS["stages"].check(PROFILE, BOTH)

    def test_equal_neighbours_take_what_one_group_takes(self) -> None:
        plan = plan_of(BF16, t("shard", size=16))
        assert not plan.check(PROFILE, cluster("8xh100+8xh100"))
        assert forecast(PROFILE, plan, cluster("8xh100+8xh100"), sequence=SEQUENCE) == forecast(
            PROFILE, plan, cluster("2x8xh100"), sequence=SEQUENCE
        )
