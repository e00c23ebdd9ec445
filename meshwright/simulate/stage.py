"""A plan's stages, priced: each run of equal stages once. What forecast and timeline both start from."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.cluster import Cluster
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Technique
from meshwright.core.work import Updating
from meshwright.simulate.cost import StageCost, stage_cost
from meshwright.simulate.links import routes
from meshwright.simulate.memory import StageMemory, schedule_of, stage_memory
from meshwright.simulate.price import price
from meshwright.simulate.stages import Run, runs_of


@dataclass(frozen=True, kw_only=True)
class Stage:
    run: Run
    cost: StageCost
    memory: StageMemory
    forward_seconds: float
    """Of one microbatch."""
    backward_seconds: float
    """Of one microbatch, recomputation included."""
    tail_seconds: float
    """After the last backward: what is left of the exchange, and the optimizer."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    stages: tuple[Stage, ...]
    """One for each run of equal stages."""
    schedule: str
    compute_dtype: str
    send_seconds: float

    @property
    def unfolded(self) -> tuple[Stage, ...]:
        """One for each stage."""
        return tuple(stage for stage in self.stages for _ in range(stage.run.count))


def cutter_of(plan: Plan) -> Technique | None:
    """The technique that cuts the model into stages, if any."""
    return next((t for t in plan.techniques if t.blocks_of_stages(1 << 20) is not None), None)


def stage_plan(profile: Profile, plan: Plan, cluster: Cluster, *, sequence: int, optimizer: Updating) -> Staged:
    stages = []
    roads = routes(cluster, plan.mesh)
    for run in runs_of(profile, plan.blocks_of_stages(profile)):
        work = price(profile, plan, sequence=sequence, stage=run.start, optimizer=optimizer)
        cost = stage_cost(work, cluster, roads)
        stages.append(
            Stage(
                run=run,
                cost=cost,
                memory=stage_memory(work, cluster.device),
                forward_seconds=float(cost.seconds("forward")),
                backward_seconds=float(cost.seconds("backward")),
                tail_seconds=float(cost.seconds("step")),
            )
        )
    return Staged(
        stages=tuple(stages),
        schedule=schedule_of(work),
        compute_dtype=str(work.facts["compute_dtype"]),
        send_seconds=max(float(stage.cost.send_seconds) for stage in stages),
    )
