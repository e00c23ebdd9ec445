"""Steps under a cap of memory: never more bytes than it, and the same bits. Tests of `ops/memory_cap.py`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.models.presets import DecoderConfig
from meshwright.ops.memory_cap import MemoryCap
from meshwright.zoo.decoder import Decoder

CPU = torch.device("cpu")
CONFIG = DecoderConfig(
    num_layers=6, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=64, vocab_size=64, max_sequence=64
)


class Observed(TorchDispatchMode):
    """Bytes of all tensors that operators were given or made and somebody still holds, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, made)):
            if isinstance(each, Tensor) and each.device.type == "cpu":
                storage = each.untyped_storage()
                self.sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.sizes = {key: found for key, found in self.sizes.items() if not found[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self.sizes.values()))
        return made


class Adding(nn.Module):
    """A residual block with dropout, whose replay must draw the same numbers."""

    def __init__(self, size: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(nn.functional.dropout(inner, 0.25))


class Dynamic(nn.Module):
    """One block as often as the input says, then others."""

    def __init__(self) -> None:
        super().__init__()
        self.repeated, self.others = Adding(16), nn.ModuleList([Adding(16), Adding(16)])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2 + int(x[0, 0].abs().item() * 100) % 7):
            x = self.repeated(x)
        for other in self.others:
            x = other(x)
        return x.square().sum()


class Normed(nn.Module):
    """Writes into its buffers and into what it is given: must not run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.linear(self.norm(x))) + x


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh_(x))


def decoder() -> tuple[nn.Module, list[nn.Module], Callable[[nn.Module], Tensor]]:
    model = Decoder(CONFIG)
    tokens = torch.randint(64, (4, 64), generator=torch.Generator().manual_seed(1))
    return model, model.block_modules(), lambda model: model(tokens, tokens, torch.ones(4, 64))


def dynamic(first: float = 0.5) -> tuple[nn.Module, list[nn.Module], Callable[[nn.Module], Tensor]]:
    model = Dynamic()
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
    x[0, 0] = first
    return model, [model.repeated, *model.others], lambda model: model(x)


def sequence_of(kind: type[nn.Module]) -> tuple[nn.Module, list[nn.Module], Callable[[nn.Module], Tensor]]:
    blocks = [kind() for _ in range(6)]
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(3))
    return nn.Sequential(*blocks), blocks, lambda model: model(x * 1.0).square().sum()


def without_blocks() -> tuple[nn.Module, list[nn.Module], Callable[[nn.Module], Tensor]]:
    model, _, run = dynamic()
    return model, [], run


MAKERS: dict[str, Callable[[], Any]] = {
    "decoder": decoder,
    "dynamic": dynamic,
    "deeper": lambda: dynamic(0.04),
    "without_blocks": without_blocks,
    "normed": lambda: sequence_of(Normed),
    "writing": lambda: sequence_of(Writing),
}


def two_steps(
    made: tuple[nn.Module, list[nn.Module], Callable[[nn.Module], Tensor]], cap: MemoryCap | None
) -> tuple[list[Tensor], int]:
    """Losses, gradients and buffers of two steps of two microbatches each; the most bytes observed."""
    model, blocks, run = made
    torch.manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0.0, 0.1)
    if cap is not None:
        cap.count(model.parameters())
        for number, block in enumerate(blocks):
            cap.watch(f"blocks.{number}", block)
    observed, losses = Observed(), []
    with observed, cap or nullcontext():
        for _ in range(2):
            model.zero_grad()
            kept = []
            for _ in range(2):
                with nullcontext() if cap is None else cap.outside(model):
                    kept.append(run(model))
            losses += [loss.detach() for loss in kept]
            while kept:
                kept.pop(0).backward()
    values = [*losses, *(value.grad for value in model.parameters()), *model.buffers()]
    return [value.clone() for value in values if value is not None], observed.peak_bytes


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()  # what dies by the collector alone would be freed too late
    yield
    gc.enable()
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("host", ["slow", "fast"])
@pytest.mark.parametrize("share", [1.5, 0.9, 0.7, 0.5])
def test_a_step_stays_within_the_cap_and_gives_the_same_bits(kind: str, host: str, share: float) -> None:
    wanted, peak = two_steps(MAKERS[kind](), None)
    cap = MemoryCap(CPU, int(share * peak))
    cap.copy_rate = {"slow": 1e3, "fast": 1e12}[host]
    values, capped = two_steps(MAKERS[kind](), cap)
    print(kind, share, host, peak, capped, cap.tally)
    assert capped <= cap.cap_bytes
    assert cap.peak_bytes <= cap.cap_bytes
    assert len(values) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(values, wanted, strict=True))
    assert bool(cap.tally["evictions"]) == (share < 1)
    runs_again = share < 1 and host == "slow" and kind not in ("without_blocks", "normed", "writing")
    assert bool(cap.tally["dropped_bytes"]) == runs_again


class Talking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x).tanh()
        dist.all_reduce(made.detach())
        return made.sigmoid()


def test_a_block_that_talks_to_other_ranks_is_not_run_again() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wanted, peak = two_steps(sequence_of(Talking), None)
        cap = MemoryCap(CPU, int(0.7 * peak))
        cap.copy_rate = 1e3
        values, _ = two_steps(sequence_of(Talking), cap)
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(a, b) for a, b in zip(values, wanted, strict=True))
    assert cap.tally["swapped_bytes"] > 0
    assert cap.tally["dropped_bytes"] == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, whose allocator has a limit")
def test_a_gpus_allocator_never_reserves_more_than_the_cap() -> None:
    device = torch.device("cuda", 0)

    def made() -> tuple[nn.Module, list[nn.Module], Callable[[nn.Module], Tensor]]:
        model = nn.Sequential(*(Adding(1024) for _ in range(12))).to(device)
        x = torch.randn(8192, 1024, device=device, generator=torch.Generator(device).manual_seed(2))
        return model, list(model), lambda model: model(x).square().sum()

    whole = torch.cuda.get_device_properties(device).total_memory
    wanted, _ = two_steps(made(), None)
    peak = torch.cuda.max_memory_allocated(device)
    for copy_rate in (1e3, 1e15):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        cap = MemoryCap(device, int(0.6 * peak))
        cap.copy_rate = copy_rate
        try:
            values, _ = two_steps(made(), cap)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        assert torch.cuda.max_memory_reserved(device) <= cap.cap_bytes < whole
        assert all(torch.equal(a, b) for a, b in zip(values, wanted, strict=True))
        assert cap.tally["evictions"]
