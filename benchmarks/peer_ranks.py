"""What the ranks of `benchmarks.peers` run: our side and PyTorch's, built in the same processes, in turn."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from benchmarks import plain
from benchmarks.claims import interleave
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.models.presets import DecoderConfig
from meshwright.run.model import open_config
from meshwright.run.run_file import OptimizerConfig
from meshwright.runtime.loop import Samples
from meshwright.verify import parity

CPU = torch.device("cpu")
RATES = OptimizerConfig(lr=3e-4, clip=1.0)
SEED, NUM_RANKS, WARM_UP = 0, 2, 2

Step = Callable[[int], Tensor]
"""Train step i; this rank's share of its mean loss."""


def _shape(num_layers: int, hidden_size: int, num_heads: int, ffn_size: int) -> DecoderConfig:
    sizes = {"num_heads": num_heads, "num_kv_heads": num_heads, "ffn_size": ffn_size, "vocab_size": 256}
    return DecoderConfig(num_layers=num_layers, hidden_size=hidden_size, max_sequence=256, **sizes)


@dataclass(frozen=True, kw_only=True)
class Case:
    config: DecoderConfig
    technique: dict[str, Any]
    sequence: int
    batch: int
    microbatch: int


# 19M parameters, two microbatches on each rank; 7M in two stages of two blocks.
WIDE, DEEP = _shape(6, 512, 8, 1376), _shape(4, 384, 6, 1024)
CASES = {
    "replicate": Case(config=WIDE, technique={"size": 2}, sequence=128, batch=8, microbatch=2),
    "shard": Case(config=WIDE, technique={"size": 2, "stage": 3}, sequence=128, batch=8, microbatch=2),
    "pipeline": Case(config=DEEP, technique={"size": 2, "schedule": "1f1b"}, sequence=128, batch=16, microbatch=2),
}


def samples_of(case: Case, parts: int) -> Callable[[int], Samples]:
    make = parity.random_samples(case.config, case.batch, case.sequence, masked=False)
    part = dist.get_rank() if parts > 1 else 0

    def samples(step: int) -> Samples:
        made = make(step, part, parts)
        return Samples(
            inputs=made.inputs, targets=made.targets, weights=made.weights.float(), num_tokens=made.num_tokens
        )

    return samples


# Our side -------------------------------------------------------------------------------------------------


def ours(name: str, case: Case) -> Step:
    technique = technique_named(name)(**case.technique)
    plan = Plan(techniques=(technique,), batch=case.batch, microbatch=case.microbatch)
    session = parity.open_session(plan, open_config(case.config, "bench", SEED), RATES, dtype="float32", device=CPU)
    samples = samples_of(case, session.mesh.part(plan.sample_axes)[1])

    def step(number: int) -> Tensor:
        # Our loop has already added up the ranks' shares.
        return torch.tensor(session.loop.step(samples(number), RATES.lr).loss / NUM_RANKS)

    return step


# PyTorch's ------------------------------------------------------------------------------------------------


def ddp(case: Case, **options: Any) -> Step:
    model = DistributedDataParallel(plain.decoder(case.config, SEED), **options)

    def backward(parts: plain.Parts, num_tokens: float) -> Tensor:
        with model.no_sync() if len(parts) > 1 else contextlib.nullcontext():
            total = plain.accumulate(model, parts[:-1], num_tokens)
        return total + plain.accumulate(model, parts[-1:], num_tokens)

    return averaging(case, model, backward)


def fsdp(case: Case) -> Step:
    model = plain.decoder(case.config, SEED)
    for block in model.blocks.values():
        fully_shard(block)
    fully_shard(model)
    return averaging(case, model, lambda parts, num_tokens: plain.accumulate(model, parts, num_tokens))


def averaging(case: Case, model: nn.Module, backward: Callable[[plain.Parts, float], Tensor]) -> Step:
    """A step of a wrapper that averages gradients over the ranks."""
    optimizer = plain.adamw(model.parameters(), RATES)
    samples = samples_of(case, NUM_RANKS)

    def step(number: int) -> Tensor:
        made = samples(number)
        optimizer.zero_grad(set_to_none=True)
        # The sum over ranks is wanted, not the mean: each rank divides by its share of the tokens.
        loss = backward(made.split(case.microbatch), made.num_tokens / NUM_RANKS)
        plain.update(optimizer, model, RATES, RATES.lr)
        return loss / NUM_RANKS

    return step


def pipelining(case: Case) -> Step:
    rank, half = dist.get_rank(), case.config.num_layers // NUM_RANKS
    model = plain.decoder(case.config, SEED)
    model.keep(((rank * half, (rank + 1) * half),))
    optimizer = plain.adamw(model.parameters(), RATES)
    num_tokens = float(case.batch * case.sequence)

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_tokens

    stage = PipelineStage(model, rank, NUM_RANKS, CPU)
    count = case.batch // case.microbatch
    schedule = Schedule1F1B(stage, count, loss_fn=loss_of, scale_grads=False)
    samples = samples_of(case, 1)

    def step(number: int) -> Tensor:
        made = samples(number)
        losses: list[Tensor] = []
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            schedule.step(made.inputs)
        else:
            schedule.step(target=made.targets, losses=losses)
        clip_over_stages(model)
        optimizer.step()
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros(())

    return step


def clip_over_stages(model: nn.Module) -> None:
    parameters = list(model.parameters())
    squared = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]) ** 2
    dist.all_reduce(squared)
    torch.nn.utils.clip_grads_with_norm_(parameters, RATES.clip, squared.sqrt())


THEIRS: dict[str, dict[str, Callable[[Case], Step]]] = {
    "replicate": {"ddp": ddp, "ddp views": lambda case: ddp(case, gradient_as_bucket_view=True)},
    "shard": {"fsdp2": fsdp},
    "pipeline": {"pipelining": pipelining},
}


# The race -------------------------------------------------------------------------------------------------


def block_of(step: Step, length: int, losses: list[float]) -> Callable[[], float]:
    """A block of steps, as long as on its slowest rank. The losses are added up over ranks when time has stopped."""

    def block() -> float:
        dist.barrier()
        start = time.perf_counter()
        shares = [step(len(losses) + i) for i in range(length)]
        elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        added = torch.stack(shares).double()
        dist.all_reduce(added)
        losses.extend(added.tolist())
        return elapsed.item()

    return block


def race(
    *, name: str, rounds: int, block: int, rank: int, num_ranks: int, rendezvous: str
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every block and losses of every step, by side."""
    assert num_ranks == NUM_RANKS
    parity.enter(rank, num_ranks, rendezvous)
    case = CASES[name]
    sides = {"ours": ours(name, case)} | {side: make(case) for side, make in THEIRS[name].items()}
    losses: dict[str, list[float]] = {side: [] for side in sides}
    blocks = {side: block_of(step, block, losses[side]) for side, step in sides.items()}
    interleave(blocks, WARM_UP)
    seconds = interleave(blocks, rounds)
    del sides, blocks
    parity.leave()
    return {"seconds": seconds, "losses": losses}
