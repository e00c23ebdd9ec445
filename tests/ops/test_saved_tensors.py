"""What blocks save for backward, in host memory or in a few bits: the device memory is let go of, buffers are used
again, storages are copied once, codes have the right mean and the priced size.

Tests of `ops/saved_tensors.py`, `techniques/compress_activations.py`, `techniques/offload_activations.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.core.plan import Plan
from meshwright.core.technique import Technique
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import DecoderConfig, profile
from meshwright.ops.saved_tensors import (
    CODED_AT_ONCE,
    GROUP,
    FewBitsBlock,
    FewBitsTensor,
    HostPool,
    HostTensor,
    SavingBlock,
    moved_bytes,
    save_on_host,
)
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.planner.search import search
from meshwright.run.model import open_config
from meshwright.simulator.forecast import forecast
from meshwright.simulator.pricing import price
from meshwright.techniques.compress_activations import CODED_AT_ONCE as PRICED_AT_ONCE
from meshwright.techniques.compress_activations import GROUP as PRICED_GROUP
from meshwright.verify import parity

CPU = torch.device("cpu")
LLAMA = DecoderConfig(**tiny.LLAMA)


def session_of(*techniques: Technique, batch: int = 2, microbatch: int = 2, dtype: str = "float32") -> parity.Session:
    plan = Plan(techniques=techniques, batch=batch, microbatch=microbatch)
    return parity.open_session(plan, open_config(LLAMA, "tiny", 0), OptimizerConfig(), dtype=dtype, device=CPU)


def step(session: parity.Session, number: int = 0) -> Any:
    samples = parity.random_samples(LLAMA.vocab_size, session.build.plan.batch, tiny.SEQUENCE)
    return session.loop.step(parity.own_samples(session, samples, number), 1e-2)


class Square(nn.Module):
    """Saves one storage three times over, and a view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = torch.sin(x)
        first, second = y.chunk(2)
        return torch.cat([first * second, first.exp() * first]) @ self.weight.t() * mask


def gradients(blocks: list[nn.Module], x: Tensor, mask: Tensor) -> list[Tensor]:
    for block in blocks:
        x = block(x, mask)
    return list(torch.autograd.grad(x.sum(), [p for block in blocks for p in block.parameters()]))


def squares(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Square() for _ in range(count)]


def test_a_storage_is_copied_once_whatever_is_saved_of_it() -> None:
    x, mask = torch.randn(4, 8), torch.rand(4, 8)
    wanted = gradients(squares(3), x, mask)
    blocks = squares(3)
    pool = HostPool(CPU)
    save_on_host(blocks, [True, True, False], pool, smallest=1)
    moved_bytes.clear()
    assert all(map(torch.equal, gradients(blocks, x, mask), wanted))
    # Of the first, whose input needs no gradient, sin saves nothing; of both: y, the exponential, what is joined and
    # what is multiplied by the mask.
    once = x.nbytes
    assert moved_bytes["out"] == moved_bytes["in"]
    assert once * 3 < moved_bytes["out"] <= once * 7


def test_memory_is_let_go_of_when_the_next_block_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StorageWeakRef] = []
    start = HostTensor.__init__

    def noted(self: HostTensor, pool: HostPool, flat: Tensor) -> None:
        made.append(StorageWeakRef(flat.untyped_storage()))
        start(self, pool, flat)

    monkeypatch.setattr(HostTensor, "__init__", noted)
    session = session_of(tiny.OFFLOAD_ONE, tiny.t("recompute", layers="first 1"))
    blocks = session.build.model.block_modules()
    inner, left = blocks[-1].forward, list[int]()

    def watched(*given: Any) -> Any:
        out = inner(*given)
        left.append(sum(not each.expired() for each in made))
        return out

    blocks[-1].forward = watched
    step(session)
    assert len(made) > 8
    assert left == [1]  # the block's input, which the caller has


def test_buffers_are_used_again_from_step_to_step() -> None:
    session = session_of(tiny.OFFLOAD, batch=6)
    pools = {id(each.pool): each.pool for each in map(saving_of, session.build.model.block_modules())}
    (pool,) = pools.values()
    counts = []
    for number in range(3):
        step(session, number)
        counts.append(pool.num_allocated)
    assert counts[0] == counts[2] > 0
    assert len(pool.free) == pool.num_allocated  # nothing is out between steps


