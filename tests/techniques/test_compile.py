"""What `compile` costs as blocks, as one graph and as CUDA graphs; where it is refused, and when search takes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tiny import t

import meshwright as mw
from meshwright.core.plan import Plan
from meshwright.core.work import Work
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import preset
from meshwright.planner.search import search
from meshwright.run.model import describe
from meshwright.run.run_file import ModelSection
from meshwright.simulator.forecast import forecast
from meshwright.simulator.pricing import price, price_sizes, sizes_of, stacked
from meshwright.techniques.compile import copy_gradients, keeps_products

GPT2 = decoder_profile(preset("gpt2-124m"), "gpt2-124m")
TINY, EXPERTS = tiny.profile_of(tiny.GPT), tiny.profile_of(tiny.MOE)
VIT, RESNET, DLRM = (
    describe(ModelSection(name=each), 1).profile for each in ("vit-digits", "resnet-tiny", "dlrm-tiny")
)
GPU, LAPTOP = cluster("1xh200"), cluster("laptop")
BLOCKS, ONE, REPLAYED = t("compile"), t("compile", scope="model"), t("compile", graphs=True)
BOTH = t("compile", scope="model", graphs=True)
LEAN = t("compile", keep="products")
EVERY = (BLOCKS, ONE, REPLAYED, BOTH)
NUMBERS = ("repeat", "flops", "moved_bytes", "kernels")


def plan_of(*techniques: Any, batch: int = 8, microbatch: int = 8) -> Plan:
    return Plan(techniques=techniques, batch=batch, microbatch=microbatch)


def work_of(*techniques: Any, **sizes: int) -> Work:
    return price(GPT2, plan_of(tiny.BF16, *techniques, **sizes), sequence=1024)


def moved(work: Work, phase: str) -> float:
    return float(sum(task.repeat * task.moved_bytes for task in work.computes if task.phase == phase))


def launched(work: Work, *phases: str) -> float:
    tasks = [task for task in work.computes if task.phase in phases and not task.is_replayed]
    return float(sum(task.repeat * task.kernels for task in tasks))


def test_blocks_that_keep_products_make_inputs_of_matmuls_and_copies_of_weights_again() -> None:
    def kept(work: Work, category: str) -> float:
        return float(sum(item.repeat * item.bytes for item in work.residents if item.category == category))

    tokens, d, blocks = 8 * 1024, 768, 12
    fastest, lean = work_of(BLOCKS), work_of(LEAN)
    # Two normalised streams and the activation's result; the compiled form keeps no copy of heads in another layout.
    again = blocks * tokens * (d + d + 4 * d) * 2
    assert kept(fastest, "activations") - kept(lean, "activations") == pytest.approx(again)
    weights = sum(slot.repeat * slot.elements for slot in lean.slots if slot.layer == "blocks")
    assert kept(fastest, "gathered") - kept(lean, "gathered") == pytest.approx(2.0 * float(weights))
    moved_again = blocks * tokens * (2 * d + 2 * d + 4 * d) * 2 + 6.0 * float(weights)
    assert moved(lean, "backward") - moved(fastest, "backward") == pytest.approx(moved_again)
    assert moved(lean, "forward") == moved(fastest, "forward")
    refused = t("compile", backend="aot_eager", keep="products").check(plan_of(tiny.BF16), GPT2, None)
    assert "decides by itself" in refused[0].what


@pytest.mark.slow
def test_blocks_that_keep_products_have_the_same_gradients_and_keep_less() -> None:
    """By inductor on the CPU: what autograd holds between forward and backward, and what comes out."""
    held, gradients = [], []
    for keep in ("fastest", "products"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.LayerNorm(64)]
        block = torch.nn.Sequential(*layers, torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        run = torch.compile(block)
        run = keeps_products(run) if keep == "products" else run
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = run(torch.randn(512, 64))
        result.square().mean().backward()
        held.append(sum(sizes.values()))
        gradients.append([parameter.grad.clone() for parameter in block.parameters()])
    assert held[1] <= held[0]
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)
    import torch._functorch.config as config

    assert config.ban_recompute_used_far_apart, "settings are those of one function"


def test_one_graph_reads_the_stream_once_less_at_every_border() -> None:
    stream, borders = 8 * 1024 * 768 * 2, 12 + 1  # with the final norm
    blocks, one = work_of(BLOCKS), work_of(ONE)
    assert moved(blocks, "forward") - moved(one, "forward") == pytest.approx(borders * stream)
    assert moved(blocks, "backward") == moved(one, "backward")
    assert launched(blocks, "forward") - launched(one, "forward") == pytest.approx(borders)


def test_cuda_graphs_launch_once_each_and_the_device_does_the_same() -> None:
    works = work_of(REPLAYED), work_of(BLOCKS)
    kernels = [sum(task.repeat * task.kernels for task in work.computes) for work in works]
    assert kernels[0] - kernels[1] == pytest.approx(2 * 12), "nothing is lost but launches"
    names = {task.name for task in work_of(BOTH).computes if task.layer == "head" and task.is_replayed}
    assert names == {"norm"}
    # One graph each way, and what is outside of them.
    head = [task for task in work_of(ONE).computes if task.layer == "head" and task.name != "norm"]
    left = sum(task.kernels for task in head if task.phase in ("forward", "backward"))
    assert launched(work_of(BOTH), "forward", "backward") == pytest.approx(left + 2)
    parameters = sum(slot.repeat for slot in work_of().slots if not slot.copy_of)
    copied = [launched(work_of(each, microbatch=4), "step") for each in (BOTH, BLOCKS)]
    assert copied[0] - copied[1] == pytest.approx(parameters)
    assert launched(work_of(BOTH), "step") == launched(work_of(BLOCKS), "step")


def test_the_memory_of_a_graph_stays_through_the_step() -> None:
    def held(work: Work, life: str) -> float:
        return sum(float(i.repeat * i.bytes) for i in work.residents if i.life == life and i.layer == "blocks")

    blocks, replayed = work_of(BLOCKS, microbatch=4), work_of(REPLAYED, microbatch=4)
    assert held(replayed, "microbatch") == 0
    assert held(replayed, "always") == held(blocks, "always") + held(blocks, "microbatch")
    gradients = 4 * sum(slot.repeat * slot.elements for slot in blocks.slots if slot.layer == "blocks")
    assert held(replayed, "step") == held(blocks, "step") + gradients
    assert held(work_of(REPLAYED), "step") == held(work_of(BLOCKS), "step"), "one microbatch's are not copied"
    peaks = [forecast(GPT2, plan_of(tiny.BF16, each, batch=1, microbatch=1), GPU, sequence=1024) for each in EVERY]
    assert peaks[0].peak_allocated_bytes == peaks[1].peak_allocated_bytes < peaks[2].peak_allocated_bytes


@pytest.mark.parametrize("technique", EVERY, ids=str)
def test_arrays_are_plans_one_by_one(technique: Any) -> None:
    plans = [plan_of(tiny.BF16, tiny.RECOMPUTE, technique, microbatch=size) for size in (1, 4, 8)]
    sizes = [sizes_of(plan, GPT2, sequence=1024, stage=0) for plan in plans]
    together = price_sizes(GPT2, plans[0].in_phase_order(), stacked(sizes))
    for at, plan in enumerate(plans):
        alone = price(GPT2, plan, sequence=1024)
        for one, many in zip(alone.computes, together.computes, strict=True):
            pairs = ((getattr(one, name), getattr(many, name)) for name in NUMBERS)
            assert all(np.broadcast_to(b, 3)[at] == pytest.approx(a, rel=1e-12) for a, b in pairs)
        for one, many in zip(alone.residents, together.residents, strict=True):
            assert np.broadcast_to(many.bytes * many.repeat, 3)[at] == pytest.approx(one.bytes * one.repeat)


def test_sums_over_replicas_hide_behind_blocks_but_not_behind_one_graph() -> None:
    hidden = [
        {task.hidden for task in price(TINY, plan_of(tiny.REPLICATE, each, microbatch=2), sequence=16).collectives}
        for each in (BLOCKS, ONE)
    ]
    assert hidden == [{True}, {False}]


REFUSED: tuple[tuple[Any, tuple[Any, ...], Any, Any, str], ...] = (
    (ONE, (tiny.SHARD3,), TINY, None, "scope is model, and with shard"),
    (ONE, (tiny.TENSOR,), TINY, None, "scope is model, and with tensor"),
    (ONE, (tiny.RING,), TINY, None, "scope is model, and with context"),
    (ONE, (tiny.PIPELINE,), TINY, None, "scope is model, and with pipeline"),
    (ONE, (), DLRM, None, "neither our decoder nor an image model"),
    (ONE, (tiny.REPLICATE,), RESNET, None, "exchange the statistics of batch norms"),
    (ONE, (), EXPERTS, None, "has experts"),
    (REPLAYED, (), EXPERTS, None, "has experts"),
    (REPLAYED, (tiny.REPLICATE,), TINY, None, "graphs is on, and with replicate"),
    (REPLAYED, (tiny.SHARD1,), TINY, None, "graphs is on, and with shard"),
    (REPLAYED, (), TINY, LAPTOP, "have no CUDA graphs"),
    (t("compile", graphs=True, backend="aot_eager"), (), TINY, None, "makes no kernels"),
    (ONE, (tiny.IN_BACKWARD,), TINY, None, "exist at once"),
    (REPLAYED, (tiny.IN_BACKWARD,), TINY, None, "exist at once"),
    (ONE, (t("recompute", slots=1),), TINY, None, "slots decides while backward runs"),
)


@pytest.mark.parametrize(("technique", "others", "profile", "machine", "reason"), REFUSED)
def test_what_cannot_be_is_refused_with_a_fix(
    technique: Any, others: tuple[Any, ...], profile: Any, machine: Any, reason: str
) -> None:
    found = [each for each in plan_of(technique, *others).check(profile, machine) if reason in each.what]
    assert len(found) == 1
    assert found[0].fix


@pytest.mark.parametrize("technique", [ONE, BOTH], ids=str)
@pytest.mark.parametrize("others", [(), (tiny.BF16, tiny.CHUNKED, tiny.LOW_BIT), (tiny.RECOMPUTE_SOME,)])
def test_what_goes_together_is_accepted(technique: Any, others: tuple[Any, ...]) -> None:
    assert plan_of(technique, *others, microbatch=4).check(TINY, GPU) == ()
    assert plan_of(ONE, tiny.REPLICATE, *others, microbatch=4).check(TINY, cluster("2xh100")) == ()


def test_gradients_leave_the_memory_of_graphs_once() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.grad = written = torch.ones(2, 2)
    copy_gradients(model)  # type: ignore[arg-type]
    copied = model.weight.grad.data_ptr()
    model(torch.ones(1, 2)).sum().backward()
    copy_gradients(model)  # type: ignore[arg-type]
    assert model.weight.grad.data_ptr() == copied != written.data_ptr()
    assert torch.equal(written, torch.ones(2, 2))
    assert torch.equal(model.weight.grad, 2 * written)


def test_search_takes_graphs_where_the_host_is_slow_and_offers_them_to_small_models_on_one_gpu() -> None:
    (best,) = search(GPT2, GPU, batch=1, sequence=1024, top=1).ranked
    assert BOTH in best.plan.techniques
    (best,) = search(GPT2, GPU, batch=32, sequence=1024, top=1).ranked
    assert ONE in best.plan.techniques
    large = decoder_profile(preset("llama3.2-1b"), "llama3.2-1b")
    for profile, machine in ((large, GPU), (GPT2, cluster("2xh100")), (DLRM, GPU), (EXPERTS, GPU)):
        assert [option.field for option in type(BLOCKS).options(profile, machine)] == ["backend", "keep"]
    assert type(BLOCKS).options(GPT2, LAPTOP) == ()


def test_settings_that_are_left_alone_are_not_written() -> None:
    assert BLOCKS.encode_self() == {"name": "compile", "backend": "inductor"}
    assert BOTH.encode_self() == {"name": "compile", "backend": "inductor", "scope": "model", "graphs": True}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("microbatch", [4, 2], ids=["1 microbatch", "2 microbatches"])
@pytest.mark.parametrize("others", [(), (tiny.RECOMPUTE_ONE,)], ids=["alone", "recompute"])
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
def test_cuda_graphs_train_as_kernels_do(microbatch: int, others: tuple[Any, ...], documents: bool) -> None:
    def losses(**settings: Any) -> list[float]:
        torch._dynamo.reset()
        generator = torch.Generator(device="cuda").manual_seed(0)
        techniques = (tiny.BF16, t("compile", **settings), *others)
        built = mw.build(plan_of(*techniques, batch=4, microbatch=microbatch), "byte-3m", device="cuda")
        found = []
        for step in range(5):
            tokens = torch.randint(256, (4, 256), device="cuda", generator=generator)
            places = torch.arange(256, device="cuda").expand(4, 256) // (60 + 10 * step)  # other tiles in each step
            inputs = (tokens, places) if documents else tokens
            found.append(built.step(inputs, tokens.roll(-1, dims=1)).loss)
        return found

    plain = losses()
    assert len(set(plain)) == 5
    for settings in ({"graphs": True}, {"scope": "model"}, {"scope": "model", "graphs": True}):
        assert losses(**settings) == pytest.approx(plain, rel=2**-8)
