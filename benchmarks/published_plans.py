"""A published row's plan, and what the simulator says of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.published_dialects import OURS, Dialect, dialect_of
from benchmarks.published_models import Machine, cluster, machine, model, profile, reason_of, sequence
from benchmarks.published_rows import Row, Unscored
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import Technique
from meshwright.core.work import ADAM
from meshwright.models.dimensions import Config
from meshwright.simulate.forecast import forecast_of
from meshwright.simulate.stage import stage_plan
from meshwright.techniques.compile import Compile
from meshwright.techniques.context import Context
from meshwright.techniques.expert import Expert
from meshwright.techniques.pipeline import Pipeline
from meshwright.techniques.precision import Precision
from meshwright.techniques.recompute import Recompute
from meshwright.techniques.replicate import Replicate
from meshwright.techniques.shard import Shard
from meshwright.techniques.tensor import Tensor

Rank = Literal["fullest", "first", "last"]

_SCHEDULES = {"": "1f1b", "1f1b": "1f1b", "interleaved-1f1b": "interleaved", "gpipe": "gpipe", "afab": "gpipe"}
_QUANTISED = re.compile(r"nf4|bnb|int8|int4|fp4|4.?bit|8.?bit", re.IGNORECASE)
_ADAPTERS = re.compile(r"lora|adapter|prefix", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that a forecast needs, hashable."""

    config: Config
    machine: Machine
    plans: tuple[Plan, ...]
    """One; or, where a row does not say whether it recomputes, without and with: the first that fits is meant."""
    sequence: int
    dialect: Dialect = OURS
    rank: Rank = "fullest"
    """Whose memory is asked for."""

    @property
    def is_told(self) -> bool:
        """Whether memory can be compared: the plan was not chosen by it."""
        return len(self.plans) == 1


@dataclass(frozen=True, kw_only=True)
class Guess:
    step_seconds: float
    low_seconds: float
    high_seconds: float
    allocated_bytes: float
    """What torch has allocated at the peak: no context, no communication buffers, no allocator's slack."""
    fits: bool
    plan: str = ""


Forecaster = Callable[[Case], Guess]


def case_of(row: Row, rank: Rank = "fullest") -> Case:
    """Raises `Unscored`."""
    if _ADAPTERS.search(f"{row.text('task')} {row.text('precision')}"):
        raise Unscored("adapters (LoRA)")
    config, machines, plans = model(row), machine(row), plans_of(row)
    tokens = sequence(row, config)
    for plan in plans:
        problems = plan.check(profile(config), cluster(machines)) or plan.check_sequence(tokens)
        if problems:
            raise Unscored(f"plan: {reason_of(problems[0])}")
    return Case(config=config, machine=machines, plans=plans, sequence=tokens, dialect=dialect_of(row), rank=rank)


def plans_of(row: Row) -> tuple[Plan, ...]:
    tp, pp, cp, gpus = row.whole("tp", 1), row.whole("pp", 1), row.whole("cp", 1), row.whole("gpus")
    dp = row.whole("dp", row.replicas)
    if tp * pp * cp * dp != gpus:
        raise Unscored("tp x pp x cp x dp is not gpus")
    techniques = [*_numerics(row), *_samples(row, dp)]
    if tp > 1:
        techniques.append(Tensor(size=tp, sequence=row.whole("sp", 0, least=0) == 1))
    if cp > 1:
        techniques.append(Context(size=cp))
    if pp > 1:
        techniques.append(_stages(row, pp))
    try:
        plan = Plan(techniques=tuple(techniques), batch=row.batch, microbatch=row.whole("micro_batch"))
    except MeshwrightError as error:
        raise Unscored(f"plan: {reason_of(error.problems[0])}") from None
    recomputing = replace(plan, techniques=(*plan.techniques, Recompute()))
    return {"none": (plan,), "full": (recomputing,), "": (plan, recomputing)}[_recompute(row)]


def _recompute(row: Row) -> Literal["none", "full", ""]:
    text = row.text("recompute").lower()
    if text.startswith("selective"):
        raise Unscored("selective recomputation")
    if text.startswith("none"):
        return "none"
    if text.startswith("full"):
        return "full"
    if not text or text.startswith("per recipe"):
        return ""
    raise Unscored(f"recompute is {text}")


