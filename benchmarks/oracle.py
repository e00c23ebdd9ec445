"""One case on the ranks of a pool: a plan against a plain torch loop, and its traffic against its price.

    reference_job    one rank: the case's plan is checked, and a plain loop writes what training must give
    plan_job         all ranks: `mw.build`, some steps, every piece compared with its place in the reference

The reference is `meshwright/verify/reference.py`, which shares no loop, loss or optimizer with the package, on
transformers' own module where it computes one of our decoders. Rounding is told from error by a control: the plain loop
once more, its weights off by one part in 10^15, its samples in another order, and its buffers rounded as the model's.

A case is JSON:
    model       {"config": kind, "change": {...}, "freeze": [...]} or {"factory": "module:function", "arguments": {...}}
    plan        as Plan.to_json writes it
    optimizer   settings of OptimizerConfig, without a schedule: rates are the case's own
    sequence, steps, seed, mask, documents, dtype
"""

from __future__ import annotations

import copy
import fnmatch
import gc
import importlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.core.box import Box
from meshwright.core.codec import decode
from meshwright.core.errors import MeshwrightError, Problems
from meshwright.core.plan import Plan
from meshwright.models import presets as configs
from meshwright.ops.device_mesh import join
from meshwright.ops.initial_weights import join_in_order
from meshwright.ops.traffic import TrafficRecorder
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.verify import reference
from meshwright.verify.check_ranks import promised, rounded_up
from meshwright.verify.reference import Plain
from meshwright.verify.reference_model import plain_of
from meshwright.zoo import module_of

Case = dict[str, Any]
KINDS = {
    "decoder": configs.DecoderConfig,
    "vit": configs.ViTConfig,
    "vgg": configs.VGGConfig,
    "resnet": configs.ResNetConfig,
    "dlrm": configs.DLRMConfig,
}
EXACT = 1e-9
"""Largest difference of an element over the largest move of its parameter."""
NOISE = 30.0
"""Differences up to so many times those of the control are rounding."""
ROUNDED = 2**-6
"""In bf16: relative error of a loss, and of the length of the gradient."""
LATER = 0.15
"""In bf16 after the first update: the weights differ by then."""
CAST = 1e-4
"""In place of `EXACT` where a module casts to fewer bits inside, whatever the dtype of its weights."""
NO_GRADIENT = 2**-47
"""Of the largest element of any gradient: a parameter whose gradient has no larger one has none but rounding errors."""
CONTROLS = 6
"""In bf16: runs of one device with weights off by rounding."""


@dataclass(kw_only=True)
class Subject:
    """The model of a case, and the shapes of what it is trained on."""

    model: Any
    """What `mw.build` is given."""
    loss: Callable[[Any, Tensor], Tensor] | None
    inputs: list[tuple[list[int], int]]
    """Shape of a sample and kind: numbers below it; 0: floats; -1: 0 or 1 as floats; -2: numbers of documents."""
    targets: tuple[list[int], int]

    @property
    def is_config(self) -> bool:
        return hasattr(self.model, "config") and hasattr(self.model, "init_value")


def open_subject(case: Case) -> Subject:
    told, sequence = case["model"], case["sequence"]
    torch.manual_seed(case["seed"] % 2**31)
    if "factory" in told:
        path, _, name = told["factory"].partition(":")
        module, loss, inputs, targets = getattr(importlib.import_module(path), name)(**told.get("arguments", {}))
        _freeze(module, told.get("freeze", ()))
        return Subject(model=module, loss=loss, inputs=inputs, targets=targets)
    config = decode(KINDS[told["config"]], told["change"], "model")
    with torch.device("meta"):
        model = module_of(config)
    _freeze(model, told.get("freeze", ()))
    inputs, targets = _data_of(config, sequence, case.get("documents", False))
    return Subject(model=model, loss=None, inputs=inputs, targets=targets)


def _freeze(module: nn.Module, patterns: Any) -> None:
    for name, value in module.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            value.requires_grad_(False)


