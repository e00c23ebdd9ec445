"""Training on one device, written in plain torch: what `mw check`, `make fuzz` and `make mutants` compare a plan with.

This file imports torch and nothing of this package, so that a fault of the training loop, the loss, an optimizer, the
rate schedule or clipping cannot be a fault of the reference too; a test holds that. `reference_model.py` makes the
`Plain` model of a run: transformers' own module, the user's own module, or our layers without our loss.

    plain = plain_model(describe_run(config), seed=0, dtype=torch.float64)
    for result in train(plain, batch_of, config.train.optimizer, steps=4, microbatch=2):
        result.loss, result.norm, result.gradients, result.parameters, result.buffers

`batch_of(step)` returns (inputs, targets, weights) of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Tensors = dict[str, Tensor]
BatchOf = Callable[[int], tuple[Any, Tensor, Tensor]]
_COUNT_ALL = ("lamb", "adafactor")
"""Optimizers that count all steps; the others, as torch does, those that a parameter took part in."""
UPDATE_TOLERANCE = 1e-6
"""Of the largest update of a step: how far an updated parameter may be from the reference."""


def plain_losses(output: Any, targets: Tensor) -> Tensor:
    """One loss for each target: cross entropy for class numbers, squared error for real numbers."""
    if isinstance(output, dict):
        output = output["logits"]
    if not isinstance(output, Tensor):
        output = output.logits if hasattr(output, "logits") else output[0]
    if targets.is_floating_point():
        return (output.reshape(targets.shape).to(targets.dtype) - targets) ** 2
    wide = output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)


class WideCasts(TorchFunctionMode):
    """float64 wherever a module asks for float32 by name, so that nothing is rounded on the way."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {key: torch.float64 if each is torch.float32 else each for key, each in (kwargs or {}).items()}
        return func(*args, **kwargs)


