"""A published row's plan, and what the simulator says of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.published_dialects import OURS, Dialect, dialect_of
from benchmarks.published_frameworks import Framework, framework_of
from benchmarks.published_machines import Machine, cluster, machine
from benchmarks.published_models import model, profile, reason_of, sequence, variant
from benchmarks.published_names import known_by_name
from benchmarks.published_numerics import SIXTEEN_BIT, Numerics, numerics_of
from benchmarks.published_rows import NO, YES, Row, Unscored
from benchmarks.published_variants import PLAIN, Variant, pieces_of
from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Technique
from meshwright.core.work import ADAM, Work
from meshwright.models.dimensions import Config
from meshwright.planner.splits import balanced_stages
from meshwright.simulator.forecast import forecast_of
from meshwright.simulator.pricing import stage_plan
from meshwright.techniques.chunked_loss import ChunkedLoss
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

_SCHEDULES = (
    (r"dual-?pipe-?v", "dualpipe_v"),
    (r"zb-?v|zero-?bubble-?v", "zbv"),
    (r"zb-?h2|zero-?bubble-?h2", "zero_bubble_h2"),
    (r"^zb|zero-?bubble", "zero_bubble_h1"),
    (r"(?<!non-)(?<!non)(?<!not )interleav|virtual|vpp", "interleaved"),
    (r"gpipe|afab|all.?forward", "gpipe"),
    (r"^$|1f1b|flush|default|^n/a$|^none$", "1f1b"),
)
_OTHER_STAGES = re.compile(r"vocab|interlaced")
"""Stages that share the vocabulary out: no schedule of ours."""
MOST_MICROBATCH = 1024
"""Samples of a microbatch that are tried where a row does not say."""
FORWARDS_OF_A_STEP = 3
"""Backward is two: what is computed again costs a third more flops."""

_LADDER = re.compile(r"cumulative ablation row: *\+?(.*?)(;|$)")
_RUNGS: tuple[tuple[str, dict[str, str]], ...] = (
    ("packed dataset", {}),
    ("compile", {"compile": "1"}),
    ("chunked ce", {"chunked_loss": "1"}),
    ("activation checkpointing", {"recompute": "full"}),
    ("fuse optimizer into backward", {"early_update": "1"}),
    ("activation offloading", {"activation_offload": "1"}),
    ("8-bit adamw", {"optimizer": "8-bit AdamW"}),
    ("lora", {"task": "finetune-lora"}),
    ("qlora", {"task": "finetune-qlora"}),
)
"""A table of one thing switched on after the other (torchtune's README): each row has what those before it have."""

_NEMO = {"zero_stage": "1 (distributed optimizer)", "sp": "1"}
_HABITS: dict[Framework, tuple[dict[str, str], dict[str, str]]] = {
    "litgpt": ({"zero_stage": "0", "recompute": "none"}, {"zero_stage": "3 (FSDP)", "recompute": "full"}),
    "megatron-core": ({}, _NEMO),
    "nemo": ({}, _NEMO),
}
"""What frameworks do unless told otherwise, on one device and on several: litgpt's fine-tuning scripts, NVIDIA's
recipes."""
_SELDOM_RECOMPUTING: tuple[Framework, ...] = ("megatron-core", "nemo")
"""NVIDIA's recipes compute again single ops that cost little (norms, activations, up-projections), never whole blocks
(Megatron-Bridge, scripts/performance)."""


_RECOMPUTED = (
    (r"gpt.?oss", r"H100|G?B200", "selective (layernorm, moe_act)"),
    (r"deepseek", r"H100", "selective (mla_up_proj, mlp)"),
    (r"deepseek", r"B[23]00", "selective (mla_up_proj)"),
)
"""Model, hardware and what is computed again (`recompute_modules` in Megatron-Bridge's scripts/performance, V1)."""


def _recipe(row: Row) -> str:
    model, hardware = row.text("model").lower(), row.text("hardware")
    return next((t for name, card, t in _RECOMPUTED if re.search(name, model) and re.search(card, hardware)), "")


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that a forecast needs."""

    config: Config
    machine: Machine
    plans: tuple[Plan, ...]
    """One; or, where a row does not tell its microbatch or whether it recomputes, what it may be: largest microbatches
    first, without recomputing and then with. The first that fits is meant."""
    sequence: int
    dialect: Dialect = OURS
    rank: Rank = "fullest"
    """Whose memory is asked for."""
    variant: Variant = PLAIN
    numerics: Numerics = SIXTEEN_BIT
    tells_recomputing: bool = True

    @property
    def is_told(self) -> bool:
        """Whether memory can be compared: the plan was not chosen by it, nor taken from a habit."""
        return len(self.plans) == 1 and self.tells_recomputing


@dataclass(frozen=True, kw_only=True)
class Guess:
    step_seconds: float
    low_seconds: float
    high_seconds: float
    allocated_bytes: float
    """What torch has allocated at the peak: no context, no communication buffers, no allocator's slack."""
    fits: bool
    plan: str = ""
    batch: int = 0
    """Samples of the step."""


Forecaster = Callable[[Case], Guess]


def explained(row: Row) -> Row:
    """The row with what its model's name, its framework's habits and its place in a table say."""
    row = known_by_name(row)
    alone, together = _HABITS.get(framework_of(row), ({}, {}))
    row = row.filled(alone if row.text("gpus") in ("1", "1.0") else together)
    if framework_of(row) == "megatron-core" and _is_silent(row):
        row = Row({**row.cells, "recompute": _recipe(row) or row.text("recompute")})
    place = _LADDER.search(row.text("notes").lower())
    if place is None:
        return row
    names = [name for name, _ in _RUNGS]
    if place[1].strip() not in names:
        raise Unscored("sequences that are not packed" if "baseline" in place[1] else "a setting that no column tells")
    facts: dict[str, str] = {"recompute": "none"}
    for name, more in _RUNGS[: names.index(place[1].strip()) + 1]:
        facts |= more
        if "lora" in name:  # one optimizer step of a few parameters: nothing to fuse
            facts["early_update"] = ""
    return Row({**row.cells, **facts})


def case_of(row: Row, rank: Rank = "fullest") -> Case:
    """Raises `Unscored`."""
    row = explained(row)
    config, machines = model(row), machine(row)
    numerics = numerics_of(row, cluster(machines).device)
    pieces = recomputed(row)
    form = replace(variant(row, config), again=pieces)
    plans, tokens, dialect = plans_of(row, numerics), sequence(row, config), dialect_of(row)
    if dialect.balances_stages or "redis" in row.text("schedule").lower():
        plans = tuple(_balanced(plan, profile(config, form), tokens) for plan in plans)
    fitting = []
    for plan in plans:
        problems = plan.check(profile(config, form), cluster(machines)) or plan.check_sequence(tokens)
        if not problems:
            fitting.append(plan)
        elif len(plans) <= 2:
            raise Unscored(f"plan: {reason_of(problems[0])}")
    if not fitting:
        raise Unscored(f"plan: {reason_of(problems[0])}")
    return Case(
        config=config,
        machine=machines,
        plans=tuple(fitting),
        sequence=tokens,
        dialect=dialect,
        rank=rank,
        variant=form,
        numerics=numerics,
        tells_recomputing=not _is_silent(row),
    )


def plans_of(row: Row, numerics: Numerics) -> tuple[Plan, ...]:
    tp, pp, cp, replicas = row.whole("tp", 1), row.whole("pp", 1), row.whole("cp", 1), row.replicas
    techniques: list[Technique] = [Precision(dtype="bf16")] if numerics.is_16_bit else []
    if re.search(r"compile|inductor", row.text("compile").lower()) or row.is_on("compile"):
        techniques.append(Compile())
    if row.is_on("chunked_loss"):
        techniques.append(ChunkedLoss())
    techniques += _samples(row, replicas)
    if tp > 1:
        # Some tell over how many ranks the sequence is split between regions.
        techniques.append(Tensor(size=tp, sequence=row.text("sp") == str(tp) or row.is_on("sp")))
    if cp > 1:
        techniques.append(Context(size=cp))
    if pp > 1:
        techniques.append(_stages(row, pp))
    with_and_without = [[*techniques, *more] for more in _recomputing(row)]
    try:
        return tuple(
            Plan(techniques=tuple(chosen), batch=batch, microbatch=microbatch)
            for chosen in with_and_without
            for batch, microbatch in _batches(row, replicas)
        )
    except MeshwrightError as error:
        raise Unscored(f"plan: {reason_of(error.problems[0])}") from None


def _batches(row: Row, replicas: int) -> Sequence[tuple[int, int]]:
    """(samples of a step, of a microbatch): as told, or all that may be, large microbatches first."""
    count = row.number("grad_accum")
    if row.number("micro_batch") is not None:
        if count and row.batch != row.whole("micro_batch") * int(count) * replicas:
            raise Unscored("global_batch is not micro_batch x grad_accum x replicas")
        return [(row.batch, row.whole("micro_batch"))]
    if row.number("global_batch") is None:
        sizes = [2**power for power in range(MOST_MICROBATCH.bit_length() - 1, -1, -1)]
        return [(size * replicas * int(count or 1), size) for size in sizes]
    batch = row.batch
    if batch % replicas:
        raise Unscored("global_batch cannot be shared by the replicas")
    share = batch // replicas
    if count:
        if share % int(count):
            raise Unscored("global_batch cannot be shared by the replicas")
        return [(batch, share // int(count))]
    sizes = [2**power for power in range(MOST_MICROBATCH.bit_length() - 1, -1, -1) if share % 2**power == 0]
    return [(batch, size) for size in sizes]


def recomputed(row: Row) -> tuple[str, ...]:
    """Pieces of every block that are computed again."""
    text = row.text("recompute").lower()
    if text == "minimal_flash":  # MaxText: whatever is no matmul
        return "layernorm", "act"
    if not text.startswith("selective") or _recomputed_share(row):
        return ()
    parts = re.sub(r"^selective[\s:(]*|\)$", "", text).strip()
    found = pieces_of(parts) if parts else ("core_attn",)
    if not found:
        raise Unscored(f"recompute is {text}")
    return found


def _recomputed_share(row: Row) -> float:
    """Of blocks: every second, or where `selective` says no more, by the flops done over those of the model."""
    text, mfu, hfu = row.text("recompute").lower(), row.number("mfu"), row.number("hfu")
    if every := re.match(r"selective[\s:(]*(?:every )?([1-9]\d*)\b", text):
        return 1 / int(every[1])
    if re.match(r"selective[\s:(]*layer\b", text):
        return 0.5  # torchtitan's: every second unless told otherwise
    if text != "selective" or not mfu or not hfu:
        return 0.0
    return min(1.0, max(0.0, FORWARDS_OF_A_STEP * (hfu / mfu - 1)))


def _recomputing(row: Row) -> tuple[tuple[Technique, ...], ...]:
    """What recomputes whole blocks; two ways where it is not told."""
    text = row.text("recompute").lower()
    if "offload" in text:
        raise Unscored("offload")
    if share := _recomputed_share(row):
        return ((Recompute(layers=f"first {round(share * row.whole('layers'))}"),),)
    if text.startswith(("selective", "minimal")) or re.match(r"none|not? |disabled", text) or text in NO - {"", "n/a"}:
        return ((),)
    if blocks := re.match(r"full.*\bblock[ /:=]*(\d+)", text):
        return ((Recompute(layers=int(blocks[1])),),)
    if re.match(r"full|activation checkpointing|enabled|checkpointing", text) or text in YES:
        return ((Recompute(),),)
    if _is_silent(row):
        return ((),) if framework_of(row) in _SELDOM_RECOMPUTING else ((), (Recompute(),))
    raise Unscored(f"recompute is {text}")


def _is_silent(row: Row) -> bool:
    """Whether it does not tell what is computed again."""
    text = row.text("recompute").lower()
    return text in ("", "n/a") or re.match(r"per |see |unknown|not stated|unspecified", text) is not None


def _samples(row: Row, dp: int) -> list[Technique]:
    """Data parallelism, some of it between the ranks that share out the experts."""
    ep, tp = row.whole("ep", 1), row.whole("tp", 1)
    if dp % ep and ep % tp == 0:
        # Shared out over tensor ranks as well: as many bytes and flops each as experts that those ranks cut.
        ep //= tp
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
    told = re.match(r"(?:deepspeed )?(?:zero|stage)?[ -]?(?:stage ?)?([0-3])\b", text)
    if not text or text in ("none", "n/a", "no", "ddp", "-") or (told and told[1] == "0"):
        return 0, None
    if re.search(r"hsdp|hybrid", text):
        return 3, row.whole("gpus_per_node", 8)
    if "shard_grad_op" in text or (told and told[1] == "2"):
        return 2, size
    if "fsdp" in text or (told and told[1] == "3"):
        return 3, size
    if told or re.search(r"dist(ributed)?[ _-]?optim", text):
        return 1, size
    raise Unscored(f"zero_stage is {text}")


def _stages(row: Row, pp: int) -> Pipeline:
    text, chunks = row.text("schedule").lower(), row.whole("vpp", 1)
    schedule = next((schedule for pattern, schedule in _SCHEDULES if re.search(pattern, text)), None)
    if schedule is None or _OTHER_STAGES.search(text):
        raise Unscored(f"schedule is {text}")
    if chunks > 1 and schedule in ("1f1b", "interleaved"):
        layers = row.whole("layers")
        # Megatron may count the ends as layers: the first and the last chunk then have one block less.
        ends = (layers + 2) // (pp * chunks)
        if (layers + 2) % (pp * chunks) == 0 and layers % (pp * chunks) and ends > 1:
            sizes = (ends - 1, *(ends for _ in range(pp * chunks - 2)), ends - 1)
            return Pipeline(size=pp, schedule="interleaved", chunks=chunks, stages=sizes)
        return Pipeline(size=pp, schedule="interleaved", chunks=chunks)
    # Interleaving one chunk is 1F1B.
    return Pipeline(size=pp, schedule="1f1b" if schedule == "interleaved" else schedule)  # type: ignore[arg-type]


def _balanced(plan: Plan, model: Profile, tokens: int) -> Plan:
    """With stages cut by what their layers cost."""

    def cut(technique: Technique) -> Technique:
        if not isinstance(technique, Pipeline) or technique.stages or technique.size > model.num_blocks:
            return technique
        return replace(technique, stages=balanced_stages(model, technique.size, tokens))

    return replace(plan, techniques=tuple(map(cut, plan.techniques)))


def simulated(case: Case) -> Guess:
    """What meshwright says today."""
    guess = None
    for plan in case.plans:
        guess = guess_on(case, plan, cluster(case.machine))
        if guess.fits:
            break
    assert guess is not None
    return guess


def guess_on(case: Case, plan: Plan, machines: Cluster, *, replays: bool = True) -> Guess:
    model, dialect = profile(case.config, case.variant), case.dialect
    machines = dialect.cluster(machines)

    def change(work: Work) -> Work:
        if dialect.fuses and plan.technique(Compile.name) is None:
            # Kernels fused by hand cost what a compiler's do, also under schedules that a compiler refuses.
            work = replace(Compile().price(work), facts=work.facts)
        return dialect.change(case.numerics.change(work))

    staged = stage_plan(model, plan, machines, sequence=case.sequence, optimizer=ADAM, change=change)
    found = forecast_of([staged], model, plan, machines, sequence=case.sequence, replays=replays)
    stage = {"first": 0, "last": -1}.get(case.rank, found.worst_stage)
    return Guess(
        step_seconds=found.step_seconds + dialect.step_seconds,
        low_seconds=found.step_seconds_low + dialect.step_seconds,
        high_seconds=found.step_seconds_high + dialect.step_seconds,
        allocated_bytes=float(staged.unfolded[stage].memory.allocated_bytes()),
        fits=found.fits,
        plan=str(plan),
        batch=plan.batch,
    )


def remembering(forecaster: Forecaster) -> Forecaster:
    """Equal model, machines and plan are forecast once; what keeps one from being made is a reason."""
    known: dict[Any, Guess] = {}

    def guess(case: Case) -> Guess:
        key = replace(case, dialect=OURS), repr(case.dialect)  # a dialect may have links, which cannot be hashed
        if key not in known:
            try:
                known[key] = forecaster(case)
            except MeshwrightError as error:
                raise Unscored(f"forecast: {reason_of(error.problems[0])}") from None
            except Exception as error:  # a bug of ours: one row's, counted and shown, not the end of five thousand
                raise Unscored(f"forecast failed ({type(error).__name__})") from error
        return known[key]

    return guess