def _data_of(config: Any, sequence: int, documents: bool) -> tuple[list[tuple[list[int], int]], tuple[list[int], int]]:
    if isinstance(config, configs.DecoderConfig):
        tokens = ([sequence], config.vocab_size)
        return [tokens, *([([sequence], -2)] if documents else [])], tokens
    if isinstance(config, configs.DLRMConfig):
        return [([config.num_dense], 0), ([len(config.tables)], min(config.tables))], ([], -1)
    return [([config.channels, config.image_size, config.image_size], 0)], ([], config.num_classes)


@dataclass(frozen=True, kw_only=True)
class Batch:
    inputs: Any
    targets: Tensor
    weights: Tensor

    def rows(self, chosen: Any) -> Batch:
        inputs = tuple(x[chosen] for x in self.inputs) if isinstance(self.inputs, tuple) else self.inputs[chosen]
        return Batch(inputs=inputs, targets=self.targets[chosen], weights=self.weights[chosen])


def batch_of(case: Case, subject: Subject, step: int, dtype: torch.dtype) -> Batch:
    count = case["plan"]["batch"]
    generator = torch.Generator().manual_seed(case["seed"] % 2**31 * 100 + step)

    def draw(shape: list[int], kind: int) -> Tensor:
        if kind == -2:  # documents are numbered from 0 and never go back
            return (torch.rand(count, *shape, generator=generator) < 0.2).int().cumsum(-1, dtype=torch.int32)
        if kind > 0:
            return torch.randint(kind, (count, *shape), generator=generator)
        if kind == -1:
            return torch.randint(2, (count, *shape), generator=generator).to(dtype)
        return torch.randn(count, *shape, generator=generator, dtype=torch.float64).to(dtype)

    inputs = tuple(draw(shape, kind) for shape, kind in subject.inputs)
    targets = draw(*subject.targets)
    random = torch.rand(targets.shape, generator=generator, dtype=torch.float64)
    weights = {
        "none": torch.ones_like(random),
        "some": (random > 0.3).double(),
        "parts": (random + 0.5).round(decimals=2),
        "samples": (random > 0.3).double() * (torch.arange(count) % 3 > 0).view(-1, *[1] * (random.ndim - 1)),
        "all": torch.zeros_like(random) if step == 1 else torch.ones_like(random),
    }[case.get("mask", "none")]
    return Batch(inputs=inputs if len(inputs) > 1 else inputs[0], targets=targets, weights=weights)


def rates(case: Case) -> list[float]:
    return [case["optimizer"]["lr"] * (1 - 0.15 * step) for step in range(case["steps"])]


# The plain loop


@dataclass(kw_only=True)
class Trained:
    """What a run of the plain loop gave."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, clipped."""
    last: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    evaluated: float = 0.0
    undetermined: set[str] = field(default_factory=set)
    """Parameters whose true gradient is zero in every step, such as a router's with one expert a token (its share is
    1), or those of queries with a single key: an optimizer that divides by the size of the gradient moves them by
    rounding errors alone, and whether a router then sends tokens elsewhere is chance. They are not compared, and runs
    that are go on with the values of the reference. Their gradients are compared."""
    steps: list[dict[str, Tensor]] = field(default_factory=list)
    """Undetermined parameters after each step."""

    @property
    def numbers(self) -> list[float]:
        return [*self.losses, *self.norms, self.evaluated]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {f"last/{n}": v for n, v in self.last.items()} | {f"buffer/{n}": v for n, v in self.buffers.items()}


@dataclass(kw_only=True)
class Control:
    """How the plain loop is run once more to measure rounding."""

    seed: int
    """Of the order of samples."""
    forced: list[dict[str, Tensor]]
    """After each step: values to go on with."""
    rounding: dict[str, float]
    """Buffers the model has in fewer bits than its float64 parameters, such as running statistics, and the relative
    rounding error of their dtype. An evaluation reads them."""


