"""Pins and bans: respected, and refused all at once when they make no sense.

Tests of `planner/wishes.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.core.errors import MeshwrightError
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import preset
from meshwright.planner.search import SearchResult, search
from meshwright.planner.wishes import read_wishes

PROFILE = decoder_profile(preset("byte-3m"), "byte-3m")
MACHINE = cluster("4xh100")
# Launching so small a model's kernels takes longer than running them, in any precision.
MACHINE = replace(
    MACHINE, device=replace(MACHINE.device, launch_seconds=0.0, kernel_seconds=0.0, memory_half_bytes=0.0)
)


def _search(**wishes: object) -> SearchResult:
    return search(PROFILE, MACHINE, batch=16, sequence=128, **wishes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pin", "name", "field", "value"),
    [
        ("tensor=2", "tensor", "size", 2),
        ("tensor.sequence=true", "tensor", "sequence", True),
        ("pipeline.size=4", "pipeline", "size", 4),
        ("pipeline.stages=[1, 3]", "pipeline", "stages", (1, 3)),
        ("pipeline.chunks=2", "pipeline", "chunks", 2),
        ("tensor.overlap=2", "tensor", "overlap", 2),
        ("shard.stage=2", "shard", "stage", 2),
        ("recompute=1", "recompute", "layers", "first 1"),
        ("recompute=first 1", "recompute", "layers", "first 1"),
        ("recompute.layers=0-1", "recompute", "layers", "0-1"),
        ("recompute.layers=0", "recompute", "layers", "none"),
        ("recompute.layers=none", "recompute", "layers", "none"),
        ("recompute.layers=all", "recompute", "layers", "all"),
        ("recompute.attention=last 2", "recompute", "attention", "last 2"),
        ("recompute.attention=2", "recompute", "attention", "last 2"),
        ("recompute.selective=2", "recompute", "selective", "last 2"),
        ("recompute.slots=2", "recompute", "slots", 2),
        ("chunked_loss.chunks=4", "chunked_loss", "chunks", 4),
        ("precision.dtype=fp32", "precision", "dtype", "fp32"),
    ],
)
def test_a_pinned_setting_is_in_every_plan(pin: str, name: str, field: str, value: object) -> None:
    found = _search(pin=[pin])
    assert found.ranked
    for plan, _ in found.ranked:
        technique = plan.technique(name)
        assert technique is not None
        assert getattr(technique, field) == value


def test_a_pin_leaves_only_the_settings_that_go_with_it() -> None:
    found = _search(pin=["pipeline.schedule=greedy", "pipeline.most_held=2"])
    assert {getattr(plan.technique("pipeline"), "most_held", 0) for plan, _ in found.ranked} == {2}
    model = decoder_profile(replace(preset("byte-3m"), num_layers=12), "deep")
    pinned = search(model, MACHINE, batch=16, sequence=128, pin=["pipeline.chunks=3"])
    schedules = {getattr(plan.technique("pipeline"), "schedule", "") for plan, _ in pinned.ranked}
    assert schedules == {"interleaved", "looped_bfs"}
    with pytest.raises(MeshwrightError, match="use interleaved or looped_bfs"):
        _search(pin=["pipeline.chunks=9"])


def test_a_pinned_technique_is_there_and_a_banned_one_is_not() -> None:
    found = _search(pin=["recompute", "microbatch=2"], ban=["pipeline", "shard.stage=3", "tensor=4"])
    assert found.ranked
    for plan, _ in found.ranked:
        names = {technique.name for technique in plan.techniques}
        assert "recompute" in names
        assert "pipeline" not in names
        assert plan.microbatch == 2
        assert getattr(plan.technique("shard"), "stage", 0) != 3
        assert getattr(plan.technique("tensor"), "size", 0) != 4


def test_an_axis_pinned_to_one_is_absent() -> None:
    assert all(plan.technique("shard") is None for plan, _ in _search(pin=["shard=1"]).ranked)


def test_only_what_is_allowed_is_used() -> None:
    assert any(t.exactness == "rounded" for plan, _ in _search().ranked for t in plan.techniques)
    reordered = _search(allow="reordered")
    assert not any(t.rounds for plan, _ in reordered.ranked for t in plan.techniques)
    assert any(t.exactness == "reordered" for plan, _ in reordered.ranked for t in plan.techniques)
    exact = _search(allow="exact")
    assert exact.ranked
    assert all(t.exactness == "exact" for plan, _ in exact.ranked for t in plan.techniques)


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(MeshwrightError) as caught:
        read_wishes(["tensr=2", "tensor.sise=2", "tensor=two", "microbatch=0", "shard"], ["shard"], allow="exactly")
    text = str(caught.value)
    for part in (
        'Did you mean "tensor"',
        'Did you mean "size"',
        "a whole number",
        "microbatch",
        "banned too",
        "exactly",
    ):
        assert part in text
    assert len(caught.value.problems) == 6


def test_a_pin_that_is_not_exact_enough_is_refused() -> None:
    with pytest.raises(MeshwrightError, match="it is rounded"):
        read_wishes(["precision"], allow="reordered")


def test_two_pins_of_one_setting_are_refused() -> None:
    with pytest.raises(MeshwrightError, match="also pinned"):
        read_wishes(["tensor=2", "tensor.size=4"])


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (["tensor=0"], "size is 0"),
        (["tensor=-2"], "size is -2"),
        (["replicate=3"], "4 devices cannot be shared out to an axis of 3. Use 1, 2, 4."),
        (["recompute=999"], "the model has 4 blocks"),
        (["chunked_loss=-2"], "chunks is -2"),
        (["chunked_loss=0"], "chunks is 0"),
        (["shard.stage=true"], "True is not one of its values"),
        (["pipeline.stages=[1, 2]"], "add up to 4 blocks"),
        (["microbatch=²"], "a whole number"),
        (["microbatch=-1"], "at least 1"),
        (["microbatch=99999999999999999999"], "at most"),
        (["microbatch=2", "microbatch=4"], "also pinned to 2"),
        (["microbatch.size=2"], "only be pinned to a number"),
    ],
)
def test_a_pin_no_plan_can_keep_is_refused_before_the_search(pins: list[str], words: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        _search(pin=pins)
    assert words in str(caught.value)
    assert all(problem.where.startswith("pin ") for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("pins", "bans", "words"),
    [
        (["tensor=2", "pipeline=2", "replicate=2"], [], "4 devices cannot be shared out to tensor 2 x pipeline 2"),
        (["compile", "pipeline.schedule=zero_bubble_h1"], [], "a compiled backward is one piece"),
        (["recompute.slots=2", "shard=4", "shard.stage=3"], [], "whose weights shard has let go of"),
        (["recompute.layers=0-2", "recompute.selective=1-3"], [], "names blocks that another setting names too"),
        (["tensor"], ["tensor.sequence=true", "tensor.sequence=false"], "every sequence is banned"),
        (["tensor=2"], ["tensor"], "it is banned too"),
    ],
)
def test_pins_that_contradict_say_which_rule_they_break(pins: list[str], bans: list[str], words: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        _search(pin=pins, ban=bans)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "pins", [["compile", "pipeline"], ["recompute.slots=2", "shard=4"], ["tensor=2", "replicate=2"]]
)
def test_pins_that_leave_a_way_are_kept(pins: list[str]) -> None:
    """Though not with every setting: the schedule, the stage of shards."""
    found = _search(pin=pins)
    assert found.best is not None
    assert {pin.partition("=")[0].partition(".")[0] for pin in pins} <= {t.name for t in found.best[0].techniques}


def test_a_pin_the_machine_or_the_sequence_rules_out_is_refused() -> None:
    with pytest.raises(MeshwrightError, match=r"pin precision: .*do not compute in bf16"):
        search(PROFILE, cluster("4xv100"), batch=16, sequence=128, pin=["precision.dtype=bf16"])
    with pytest.raises(MeshwrightError, match="pin tensor: a sequence of 127"):
        search(PROFILE, MACHINE, batch=16, sequence=127, pin=["tensor.sequence=true"])
    with pytest.raises(MeshwrightError, match="pin tensor: no size is possible"):
        search(PROFILE, cluster("h100"), batch=16, sequence=128, pin=["tensor"])
    with pytest.raises(MeshwrightError, match=r"pin gossip: .*Pin it, as in gossip=2"):
        search(PROFILE, MACHINE, batch=16, sequence=128, pin=["gossip"], allow="approximate")


def test_a_microbatch_cannot_be_banned_nor_a_pinned_value() -> None:
    with pytest.raises(MeshwrightError) as caught:
        read_wishes(ban=["microbatch"])
    assert "Did you mean" not in str(caught.value)
    with pytest.raises(MeshwrightError, match="banned too"):
        read_wishes(["tensor=2"], ["tensor=2"])


@pytest.mark.parametrize("name", ["batch", "sequence"])
def test_more_samples_or_tokens_than_can_be_counted_are_refused(name: str) -> None:
    with pytest.raises(MeshwrightError, match=f"{name}: is 1000.*Use at most"):
        search(PROFILE, MACHINE, **({"batch": 16, "sequence": 128} | {name: 10**20}))


@pytest.mark.parametrize("numbers", [{"batch": 0, "sequence": 1}, {"batch": 1, "sequence": 0}])
def test_no_samples_or_tokens_is_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(MeshwrightError, match="at least 1"):
        search(PROFILE, MACHINE, **numbers)
