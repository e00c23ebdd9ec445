"""What ranks run for `test_toys_exchange`."""

from __future__ import annotations

import torch

import meshwright as mw
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.ops.device_mesh import join


def local_steps_job(
    *, batch: int, steps: int, every: int, rank: int, num_ranks: int, rendezvous: str
) -> list[list[float]]:
    """In every rank: the parameters after each step."""
    join(rank, num_ranks, torch.device("cpu"), rendezvous=rendezvous)
    plan = Plan(
        techniques=(technique_named("toy_average")(size=num_ranks, every=every),),
        batch=batch,
        microbatch=batch // num_ranks,
    )
    module, (inputs, targets) = model(), samples(batch)
    rates = mw.OptimizerConfig(name="sgd", lr=0.1, momentum=0.0, weight_decay=0.0, clip=0.0)
    built = mw.build(plan, module, inputs=inputs[:2], optimizer=rates, device="cpu")
    seen = []
    for _ in range(steps):
        built.step(inputs[built.rows(batch)], targets[built.rows(batch)])
        seen.append(torch.cat([value.detach().flatten() for value in built.model.parameters()]).tolist())
    torch.distributed.destroy_process_group()
    return seen


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))


def samples(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 6, generator=generator), torch.randint(4, (batch,), generator=generator)