def train_plainly(
    plain: Plain, module: nn.Module, case: Case, subject: Subject, optimizer: OptimizerConfig, *, late: bool,
    control: Control | None = None,
) -> Trained:  # fmt: skip
    """`late`: gradients are those of the weights one update earlier, as in a pipeline whose steps overlap."""
    made, named = Trained(), plain.parameters
    states: dict[str, dict[str, Tensor]] = {name: {} for name, value in named.items() if value.requires_grad}
    taken: dict[str, int] = {}
    older: dict[str, Tensor] = {}
    made.undetermined = set(states) if optimizer.name != "sgd" else set()
    module.train()
    for step, lr in enumerate(rates(case)):
        batch = batch_of(case, subject, step, torch.float64)
        if control:
            mixed = torch.randperm(len(batch.targets), generator=torch.Generator().manual_seed(control.seed + step))
            batch = batch.rows(mixed)
        newest = _copied(named)
        if late and older:
            _set(named, older)
        given = (batch.inputs, batch.targets, batch.weights)
        loss, gradients = reference.gradient(plain, given, len(batch.targets))
        norm = float(sum((g**2).sum() for g in gradients.values())) ** 0.5
        if optimizer.clip and norm > optimizer.clip:
            gradients = {name: g * (optimizer.clip / norm) for name, g in gradients.items()}
        for name, state in states.items():
            inside = name.startswith(plain.blocks) if plain.blocks else False
            if name in plain.unused:  # left as it is, with its averages, as torch's optimizers do
                continue
            weight, gradient = newest[name], gradients[name]
            taken[name] = taken.get(name, 0) + 1
            count = step + 1 if optimizer.name in reference._COUNT_ALL else taken[name]
            new = reference.update(optimizer, name, weight, gradient, state, count, lr, in_block=inside)
            with torch.no_grad():
                named[name].copy_(new)
        if norm:
            made.undetermined &= _without_gradient(gradients) - plain.unused
        made.steps.append({name: named[name].detach().clone() for name in made.undetermined})
        if control and control.forced:
            _set(named, control.forced[step])
        older = newest
        made.losses.append(loss)
        made.norms.append(norm)
        made.gradients = made.gradients or gradients
    made.last, made.buffers = _copied(named), _copied(plain.buffers)
    made.steps = [{name: each[name] for name in made.undetermined} for each in made.steps]
    with torch.no_grad():
        for name, error in control.rounding.items() if control else ():
            plain.buffers[name] *= 1 + error * _noise(plain.buffers[name], control.seed)
        module.eval()
        batch = batch_of(case, subject, case["steps"], torch.float64)
        given = (batch.inputs, batch.targets, batch.weights)
        made.evaluated = _evaluated(plain, *given)
        module.train()
    return made


def _without_gradient(gradients: dict[str, Tensor]) -> set[str]:
    sizes = {name: float(g.abs().max()) if g.numel() else 0.0 for name, g in gradients.items()}
    return {name for name, size in sizes.items() if size <= NO_GRADIENT * max(sizes.values())}