class MeanDraws(TorchDispatchMode):
    """Every random draw is its mean, so that ranks which draw different numbers can be compared. Dropout, also as a
    function, and paths that are dropped become the identity."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "native_dropout_backward":
            return args[0].clone()
        result = func(*args, **kwargs)
        if name in ("rand", "rand_like", "uniform_"):
            low, high = (*args[1:3], 0.0, 1.0)[:2] if name == "uniform_" else (0.0, 1.0)
            return result.fill_((low + high) / 2)
        if name in ("randn", "randn_like", "normal_"):
            return result.fill_(args[1] if name == "normal_" and len(args) > 1 else 0.0)
        if name in ("bernoulli", "bernoulli_"):
            chance = args[1] if len(args) > 1 else kwargs.get("p", args[0] if name == "bernoulli" else 0.5)
            return result.copy_(torch.as_tensor(chance))
        return result.fill_(1.0) if name == "exponential_" else result


def draws(plain: Plain, inputs: Any) -> bool:
    """Whether a forward draws random numbers. Buffers are left as they were."""
    kept = {name: each.clone() for name, each in plain.buffers.items()}
    before = torch.get_rng_state()
    with torch.no_grad():
        plain.forward(inputs[0] if plain.packs_documents and isinstance(inputs, tuple) else inputs)
        for name, each in plain.buffers.items():
            each.copy_(kept[name])
    plain.extra_loss()
    return not torch.equal(before, torch.get_rng_state())


@dataclass(kw_only=True)
class Plain:
    """A model as one forward function of its parameters."""

    parameters: Tensors
    """Leaf tensors under the names that a plan gives them; those with `requires_grad` are trained."""
    forward: Callable[[Any], Any]
    """Inputs to scores, in training mode."""
    losses: Callable[[Any, Tensor], Tensor] = plain_losses
    buffers: Tensors = field(default_factory=dict)
    """Persistent buffers, such as running statistics; `forward` updates them in place."""
    blocks: tuple[str, ...] = ()
    """Prefixes of the names of parameters that belong to a block: Muon updates their matrices."""
    packs_documents: bool = False
    """Inputs may be (tokens, documents). Each document then runs by itself, as a sequence of its own."""
    extra_loss: Callable[..., Tensor | float] = lambda *asked: 0.0
    """Losses from inside the layers, summed over what ran since the last call; given its targets and weights, or
    nothing where they are not asked for."""
    unused: Set[str] = frozenset()
    """Trained parameters that took no part in the last gradient."""


@dataclass(kw_only=True)
class PlainStep:
    step: int
    loss: float
    norm: float
    gradients: Tensors
    """Before clipping; zeros for a parameter that took no part."""
    parameters: Tensors
    """After the update."""
    buffers: Tensors
    update_scale: float
    """Largest change of any element."""
    undetermined: Tensors
    """Elements whose update a rounding error of the gradient decides, such as the sign of a zero in Lion."""


def train(
    plain: Plain,
    batch_of: BatchOf,
    optimizer: Any,
    *,
    steps: int,
    microbatch: int,
    parts: Sequence[slice] = (slice(None),),
    seed: int | None = None,
    noise: float = 1e-15,
    update_tolerance: float = UPDATE_TOLERANCE,
    cast: torch.dtype | None = None,
) -> Iterator[PlainStep]:
    """Train for some steps.

    `parts`: rows that ranks of the plan share out; with a `seed`, random numbers are seeded for each part as
    `part_seed` says. `noise`: rounding error of a gradient, relative to its largest element. `cast`: autocast to it.
    Results refer to the parameters and buffers themselves, which the next step changes.
    """
    taken: dict[str, int] = {}
    states: dict[str, Tensors] = {name: {} for name, each in plain.parameters.items() if each.requires_grad}
    for step in range(steps):
        loss, gradients = gradient(plain, batch_of(step), microbatch, parts, seed, step, cast)
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in gradients.values()))
        clipped = dict(gradients)
        if optimizer.clip and norm > optimizer.clip:
            clipped = {name: each * (optimizer.clip / norm) for name, each in gradients.items()}
        rate = learning_rate(optimizer, step, steps)
        error = noise * max((float(each.abs().max()) for each in clipped.values() if each.numel()), default=0.0)
        scale, doubts = 0.0, {}
        with torch.no_grad():
            for name, state in states.items():
                if name in plain.unused:  # left as it is, with its averages, as torch's optimizers do
                    continue
                w = plain.parameters[name]
                taken[name] = taken.get(name, 0) + 1
                count = step + 1 if optimizer.name in _COUNT_ALL else taken[name]
                given = (optimizer, name, w, clipped[name], state, count, rate)
                new, doubts[name] = doubted_update(*given, error=error, in_block=name.startswith(plain.blocks))
                scale = max(scale, float((new - w).abs().max()) if w.numel() else 0.0)
                w.copy_(new)
        unsure = {name: doubt > update_tolerance / 2 * scale for name, doubt in doubts.items()}
        yield PlainStep(
            step=step,
            loss=loss,
            norm=norm,
            gradients=gradients,
            parameters={name: each.detach() for name, each in plain.parameters.items()},
            buffers=plain.buffers,
            update_scale=scale,
            undetermined={name: mask for name, mask in unsure.items() if bool(mask.any())},
        )


def unpacked(stored: Tensor) -> Tensor:
    """A weight stored as bytes (rows, blocks, bytes): codes of 64 elements, then a float32 that they are multiples of.

    64 bytes: whole numbers with a sign. 32: pairs of numbers of quantiles of a normal distribution, the first one in
    the high half (QLoRA's NF4, by its definition).
    """
    codes, scale = stored[..., :-4].int(), stored[..., -4:].contiguous().view(torch.float32)
    if codes.shape[-1] == 64:
        return ((codes - 256 * (codes > 127)) * scale).flatten(1)
    normal, end = NormalDist(), 0.9677083
    below = [normal.inv_cdf(float(each)) for each in torch.linspace(end, 0.5, 8)[:-1]]
    above = [normal.inv_cdf(float(each)) for each in torch.linspace(end, 0.5, 9)[:-1]]
    levels = torch.tensor([*(-each for each in below), 0.0, *reversed(above)])
    values = torch.empty(*codes.shape[:2], 64)
    values[..., 0::2], values[..., 1::2] = levels[codes // 16], levels[codes % 16]
    return (values / levels.max() * scale).flatten(1)


def merged(parameters: Tensors, scale: float) -> Tensors:
    """Weights with their low-rank adapters added to them."""
    result = {}
    for name, weight in parameters.items():
        first, second = (f"{name.removesuffix('.weight')}.{each}" for each in ("lora_A", "lora_B"))
        if ".lora_" not in name:
            has_one = first in parameters and name.endswith(".weight")
            result[name] = weight + scale * parameters[second] @ parameters[first] if has_one else weight
    return result


def part_seed(seed: int, step: int, part: int) -> int:
    """Seed of the random numbers that one part of a step's rows draws."""
    return seed * 1_000_003 + step * 1009 + part


def gradient(
    plain: Plain,
    batch: tuple[Any, Tensor, Tensor],
    microbatch: int,
    parts: Sequence[slice] = (slice(None),),
    seed: int | None = None,
    step: int = 0,
    cast: torch.dtype | None = None,
) -> tuple[float, Tensors]:
    """Loss and gradient of a batch: the sum of weight x loss over the sum of the weights."""
    inputs, targets, weights = batch
    count = float(weights.double().sum()) or 1.0
    trained = {name: each for name, each in plain.parameters.items() if each.requires_grad}
    sums = {name: torch.zeros_like(each) for name, each in trained.items()}
    used: set[str] = set()
    total = 0.0
    for number, part in enumerate(parts):
        if seed is not None:
            torch.manual_seed(part_seed(seed, step, number))
        rows = range(*part.indices(len(targets)))
        for first in range(rows.start, rows.stop, microbatch):
            chosen = slice(first, min(first + microbatch, rows.stop))
            given = tuple(each[chosen] for each in inputs) if isinstance(inputs, tuple) else inputs[chosen]
            with torch.autocast("cpu", dtype=cast) if cast is not None else nullcontext():
                summed, extra = _summed(plain, given, targets[chosen], weights[chosen])
            total += float(summed.detach())
            result = torch.autograd.grad((summed + extra) / count, list(trained.values()), allow_unused=True)
            for sum_, each in zip(sums.values(), result, strict=True):
                if each is not None:
                    sum_ += each
            used.update(name for name, each in zip(trained, result, strict=True) if each is not None)
    plain.unused = trained.keys() - used
    return total / count, sums


def _summed(plain: Plain, inputs: Any, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | float]:
    """Weighted sum of the losses, and of the losses inside layers."""
    if not (plain.packs_documents and isinstance(inputs, tuple)):
        return (plain.losses(plain.forward(inputs), targets) * weights).sum(), plain.extra_loss(targets, weights)
    total, extra = weights.new_zeros(()), weights.new_zeros(())
    for tokens, documents, wanted, weight in zip(*inputs, targets, weights, strict=True):
        ends = [place + 1 for place in range(len(documents) - 1) if documents[place] != documents[place + 1]]
        for first, last in zip([0, *ends], [*ends, len(documents)], strict=True):
            losses = plain.losses(plain.forward(tokens[None, first:last]), wanted[None, first:last])
            total = total + (losses * weight[None, first:last]).sum()
        extra = extra + plain.extra_loss(wanted[None], weight[None])
    return total, extra


def learning_rate(optimizer: Any, step: int, steps: int) -> float:
    """A straight rise over the warm-up, then the schedule's fall to `final_fraction` of the rate."""
    if step < optimizer.warmup:
        return optimizer.lr * (step + 1) / optimizer.warmup
    if optimizer.schedule == "constant":
        return optimizer.lr
    begin = optimizer.warmup
    if optimizer.schedule == "wsd":
        falling = round(optimizer.decay_fraction * steps)
        if falling == 0 and optimizer.decay_fraction > 0:
            falling = 1
        begin = max(begin, steps - falling)
    done = (step - begin) / max(1, steps - begin)
    done = min(max(done, 0.0), 1.0)
    left = (1 + math.cos(math.pi * done)) / 2 if optimizer.schedule == "cosine" else 1 - done
    lowest = optimizer.lr * optimizer.final_fraction
    return lowest + (optimizer.lr - lowest) * left


def update(
    optimizer: Any, name: str, w: Tensor, g: Tensor, state: Tensors, t: int, rate: float, *, in_block: bool = False
) -> Tensor:
    """The new value of one whole parameter; `t` is 1 in the first step. `state` gets new tensors, none is changed."""
    scale, decay = 1.0, optimizer.weight_decay if w.ndim > 1 else 0.0
    for group in optimizer.groups:  # the first that matches decides
        if any(fnmatchcase(name, each) for each in ([group.match] if isinstance(group.match, str) else group.match)):
            scale, decay = group.lr_scale, decay if group.weight_decay is None else group.weight_decay
            break
    method = optimizer.name
    if method == "muon" and not (in_block and w.ndim in (2, 3)):
        method = "adamw"
    return RULES[method](optimizer, w, g, state, t, rate * scale, decay)


def doubted_update(
    optimizer: Any, name: str, w: Tensor, g: Tensor, state: Tensors, t: int, rate: float, *, error: float,
    in_block: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`update`, and how far each element would move if the gradient had a rounding error of that size."""
    signs = torch.randint(2, g.shape, generator=torch.Generator().manual_seed(t)).to(g) * 2 - 1
    before = dict(state)
    new = update(optimizer, name, w, g, state, t, rate, in_block=in_block)
    doubt = torch.zeros_like(new)
    for moved in (g + error * signs, g - error * signs):
        other = update(optimizer, name, w, moved, dict(before), t, rate, in_block=in_block)
        doubt = torch.maximum(doubt, (other - new).abs())
    return new, doubt


def _mean(state: Tensors, key: str, value: Tensor, beta: float) -> Tensor:
    """Moving average, from zero."""
    state[key] = beta * state.get(key, torch.zeros_like(value)) + (1 - beta) * value
    return state[key]


def _adam(o: Any, g: Tensor, state: Tensors, t: int) -> Tensor:
    m = _mean(state, "m", g, o.beta1) / (1 - o.beta1**t)
    v = _mean(state, "v", g * g, o.beta2) / (1 - o.beta2**t)
    return m / (v.sqrt() + o.epsilon)


def adamw(o: Any, w: Tensor, g: Tensor, state: Tensors, t: int, rate: float, decay: float) -> Tensor:
    return w * (1 - rate * decay) - rate * _adam(o, g, state, t)


def sgd(o: Any, w: Tensor, g: Tensor, state: Tensors, t: int, rate: float, decay: float) -> Tensor:
    g = g + decay * w
    if o.momentum:
        g = state["moving"] = o.momentum * state["moving"] + g if "moving" in state else g
    return w - rate * g


def rowwise_adagrad(o: Any, w: Tensor, g: Tensor, state: Tensors, t: int, rate: float, decay: float) -> Tensor:
    square = g * g if w.ndim < 2 else (g * g).sum(-1, keepdim=True) / w.shape[-1]
    state["sum"] = square + state["sum"] if "sum" in state else square
    return w * (1 - rate * decay) - rate * g / (state["sum"].sqrt() + o.epsilon)


def lion(o: Any, w: Tensor, g: Tensor, state: Tensors, t: int, rate: float, decay: float) -> Tensor:
    m = state.get("m", torch.zeros_like(g))
    direction = torch.sign(o.beta1 * m + (1 - o.beta1) * g)
    state["m"] = o.beta2 * m + (1 - o.beta2) * g
    return w * (1 - rate * decay) - rate * direction


def lamb(o: Any, w: Tensor, g: Tensor, state: Tensors, t: int, rate: float, decay: float) -> Tensor:
    r = _adam(o, g, state, t) + decay * w
    trust = float(w.norm() / r.norm()) if w.ndim > 1 and w.norm() > 0 and r.norm() > 0 else 1.0
    return w - rate * trust * r


def lars(o: Any, w: Tensor, g: Tensor, state: Tensors, t: int, rate: float, decay: float) -> Tensor:
    trust = 1.0
    if w.ndim > 1 and w.norm() > 0 and g.norm() > 0:
        trust = float(0.001 * w.norm() / (g.norm() + decay * w.norm()))
    moved = rate * trust * (g + decay * w)
    if o.momentum:
        moved = state["moving"] = o.momentum * state.get("moving", torch.zeros_like(w)) + moved
    return w - moved


def adafactor(o: Any, w: Tensor, g: Tensor, state: Tensors, t: int, rate: float, decay: float) -> Tensor:
    beta, square = 1 - t**-0.8, g * g + o.epsilon
    if w.ndim > 1:
        row = _mean(state, "row", square.mean(-1, keepdim=True), beta)
        column = _mean(state, "column", square.mean(-2, keepdim=True), beta)
        v = row * column / row.mean(-2, keepdim=True)
    else:
        v = _mean(state, "v", square, beta)
    u = g / v.sqrt()
    u = u / max(1.0, float(u.square().mean().sqrt())) if u.numel() else u
    size = max(1e-3, float(w.square().mean().sqrt())) if w.numel() else 1e-3
    return w * (1 - rate * decay) - rate * size * u


def muon(o: Any, w: Tensor, g: Tensor, state: Tensors, t: int, rate: float, decay: float) -> Tensor:
    m = _mean(state, "m", g, o.momentum)
    x = (1 - o.momentum) * g + o.momentum * m
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(5):  # Newton-Schulz
        square = x @ x.mT
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return w * (1 - rate * decay) - rate * 0.2 * max(w.shape[-2:]) ** 0.5 * x


RULES: dict[str, Callable[..., Tensor]] = {
    rule.__name__: rule for rule in (adamw, sgd, rowwise_adagrad, lion, lamb, lars, adafactor, muon)
}
