"""Where streamed weights are offered, and what they make of a forecast."""

from __future__ import annotations

from dataclasses import replace

import meshwright as mw
from meshwright.core.cluster import Cluster
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.models.presets import preset
from meshwright.simulator.pricing import price

STREAMED, ON_HOST = technique_named("stream_weights"), technique_named("offload_states")
RECOMPUTED = technique_named("recompute")()


def small_card() -> Cluster:
    """24 GB beside a large host whose figures are known."""
    card, large = mw.cluster("rtx4090"), mw.cluster("h200")
    device = replace(card.device, copy_bytes_per_second={"in": 25e9, "out": 25e9, "both": 20e9})
    return replace(card, device=device, host=replace(large.host, adam_elements_per_second=4e9))


def test_it_is_offered_where_weights_fill_a_device_whose_host_is_known() -> None:
    large, small = mw.model("llama3-8b", sequence=4096).profile, mw.model("gpt2-124m", sequence=1024).profile
    assert STREAMED.options(large, small_card())
    assert not STREAMED.options(small, small_card())
    assert not STREAMED.options(large, mw.cluster("rtx4090"))
    assert not STREAMED.options(large, mw.cluster("2x8xh100"))


def test_search_takes_it_where_nothing_else_fits() -> None:
    found = mw.plan(mw.model("llama3-8b", sequence=4096), small_card(), batch=8, sequence=4096).best
    assert found is not None
    assert found.plan.technique("stream_weights") is not None
    assert found.forecast.peak_allocated_bytes < 24e9


def test_a_deeper_model_needs_no_more_of_the_device_but_borders() -> None:
    plan = Plan(techniques=(STREAMED(), ON_HOST(), RECOMPUTED, technique_named("precision")()), batch=2, microbatch=2)
    peaks = []
    for layers in (8, 16, 32):
        model = replace(preset("llama3-8b"), num_layers=layers)
        said = mw.forecast(model, plan, small_card(), sequence=2048)
        peaks.append(said.peak_allocated_bytes - layers * 2 * 2048 * model.hidden_size * 2)
    assert peaks[0] == peaks[1] == peaks[2] > 0


def test_each_microbatch_copies_all_but_what_the_pass_before_has_left() -> None:
    profile = mw.model("llama3-8b", sequence=4096).profile
    for buffers, stages in ((2, 1), (3, 1), (2, 2)):
        cut = (technique_named("pipeline")(size=2),) if stages > 1 else ()
        plan = Plan(techniques=(STREAMED(buffers=buffers), ON_HOST(), *cut), batch=8, microbatch=2)
        work = price(profile, plan, sequence=4096)
        copies = [task for task in work.copies if task.origin == "stream_weights"]
        found = {(task.phase, task.per_step): int(task.repeat) for task in copies}
        blocks, stays = 32 // stages, buffers if stages == 1 else 0
        assert found == {
            ("forward", True): stays,
            ("forward", False): blocks - stays,
            ("backward", False): blocks - stays,
        }
        assert all(task.hidden and task.is_inward and task.tier == "host" for task in copies)


def test_replicas_share_a_copy_in_groups_that_lie_on_one_host() -> None:
    def ways(replicas: int, inside: int) -> int:
        sizes = {technique_named("replicate").axis: replicas, technique_named("tensor").axis: inside}
        return int(ON_HOST(host_ranks=8)._sharing(lambda axis: sizes.get(axis, 1))[1])  # type: ignore[attr-defined]

    found = {(replicas, inside): ways(replicas, inside) for replicas in (1, 2, 3, 4, 6, 16) for inside in (1, 2, 3, 8)}
    assert all(8 % (inside * ways) == 0 or ways == 1 for (_, inside), ways in found.items())
    assert all(replicas % ways == 0 for (replicas, _), ways in found.items())
    assert (found[4, 1], found[16, 1], found[16, 2], found[6, 2], found[3, 1]) == (4, 8, 4, 2, 1)