def _noise(like: Tensor, seed: int) -> Tensor:
    """Normal numbers."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(like.dtype)


def _evaluated(plain: Plain, inputs: Any, targets: Tensor, weights: Tensor) -> float:
    summed, _ = reference._summed(plain, inputs, targets, weights)
    return float(summed) / max(float(weights.sum()), 1.0)


def _copied(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in named.items()}


@torch.no_grad()
def _set(named: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        named[name].copy_(value)


def plain_subject(case: Case, subject: Subject) -> tuple[Plain, nn.Module]:
    """The case's model for the plain loop: transformers' own module where it computes one of our decoders."""
    if subject.is_config:
        opened = open_config(subject.model.config, "case", case["seed"] % 1000)
        _freeze(opened.model, case["model"].get("freeze", ()))
        return plain_of(opened, sequence=case["sequence"], dtype=torch.float64), opened.model
    module = copy.deepcopy(subject.model).double()
    if hasattr(getattr(module, "config", None), "use_cache"):
        module.config.use_cache = False
    kept = module.state_dict(keep_vars=True)
    buffers = {name: value for name, value in module.named_buffers() if name in kept and value.is_floating_point()}

    def forward(inputs: Any) -> Any:
        return module(*inputs) if isinstance(inputs, tuple) else module(inputs)

    plain = Plain(parameters=dict(module.named_parameters()), forward=forward, buffers=buffers)
    if subject.loss is not None:
        plain.losses = subject.loss
    return plain, module


# Jobs of the pool


def reference_job(*, case: Case, folder: str, rank: int, num_ranks: int, rendezvous: str) -> dict[str, Any]:
    """`{"refused": [problems]}`, `{"absent": why}` of what cannot be made here, or a folder of what training gives."""
    try:
        subject = open_subject(case)
    except (AttributeError, ImportError, ValueError, TypeError) as error:
        return {"absent": f"{type(error).__name__}: {error}"}
    try:
        plan = Plan.from_json(json.dumps(case["plan"]))
        optimizer = decode(OptimizerConfig, case["optimizer"], "optimizer")
        plain, module = plain_subject(case, subject)
        alone = _build(Plan(batch=plan.batch, microbatch=plan.batch), case, subject, OptimizerConfig())
    except MeshwrightError as error:
        return {"refused": _listed(error.problems)}
    profile = alone.build.profile
    problems = plan.check(profile) or (*plan.check_sequence(_length(case, profile)), *optimizer.problems_with(plan))
    if problems:
        return {"refused": _listed(problems)}
    model = alone.build.model
    plain.blocks = tuple(model.public_name(f"{part.name}.") for part in model.parts() if part.is_block)
    first, statistics = _copied(plain.parameters), _copied(plain.buffers)
    casts = _casts(plain, case, subject)
    _set(plain.buffers, statistics)
    late = plan.overlaps_steps
    answer = train_plainly(plain, module, case, subject, optimizer, late=late)
    forced = [] if late else answer.steps  # a pipeline whose steps overlap has no moment between two steps
    rounding = {
        name: torch.finfo(value.dtype).eps
        for name, value in alone.build.lasting_buffers()
        if name in plain.buffers and value.is_floating_point() and value.dtype != torch.float64
    }
    noise = {name: torch.zeros((), dtype=torch.float64) for name in answer.tensors}
    apart = [0.0] * len(answer.numbers)
    for turn in (1, 2):
        generator = torch.Generator().manual_seed(turn)
        change = {
            name: value * torch.randn(value.shape, generator=generator, dtype=torch.float64)
            for name, value in first.items()
            if plain.parameters[name].requires_grad
        }
        _set(plain.parameters, first | {n: first[n] + v * (1e-7 if casts else 1e-15) for n, v in change.items()})
        _set(plain.buffers, statistics)
        control = Control(seed=1000 * turn, forced=forced, rounding=rounding)
        other = train_plainly(plain, module, case, subject, optimizer, late=late, control=control)
        apart = [max(d, abs(x - y)) for d, x, y in zip(apart, answer.numbers, other.numbers, strict=True)]
        for name, value in answer.tensors.items():
            if value.numel():
                noise[name] = torch.maximum(noise[name], (other.tensors[name] - value).abs().max())
    whole = Path(folder)
    whole.mkdir(parents=True, exist_ok=True)
    tensors = answer.tensors | {f"noise/{name}": value for name, value in noise.items()}
    tensors |= {f"gradient/{name}": value for name, value in answer.gradients.items()}
    tensors |= {f"first/{name}": value for name, value in first.items()}
    tensors |= {f"forced/{step}/{name}": value for step, each in enumerate(forced) for name, value in each.items()}
    save_file({name: value.detach().contiguous() for name, value in tensors.items()}, whole / "tensors.safetensors")
    found: dict[str, Any] = {"elements": sum(v.numel() for v in answer.last.values())}
    if case.get("dtype") == "float32":
        found["sums"], runs = _rounded_alone(case, plan, optimizer, tensors)
        apart = [max(abs(x - y) for y in each) / 6 for x, each in zip(answer.numbers, runs, strict=True)]
    told = {"numbers": answer.numbers, "apart": apart, "casts": casts, "undetermined": sorted(answer.undetermined)}
    (whole / "told.json").write_text(json.dumps(told))
    return found


def _rounded_alone(
    case: Case, plan: Plan, optimizer: OptimizerConfig, tensors: dict[str, Tensor]
) -> tuple[list[list[float]], list[list[float]]]:
    """The case on one device in the plan's precision: what rounding alone does to the first gradient and the losses.

    Sums of the first gradient in each run, and every number in all runs that have it. In the first run weights are what
    they are, in the second they are bf16, as `shard` gathers them, and in the others they are off by an error of that
    size: a token between two experts goes to either, and the gradients of both are right.
    """
    subject = open_subject(case)
    techniques = tuple(each for each in plan.techniques if each.exactness == "rounded" and not each.axis)
    alone = Plan(techniques=techniques, batch=plan.batch, microbatch=plan.batch)
    built = _build(alone, case, subject, optimizer)
    results, sums = [], []
    for step, lr in enumerate(rates(case)):
        batch = batch_of(case, subject, step, torch.float32)
        results.append(built.step(batch.inputs, batch.targets, batch.weights, lr=lr))
        if step == 0:
            sums.append(_compare_gradients(built, tensors, 0.0, rounded=True)["sums"])
    batch = batch_of(case, subject, case["steps"], torch.float32)
    value = built.evaluate(batch.inputs, batch.targets, batch.weights)
    numbers = [[x] for x in (*(r.loss for r in results), *(r.gradient_norm for r in results), value)]
    batch = batch_of(case, subject, 0, torch.float32)
    built = _build(alone, case, open_subject(case), optimizer)
    first = _copied(dict(built.build.local_parameters()))
    for turn in range(CONTROLS):
        for name, weight in built.build.local_parameters():
            weight.copy_(first[name] * (1 + 2**-9 * _noise(weight, turn)) if turn else first[name].bfloat16())
        result = built.step(batch.inputs, batch.targets, batch.weights, lr=0.0)
        sums.append(_compare_gradients(built, tensors, 0.0, rounded=True)["sums"])
        numbers[0].append(result.loss)
        numbers[case["steps"]].append(result.gradient_norm)
    return sums, numbers


class _Casts(TorchDispatchMode):
    """Whether float64 was made into something with fewer bits."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype in (torch.float32, torch.bfloat16, torch.float16):
            self.seen |= any(isinstance(each, Tensor) and each.dtype == torch.float64 for each in args)
        return result


