"""Where the peak of a step is, and what is there: by hand, tensor by tensor, and as torch really allocates.

Tests of `simulator/peak_memory.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.core.work import ADAM, Resident
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import PRESETS, preset
from meshwright.schedules import Timetable
from meshwright.simulator.allocator import replay
from meshwright.simulator.forecast import forecast
from meshwright.simulator.peak_memory import NCCL_BYTES, LayerInstances, StageMemory
from meshwright.simulator.pricing import stage_plan

NODE = cluster("8xh100")


def _t(name: str, **settings: Any) -> Any:
    return technique_named(name)(**settings)


def _item(life: Any, size: float, repeat: int = 1, category: Any = "activations", **more: Any) -> Resident:
    return Resident(layer="x", category=category, repeat=repeat, bytes=size, life=life, **more)


def _memory(in_flight: int = 1, num_microbatches: int = 1) -> StageMemory:
    """Three blocks that keep 10 each, need 4 while they run and 7 more going back, and have gradients of 5; then a loss
    that keeps 20 and needs 30 going forward, with a gradient of 2. Always: 100."""
    blocks = LayerInstances(
        "blocks",
        3,
        (_item("microbatch", 10, 3),),
        (_item("moment", 4, 3, "working"), _item("backward", 7, 3, "working")),
        (_item("step", 5, 3, "gradients"),),
    )
    head = LayerInstances(
        "head",
        1,
        (_item("microbatch", 20, category="logits"),),
        (_item("forward", 30, category="logits"),),
        (_item("step", 2, category="gradients"),),
    )
    always = {"non_torch": 40, "parameters": 60}
    setup = (_item("always", 60, category="parameters"),)
    return StageMemory(
        always=always, places=(blocks, head), in_flight=in_flight, num_microbatches=num_microbatches, setup=setup
    )


def test_one_microbatch_is_fullest_at_the_loss() -> None:
    memory = _memory()
    assert memory.peak_bytes() == 100 + 30 + 20 + 30  # no gradient yet
    assert memory.by_category() == {"activations": 30, "logits": 50, "non_torch": 40, "parameters": 60}
    assert memory.allocated_bytes() == memory.peak_bytes() - 40


def test_backward_frees_from_the_end_while_gradients_grow() -> None:
    memory = _memory()
    cheap = replace(memory, places=(memory.places[0], memory.places[1]._replace(running=(), kept=())))
    # At the last block: three kept, 4 + 7 at work, gradients of the head and of one block.
    assert cheap.peak_bytes() == 100 + 30 + 11 + 2 + 5
    large = LayerInstances("blocks", 3, *memory.places[0][2:4], (_item("step", 50, 3, "gradients"),))
    # With large gradients the first block is fullest: one kept, and all gradients.
    assert replace(cheap, places=(large, cheap.places[1])).peak_bytes() == 100 + 10 + 11 + 2 + 150


def test_later_microbatches_find_all_gradients() -> None:
    assert _memory(1, 2).peak_bytes() == 100 + 30 + 20 + 30 + 17
    # Two in flight of three: a whole one beside the one at its loss.
    assert _memory(2, 3).peak_bytes() == 100 + 50 + 80 + 17
    # Two of two: all forwards are over when gradients exist, and then one is held less.
    assert _memory(2, 2).peak_bytes() == 100 + 50 + 80
    many = replace(_memory(), in_flight=np.array([1, 2, 2]), num_microbatches=np.array([2, 3, 2]))
    assert many.peak_bytes().tolist() == [197, 247, 230]


def test_what_is_recomputed_comes_first_and_is_revived_alone() -> None:
    early = LayerInstances("b", 2, (_item("microbatch", 1, 2, turn=-1),), (_item("backward", 25, 2, turn=-1),), ())
    late = LayerInstances("b", 3, (_item("microbatch", 10, 3),), (_item("moment", 4, 3),), ())
    memory = replace(_memory(), places=(early, late))
    assert memory.peak_bytes() == 100 + 2 + 30 + 4  # at the last kept one; reviving needs only 2 + 25
    short = replace(memory, places=(early, late._replace(count=0, kept=(_item("microbatch", 10, 0),))))
    assert short.peak_bytes() == 100 + 2 + 25


MODEL = replace(PRESETS["byte-tiny"], num_layers=4, hidden_size=1024, ffn_size=4096, num_heads=8, num_kv_heads=8)
PROFILE = decoder_profile(replace(MODEL, vocab_size=32000), "m")
PLANS = [
    Plan(techniques=(_t("precision"),), batch=4, microbatch=4),
    Plan(techniques=(_t("precision"), _t("recompute", layers="first 2")), batch=8, microbatch=4),
    Plan(techniques=(_t("precision"), _t("shard", size=4), _t("recompute", layers="first 3")), batch=16, microbatch=2),
    Plan(techniques=(_t("precision"), _t("shard", size=4, stage=1), _t("replicate", size=2)), batch=16),
    Plan(techniques=(_t("replicate", size=2), _t("pipeline", size=4)), batch=16, microbatch=1),
    Plan(techniques=(_t("precision"), _t("pipeline", size=2, schedule="gpipe"), _t("tensor", size=2)), batch=4),
    Plan(techniques=(_t("precision"), _t("chunked_loss"), _t("tensor", size=2, sequence=True)), batch=2),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_tensor_by_tensor_the_peak_is_the_same(plan: Plan) -> None:
    staged = stage_plan(PROFILE, plan, NODE, sequence=512, optimizer=ADAM)
    for stage in staged.stages:
        memory = stage.memory
        where = staged.timetable, stage.run.start, len(staged.unfolded)
        told = replay(memory, *where, memory_bytes=NODE.device.memory_bytes)
        # Tensors are rounded up, and the largest to what their segment has left.
        assert memory.allocated_bytes() <= told.allocated_bytes + 512
        assert told.allocated_bytes == pytest.approx(float(memory.allocated_bytes()), rel=0.03)
        assert told.allocated_bytes <= told.reserved_bytes
        assert told.fits


def test_a_stage_that_must_not_fit_does_not() -> None:
    memory = stage_plan(PROFILE, PLANS[0], NODE, sequence=512, optimizer=ADAM).stages[0].memory
    room = int(memory.peak_bytes())
    assert not replay(memory, Timetable(), 0, 1, memory_bytes=room - (1 << 20)).fits
    told = replay(memory, Timetable(), 0, 1, memory_bytes=room * 2)
    # The allocator would like to reserve more than it gets, and gives back what it caches.
    tight = replay(memory, Timetable(), 0, 1, memory_bytes=int(memory.always["non_torch"]) + told.reserved_bytes)
    assert tight == told


def test_logits_and_communicators_are_counted_by_themselves() -> None:
    tokens, vocab = 4 * 512, 32000
    alone = forecast(PROFILE, PLANS[0], cluster("1xh100"), sequence=512)
    assert alone.peak_bytes_by_category["logits"] == pytest.approx(tokens * vocab * 2, rel=1e-3)
    assert alone.peak_bytes_by_category["non_torch"] == NODE.device.reserved_bytes
    assert alone.peak_reserved_bytes >= alone.peak_allocated_bytes
    plain = forecast(PROFILE, Plan(batch=4, microbatch=4), cluster("1xh100"), sequence=512)
    assert plain.peak_bytes_by_category["logits"] == pytest.approx(tokens * vocab * 4, rel=1e-3)
    split = forecast(PROFILE, replace(PLANS[6], batch=4, microbatch=4), NODE, sequence=512)
    assert split.peak_bytes_by_category["non_torch"] == NODE.device.reserved_bytes + NCCL_BYTES
    # Split between 8 ranks they are too small to be at the peak.
    assert split.peak_bytes_by_category.get("logits", 0) <= tokens * vocab * 2 / 2 / 8
    laptop = forecast(PROFILE, Plan(batch=4, microbatch=4), cluster("1xlaptop"), sequence=512)
    assert laptop.peak_reserved_bytes == laptop.peak_allocated_bytes


def test_known_peaks_of_one_gpu() -> None:
    """Measured on an H200 (torch 2.11): benchmarks/results/gpu_rows_h200.json."""
    llama = replace(preset("llama3.2-1b"), tied=False, rope_scaling="none", max_sequence=4096)
    gpt = replace(preset("gpt2-124m"), vocab_size=50304, qkv_bias=False, bias=False)
    techniques = (_t("precision"), _t("compile"))
    for config, batch, sequence, gib in ((llama, 4, 4096, 43.789), (gpt, 32, 1024, 14.156)):
        plan = Plan(techniques=techniques, batch=batch, microbatch=batch)
        told = forecast(decoder_profile(config, "measured"), plan, cluster("1xh200"), sequence=sequence)
        assert told.peak_allocated_bytes / 2**30 == pytest.approx(gib, rel=0.02)