def _numerics(row: Row) -> list[Technique]:
    text = row.text("precision").lower()
    compiled: list[Technique] = [Compile()] if row.text("compile").lower() in ("1", "true", "yes") else []
    if "fp8" in text:
        raise Unscored("fp8")
    if _QUANTISED.search(text):
        raise Unscored("quantised weights")
    if "true" in text:
        raise Unscored("weights and optimizer in bf16")
    if re.search(r"bf16|fp16|amp|mixed", text):
        return [Precision(dtype="bf16"), *compiled]
    if "tf32" not in text and "fp32" in text:
        return compiled
    raise Unscored(f"precision is {text or 'not told'}")


def _samples(row: Row, dp: int) -> list[Technique]:
    """Data parallelism, some of it between the ranks that share out the experts."""
    ep = row.whole("ep", 1)
    if dp % ep:
        raise Unscored("experts are shared out over more than data-parallel ranks (ep does not divide dp)")
    replicas = dp // ep
    stage, size = _zero(row)
    shared = min(replicas, size or replicas)
    if replicas % shared:
        raise Unscored("shards do not divide the replicas")
    found: list[Technique] = [Expert(size=ep)] if ep > 1 else []
    if stage and shared > 1:
        found.append(Shard(size=shared, stage=stage))
        replicas //= shared
    return [*found, Replicate(size=replicas)] if replicas > 1 else found


def _zero(row: Row) -> tuple[Literal[0, 1, 2, 3], int | None]:
    """ZeRO's stage, and how many replicas share; None: all."""
    text = row.text("zero_stage").lower()
    if "offload" in text:
        raise Unscored("offload")
    within = re.search(r"within (\d+)", text)
    size = int(within[1]) if within else None
    if text[:1] in ("", "0"):
        return 0, None
    if "hsdp" in text:
        return 3, row.whole("gpus_per_node", 8)
    if text[0] == "3" or "fsdp" in text:
        return 3, size
    if text[0] == "2":
        return 2, size
    if text[0] == "1" or "distributedoptimizer" in text:
        return 1, size
    raise Unscored(f"zero_stage is {text}")


def _stages(row: Row, pp: int) -> Pipeline:
    text, chunks = row.text("schedule").lower(), row.whole("vpp", 1)
    if text not in _SCHEDULES:
        raise Unscored(f"schedule is {text}")
    if chunks > 1:
        return Pipeline(size=pp, schedule="interleaved", chunks=chunks)
    # Interleaving one chunk is 1F1B.
    return Pipeline(size=pp, schedule="gpipe" if _SCHEDULES[text] == "gpipe" else "1f1b")


def simulated(case: Case) -> Guess:
    """What meshwright says today."""
    guess = None
    for plan in case.plans:
        guess = _guess(case, plan)
        if guess.fits:
            break
    assert guess is not None
    return guess


def _guess(case: Case, plan: Plan) -> Guess:
    machines = cluster(case.machine)
    model, dialect = profile(case.config), case.dialect
    machines = dialect.cluster(machines)
    staged = stage_plan(model, plan, machines, sequence=case.sequence, optimizer=ADAM, change=dialect.change)
    found = forecast_of(staged, model, plan, machines, sequence=case.sequence)
    peak_bytes = found.peak_bytes
    if case.rank != "fullest" and "pp" in plan.mesh:
        peak_bytes = int(staged.unfolded[-1 if case.rank == "last" else 0].memory.peak_bytes())
    return Guess(
        step_seconds=found.step_seconds,
        low_seconds=found.step_seconds_low,
        high_seconds=found.step_seconds_high,
        allocated_bytes=peak_bytes - machines.device.reserved_bytes,
        fits=found.fits,
        plan=str(plan),
    )


def remembering(forecaster: Forecaster) -> Forecaster:
    """Equal model, machines and plan are forecast once; what keeps one from being made is a reason."""
    known: dict[Case, Guess] = {}

    def guess(case: Case) -> Guess:
        if case not in known:
            try:
                known[case] = forecaster(case)
            except MeshwrightError as error:
                raise Unscored(f"forecast: {reason_of(error.problems[0])}") from None
            except Exception as error:  # a bug of ours: one row's, counted and shown, not the end of five thousand
                raise Unscored(f"forecast failed ({type(error).__name__})") from error
        return known[case]

    return guess