def _casts(plain: Plain, case: Case, subject: Subject) -> bool:
    batch = batch_of(case, subject, 0, torch.float64)
    with _Casts() as mode, torch.no_grad():
        reference._summed(plain, batch.inputs, batch.targets, batch.weights)
    return mode.seen


def _length(case: Case, profile: Any) -> int:
    return case["sequence"] if profile.counts == "tokens" else 1


def _listed(problems: Problems) -> list[dict[str, str]]:
    return [{"where": each.where, "what": each.what, "fix": each.fix} for each in problems]


def _build(plan: Plan, case: Case, subject: Subject, optimizer: OptimizerConfig) -> Any:
    wide = {"float64": torch.float64, "float32": torch.float32}[case.get("dtype", "float64")]
    example = None
    if not subject.is_config:
        example = batch_of({**case, "plan": {"batch": 2}}, subject, 0, torch.float32).inputs
    return mw.build(
        plan, subject.model, inputs=example, loss=subject.loss, optimizer=optimizer, device="cpu",
        seed=case["seed"] % 1000, dtype=wide,
    )  # fmt: skip


def plan_job(*, case: Case, folder: str, rank: int, num_ranks: int, rendezvous: str) -> dict[str, Any]:
    """Where this rank leaves the reference, and what it sent that was not priced."""
    torch._dynamo.reset()
    plan = Plan.from_json(json.dumps(case["plan"]))
    optimizer = decode(OptimizerConfig, case["optimizer"], "optimizer")
    if plan.mesh:
        join(rank, num_ranks, torch.device("cpu"), rendezvous=rendezvous, timeout_seconds=case.get("patience", 40))
    subject = open_subject(case)
    built = _build(plan, case, subject, optimizer)
    wide = built.build.dtype
    told, results = json.loads((Path(folder) / "told.json").read_text()), []
    tensors = load_file(Path(folder) / "tensors.safetensors")
    exact = CAST if told["casts"] else EXACT
    answer: dict[str, Any] = {"errors": [], "traffic": []}
    recorder = TrafficRecorder(built.build.mesh.axis_of_group())
    for step, lr in enumerate(rates(case)):
        mine = batch_of(case, subject, step, wide).rows(built.rows(plan.batch))
        given = (mine.inputs, mine.targets, mine.weights)
        if step == 2:
            with recorder:
                results += built.feed(*given, lr=lr)
            seen = recorder.evened(built.build.mesh)
        else:
            results += built.feed(*given, lr=lr)
        if step == 0 and not plan.overlaps_steps:
            answer |= _compare_gradients(built, tensors, exact, rounded=wide != torch.float64)
        for name, piece in built.build.local_parameters():
            if f"forced/{step}/{name}" in tensors:
                piece.copy_(_piece(tensors, f"forced/{step}/{name}", built.build.boxes[name]))
    results += built.flush()
    rounded = wide != torch.float64
    bound = ROUNDED if rounded else exact
    mine = batch_of(case, subject, case["steps"], wide).rows(built.rows(plan.batch))
    if len(results) != case["steps"]:
        answer["errors"].append(f"{len(results)} steps reported of {case['steps']}")
    numbers = {f"loss of step {step}": result.loss for step, result in enumerate(results)}
    numbers |= {f"gradient norm of step {step}": result.gradient_norm for step, result in enumerate(results)}
    numbers["evaluated loss"] = built.evaluate(mine.inputs, mine.targets, mine.weights)
    for (quantity, got), wanted, apart in zip(numbers.items(), told["numbers"], told["apart"], strict=False):
        if rounded and "norm" in quantity and "step 0" not in quantity:
            continue  # the weights differ by then: gradients are not bounded any more
        within = LATER if rounded and "step 0" not in quantity else bound
        if not abs(got - wanted) <= within * max(abs(wanted), 1e-6) + NOISE * apart:
            answer["errors"].append(f"{quantity} is {got:.12g}, not {wanted:.12g}")
    if not rounded:
        answer["errors"] += _compare_parameters(built, tensors, exact, set(told["undetermined"]))
    answer["boxes"] = {name: list(map(list, (b.offset, b.size))) for name, b in built.build.boxes.items()}
    answer["traffic"] = _compare_price(built, case, optimizer, seen)
    del built
    gc.collect()
    return answer