def saving_of(block: nn.Module) -> Any:
    """The innermost that is wrapped around the block."""
    found: Any = block.forward
    while not isinstance(getattr(found, "__self__", None), SavingBlock):
        found = next(c.cell_contents for c in found.__closure__ if callable(c.cell_contents))
    return found.__self__


def test_buffers_of_changing_sizes_stay_as_many_as_were_out_together() -> None:
    pool = HostPool(CPU)
    for number in range(50):
        tensors = [HostTensor(pool, torch.rand(size + number % 7)) for size in (100, 1000, 10)]
        del tensors
        assert len(pool.free) == 3
    assert max(buffer.numel() for buffer, _ in pool.free) == 4 * 1006


def test_a_forward_without_a_backward_gives_its_buffers_back() -> None:
    blocks, pool = squares(2), HostPool(CPU)
    save_on_host(blocks, [True, True], pool, smallest=1)
    x = torch.randn(4, 8)
    for block in blocks:
        x = block(x, torch.rand(4, 8))
    assert not pool.free
    del x
    assert len(pool.free) == pool.num_allocated > 0
    moved_bytes.clear()
    with torch.no_grad():
        blocks[0](torch.randn(4, 8), torch.rand(4, 8))
    assert moved_bytes["out"] == 0


def bytes_of(coded: FewBitsTensor) -> int:
    return sum(packed.untyped_storage().nbytes() + ends.nbytes for packed, ends in coded.parts)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_have_the_right_mean_and_the_priced_size(bits: int, dtype: torch.dtype) -> None:
    values = (torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 3 + 1).to(dtype)
    draws = 400
    coded = [FewBitsTensor(values, bits, torch.Generator().manual_seed(seed)) for seed in range(draws)]
    loaded = torch.stack([each.load().double() for each in coded])
    groups = values.double().split(GROUP)
    step_size = torch.cat([(g.max() - g.min()).expand(len(g)) / (2**bits - 1) for g in groups[:-1]])
    near = loaded[:, : len(step_size)] - values.double()[: len(step_size)]
    narrow = 2**-8 * values.double().abs().max() if dtype == torch.bfloat16 else 1e-5
    assert bool((near.abs() <= step_size * 1.001 + narrow).all())
    # Five deviations of the mean of so many draws, of which each is within half a step of it.
    assert bool((near.mean(0).abs() <= 5 * step_size / 2 / draws**0.5 + narrow).all())
    assert bytes_of(coded[0]) == 4 * (GROUP * bits // 8 + 8)
    assert loaded.shape[1] == 1000


def test_constants_are_exact_and_what_is_not_finite_stays_so() -> None:
    generator = torch.Generator()
    assert torch.equal(FewBitsTensor(torch.full((GROUP,), 2.5), 2, generator).load(), torch.full((GROUP,), 2.5))
    assert not bool(torch.isfinite(FewBitsTensor(torch.tensor([1.0, float("inf")]), 8, generator).load()).all())
    assert (PRICED_GROUP, PRICED_AT_ONCE) == (GROUP, CODED_AT_ONCE)


def test_large_tensors_are_coded_in_parts() -> None:
    values = torch.rand(CODED_AT_ONCE + GROUP + 3)
    coded = FewBitsTensor(values, 8, torch.Generator())
    assert len(coded.parts) == 2
    assert float((coded.load() - values).abs().max()) < 1 / 250


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_what_is_stored_in_a_few_bits_is_what_was_priced(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[int] = []
    start = FewBitsTensor.__init__

    def noted(self: FewBitsTensor, *given: Any) -> None:
        start(self, *given)
        stored.append(bytes_of(self))

    monkeypatch.setattr(FewBitsTensor, "__init__", noted)
    technique = tiny.t("compress_activations", bits=bits, layers="first 3")
    session = session_of(technique)
    plain = step(session_of())
    assert step(session).loss == plain.loss  # the forward is as it was
    work = price(session.build.profile, session.build.plan, sequence=tiny.SEQUENCE)
    kept = [item for item in work.residents if item.turn < 0 and item.life == "microbatch"]
    assert sum(stored) == sum(item.repeat * item.bytes for item in kept)


def test_copies_of_weights_are_not_coded() -> None:
    session = session_of(tiny.BF16, tiny.COMPRESS)
    step(session)
    saving = [saving_of(block) for block in session.build.model.block_modules()]
    assert all(isinstance(each, FewBitsBlock) for each in saving)
    matrices = [p for p in session.build.model.block_modules()[0].parameters() if p.dim() == 2]
    assert [sum(each.weights.values()) for each in saving] == [len(matrices)] * len(saving)


LONG: dict[str, Any] = {"batch": 1, "sequence": 131072}


def test_search_uses_the_host_only_where_nothing_else_fits() -> None:
    model, machine = profile("llama3.2-3b"), cluster("h100")
    found = search(model, machine, **LONG | {"sequence": 8192})
    assert found.best is not None
    assert found.best.plan.technique("offload_activations") is None
    found = search(model, machine, **LONG, ban=["recompute.slots=8", "offload_states"])
    assert found.best is not None
    assert found.best.plan.technique("offload_activations") is not None
    assert 0 < found.best.forecast.peak_bytes_by_tier["host"] <= machine.tiers["host"].bytes
    pinned = search(model, machine, batch=1, sequence=8192, pin=["offload_activations"]).best
    assert pinned is not None
    assert pinned.forecast.peak_bytes_by_tier["host"] > 0
    assert pinned.plan.check(model, machine) == ()


def test_memory_moves_from_the_device_to_the_host() -> None:
    model, machine = profile("llama3.2-1b"), cluster("h100")

    def told(*techniques: Technique) -> Any:
        plan = Plan(techniques=techniques, batch=4, microbatch=1)
        return forecast(model, plan, machine, sequence=16384)

    plain, moved = told(tiny.BF16), told(tiny.BF16, tiny.t("offload_activations", layers="first 14"))
    host = moved.peak_bytes_by_tier["host"]
    assert 0.7 * host < plain.peak_bytes - moved.peak_bytes <= host
    recomputed = told(tiny.BF16, tiny.RECOMPUTE)
    inputs = told(tiny.BF16, tiny.RECOMPUTE, tiny.t("offload_activations", layers="none", inputs=True))
    assert inputs.peak_bytes_by_tier["host"] == model.num_blocks * model.hidden_size * 16384 * 2
    assert inputs.peak_bytes < recomputed.peak_bytes
    coded = [told(tiny.BF16, tiny.t("compress_activations", bits=bits)).peak_bytes for bits in (2, 4, 8)]
    assert coded == sorted(coded)
    assert coded[-1] < plain.peak_bytes


def problems_of(*techniques: Technique, on: str | None = None) -> str:
    plan = Plan(techniques=techniques, batch=4, microbatch=1)
    return " ".join(map(str, plan.check(tiny.profile_of(tiny.LLAMA), None if on is None else cluster(on))))


def test_what_cannot_be_is_refused() -> None:
    assert problems_of(tiny.OFFLOAD) == ""
    assert "name the same blocks, 0-3" in problems_of(tiny.OFFLOAD, tiny.RECOMPUTE)
    assert "Let each block follow one" in problems_of(tiny.OFFLOAD, tiny.COMPRESS)
    assert "smallest is 0" in problems_of(tiny.t("offload_activations", smallest=0))
    assert "4 blocks, 0 to 3" in problems_of(tiny.t("offload_activations", layers="first 9"))
    assert "which inputs are kept" in problems_of(tiny.OFFLOAD_INPUTS, tiny.t("recompute", slots=1))
    for technique in (tiny.OFFLOAD, tiny.COMPRESS):
        assert "one graph" in problems_of(technique, tiny.t("compile", scope="model"))
        assert "later" in problems_of(technique, tiny.ZBV)


def test_a_host_that_nobody_knows_is_refused() -> None:
    from dataclasses import replace

    known = cluster("h100")
    plan = Plan(techniques=(tiny.OFFLOAD,), batch=4, microbatch=1)
    unknown = replace(known, host=replace(known.host, memory_bytes=0))
    assert plan.check(tiny.profile_of(tiny.LLAMA), known) == ()
    assert "mw probe" in " ".join(map(str, plan.check(tiny.profile_of(tiny.LLAMA), unknown)))
    small = replace(known, host=replace(known.host, memory_bytes=1000))
    assert not forecast(tiny.profile_of(tiny.LLAMA), plan, small, sequence=16).fits