def _piece(tensors: dict[str, Tensor], key: str, box: Box) -> Tensor:
    """A rank's piece of a tensor of the reference. That of a fused weight is a part of each of its matrices."""
    return join_in_order(box, [tensors[key][each.slices] for each in box.in_order()])


def _compare_gradients(built: Any, tensors: dict[str, Tensor], exact: float, *, rounded: bool) -> dict[str, Any]:
    """Gradients of the first step. Rounded: sums from which their lengths and distance follow."""
    errors, sums = [], [0.0, 0.0, 0.0]
    scale = max(
        (float(v.abs().max()) for n, v in tensors.items() if n.startswith("gradient/") and v.numel()), default=0
    )
    for name, piece in built.build.local_gradients():
        box = built.build.boxes[name]
        if box.is_empty or f"gradient/{name}" not in tensors:
            continue
        wanted = _piece(tensors, f"gradient/{name}", box)
        if rounded:
            if built.build.owns(name):
                a, b = piece.double(), wanted
                sums = [sums[0] + float((a * b).sum()), sums[1] + float((b * b).sum()), sums[2] + float((a * a).sum())]
        elif not float((piece - wanted).abs().max()) <= exact * max(float(wanted.abs().max()), 1e-4 * scale, 1e-12):
            errors.append(f"gradient of {name} is off by {float((piece - wanted).abs().max()):.1e}")
    return {"errors": errors, "sums": sums}


def _compare_parameters(built: Any, tensors: dict[str, Tensor], exact: float, undetermined: set[str]) -> list[str]:
    errors = []
    moves = {n[5:]: float((v - tensors[f"first/{n[5:]}"]).abs().max()) for n, v in tensors.items()
             if n.startswith("last/") and v.numel()}  # fmt: skip
    largest = max(moves.values(), default=0.0)
    for name, piece in built.build.local_parameters():
        box = built.build.boxes[name]
        if box.is_empty or name in undetermined:
            continue
        wanted = _piece(tensors, f"last/{name}", box)
        size = float(wanted.abs().max())
        bound = exact * max(moves[name], 1e-6 * largest) + NOISE * float(tensors[f"noise/last/{name}"]) + 1e-15 * size
        off = float((piece - wanted).abs().max())
        if not off <= (bound if f"gradient/{name}" in tensors else 0.0):
            errors.append(f"{name} is off by {off:.1e} (it moved by {moves[name]:.1e})")
    here = dict(built.build.lasting_buffers())
    for name, value in here.items():
        wanted = tensors.get(f"buffer/{name}")
        if wanted is None or wanted.shape != value.shape or not value.is_floating_point():
            continue
        bound = max(10 * exact, 8 * torch.finfo(value.dtype).eps)  # buffers keep the dtype they were made with
        size = max(float(wanted.double().abs().max()), 1e-3) if wanted.numel() else 1.0
        off = float((value.double() - wanted.double()).abs().max()) if wanted.numel() else 0.0
        if not off <= bound * size + NOISE * float(tensors[f"noise/buffer/{name}"]):
            errors.append(f"buffer {name} is off by {off:.1e} of {size:.1e}")
    return errors


def _compare_price(built: Any, case: Case, optimizer: OptimizerConfig, seen: Any) -> list[str]:
    mesh, wire = built.build.mesh, built.build.wire
    length = _length(case, built.build.profile)
    priced, at_most, priced_sizes = promised(built.build, sequence=length, optimizer=optimizer)
    settled = rounded_up(seen, priced, at_most)
    cutting = {axis for axes in built.build.cut_axes.values() for axis in axes} - {wire.axis if wire else ""}
    if any(mesh.index(axis) for axis in cutting):
        return _fewer_bytes(settled, priced)
    lines = [f"{n} x {' '.join(map(str, m))} sent and not priced" for m, n in (settled - priced).items()]
    lines += [f"{n} x {' '.join(map(str, m))} priced and not sent" for m, n in (priced - settled).items()]
    sizes = {
        "parameters": sum(v.numel() * v.element_size() for _, v in built.build.local_parameters()),
        "gradients": sum(v.numel() * v.element_size() for _, v in built.build.local_gradients()),
        "optimizer": sum(v.numel() * v.element_size() for _, _, v, _ in built._loop.optimizer.state()),
    }
    for category, size in sizes.items():
        if priced_sizes[category] != size:
            lines.append(f"{category}: {size} bytes held, {priced_sizes[category]} priced")
    return lines


def _fewer_bytes(seen: Counter[tuple[str, str, int]], priced: Counter[tuple[str, str, int]]) -> list[str]:
    """Price speaks of the largest rank; another has as many messages, which may be shorter where pieces are uneven."""
    lines = []
    for kind in {message[:2] for message in (*seen, *priced)}:
        (a, b), (x, y) = (
            (sum(n for m, n in each.items() if m[:2] == kind), sum(n * m[2] for m, n in each.items() if m[:2] == kind))
            for each in (seen, priced)
        )
        if a != x or b > y:
            lines.append(f"{a} x {' '.join(kind)} of {b} bytes together sent, {x} of {y} priced")
    return lines
