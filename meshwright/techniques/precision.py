"""Compute in fewer bits: activations and matmuls in 16 or 8, parameters in fp32 or bf16, the optimizer in fp32.

What: the residual stream and everything computed from it are bf16; weights are cast where they are used, and gathered
as bf16 by `shard`; the loss, gradient sums and the optimizer stay fp32. Models that are not our decoder run under
autocast, which keeps their residual stream in fp32.
`dtype` = fp16 does the same in fp16, with a loss multiplied by a scale that keeps small gradients above zero: 2^16 at
first, halved where a gradient of any rank overflows (the step is then skipped on all), doubled after 2000 steps
without.
Frozen parameters of our decoders are stored in bf16 where that is the compute dtype: as they would be cast anyway.
`weights` = bf16 stores weights and gradients in bf16 and no fp32 copy; updates are made in fp32 and rounded at random
to a neighbour, the same on every replica and after a restart.
`weights` = master stores, beside fp32 master weights, bf16 copies of the weights of blocks' linear layers and
convolutions: products read them, their gradients stay bf16 (as they are made) and the update writes both. The numbers
are those of `weights` = fp32, without the casts. On one device, with one microbatch a step.
`matmul` = fp8_tensorwise or fp8_rowwise: linear layers of blocks multiply 8-bit operands, rounded where they are used
with one scale for each tensor or row. The head, experts, `edge_blocks` at each end and matrices whose sizes (after
tensor's cut) are no multiples of 16 stay in bf16. `shard` gathers what tensorwise products read in 8 bits, where its
ranks share the rows evenly, and all else in bf16.
When it helps: on tensor cores, where bf16 runs 8 to 16 times the fp32 rate and activations halve; fp16 on devices that
have no bf16 (V100, T4), where alone search chooses it; bf16 weights where parameters and gradients are the peak; fp8 on
devices of compute capability 8.9 and later, once matrices are some thousands wide and blocks are compiled (16 blocks of
llama3.2-1b on an H200: 205 ms in bf16, 166 tensorwise, 191 rowwise).
When it does not: CPUs without bf16 units run it up to 70 times slower, and fp16 is refused on all; without `compile`,
fp8 rounds in passes of its own.
Cost: 2 bytes an element instead of 4; a bf16 copy of the weights in use (Micikevicius et al. 2018; Kalamkar et al.
2019). bf16 weights: 4 bytes a parameter less, the update piece by piece (Gupta et al. 2015). fp8: each operand is read
once or twice more to be rounded; 1 byte a weight gathered (Micikevicius et al. 2022).
Exactness: rounded: 8 bits of mantissa, 11 of fp16 (400 steps of a small byte-level decoder: held-out loss 0.4 % below
fp32's in bf16, 0.9 % in fp16, 1.3 % with another seed); lossy, chosen by search only with --allow lossy, with bf16
weights, and with fp8: 4 bits (3 of tensorwise gradients).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError, Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Choice, Exactness, Option, Technique
from meshwright.core.work import (
    FP8_MULTIPLE,
    Circumstances,
    Compute,
    Num,
    ParameterSlot,
    Phase,
    Resident,
    Task,
    Work,
    replace,
)


@dataclass(frozen=True, kw_only=True)
class Precision(Technique):
    name: ClassVar[str] = "precision"
    phase: ClassVar[str] = "swap"
    exactness: ClassVar[Exactness] = "rounded"

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    weights: Literal["fp32", "bf16", "master"] = "fp32"
    """As they are stored and updated; bf16: gradients too, and there is no float32 copy of either; master: in both, for
    products to read and updates to write."""
    matmul: Literal["", "fp8_tensorwise", "fp8_rowwise"] = ""
    """How blocks' linear layers multiply; empty: in `dtype`."""
    edge_blocks: int = 1
    """Blocks at each end of the model that multiply in `dtype` all the same."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "exactness", self.exactness_with({"matmul": self.matmul, "weights": self.weights}))

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        rates = cluster.device.flops_per_second
        if "bf16" not in rates:
            return (Choice("dtype", ("fp16",)),) if "fp16" in rates else ()
        has_fp8 = "fp8" in rates and not _fp8_problems(profile, 1)
        copies = ("master",) if cluster.num_devices == 1 and _copied(profile) else ()
        return (
            Choice("dtype", ("bf16",)),
            *([Choice("matmul", ("", "fp8_tensorwise", "fp8_rowwise"))] if has_fp8 else []),
            Choice("weights", ("fp32", *("bf16",) * (profile.stream == "compute"), *copies)),
        )

    @classmethod
    def exactness_with(cls, settings: Mapping[str, Any]) -> Exactness:
        is_lossy = settings.get("matmul") or settings.get("weights") == "bf16"
        return "lossy" if is_lossy else cls.exactness

    @property
    def updates_each_alone(self) -> bool:
        return self.weights == "bf16"

    @property
    def copies_weights(self) -> bool:
        return self.weights == "master"

    @property
    def scales_loss(self) -> bool:
        return self.dtype == "fp16"

    def refusals(self, given: Circumstances) -> Iterator[tuple[Num, Problem]]:
        if self.matmul:
            what = f"matmul is {self.matmul}, and this schedule makes weights' gradients apart, from 16-bit operands."
            yield given.splits_backward, self.problem(what, 'Use another schedule, or matmul = "".')
        if self.weights == "master":
            what = "weights are copied for products, and gradients of several microbatches are summed in fp32."
            yield given.num_microbatches > 1, self.problem(what, 'Use one microbatch, or weights = "fp32".')

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        problems = list(self.refused(plan, profile))
        if self.matmul:
            problems += [self.problem(*words) for words in _fp8_problems(profile, self.edge_blocks)]
        if self.matmul and self.dtype != "bf16":
            what = f"matmul is {self.matmul}, whose results are bf16, and dtype is {self.dtype}."
            problems.append(self.problem(what, 'Use dtype = "bf16".'))
        if self.weights == "bf16" and (self.dtype != "bf16" or profile.stream != "compute"):
            computed = "under autocast" if profile.stream != "compute" else f"in {self.dtype}"
            what = f"weights are bf16, and {profile.name} computes {computed}."
            problems.append(self.problem(what, _FP32_WEIGHTS))
        if self.weights == "master" and self.dtype != "bf16":
            problems.append(self.problem(f"weights have copies in bf16, and dtype is {self.dtype}.", _FP32_WEIGHTS))
        if self.weights == "master" and self.matmul:
            what = f"matmul is {self.matmul}, which rounds weights where they are used: a bf16 copy spares nothing."
            problems.append(self.problem(what, _FP32_WEIGHTS))
        if self.weights == "master" and plan.num_ranks > 1:
            what = "weights have copies for products, which only one device's update writes."
            problems.append(self.problem(what, _FP32_WEIGHTS))
        if self.edge_blocks < 0:
            problems.append(self.problem(f"edge_blocks is {self.edge_blocks}.", "Use 0 or more."))
        if cluster is not None and cluster.device.peak(self.dtype) is None:
            what = f"the devices of {cluster.name} do not compute in {self.dtype}."
            other = next((d for d in ("bf16", "fp16") if cluster.device.peak(d) is not None), "fp32")
            problems.append(self.problem(what, f'Use dtype = "{other}", or plan again with --ban precision.'))
        if cluster is not None and self.matmul and "fp8" not in cluster.device.flops_per_second:
            what = f"the devices of {cluster.name} do not multiply in fp8."
            problems.append(self.problem(what, 'Use matmul = "".'))
        return tuple(problems)

    def price(self, work: Work) -> Work:
        if self.dtype == "fp32":
            return work
        work = self.forbid(work)

        def task(item: Any) -> Any:
            if getattr(item, "dtype", "") != "compute":
                return item
            return replace(item, dtype=self.dtype, moved_bytes=item.moved_bytes / 2)

        def resident(item: Resident) -> Resident:
            if item.dtype != "compute":
                return item
            return replace(item, dtype=self.dtype, bytes=item.bytes / 2)

        if self._narrows_frozen(work.profile):
            work = work.map_slots(lambda slot: replace(slot, element_bytes=_narrow(slot)) if slot.frozen else slot)
        if self.weights == "master":
            names, work = _copied(work.profile), work.forbid(work.size("num_ranks") > 1)
            work = work.map_slots(lambda s: replace(s, copy_bytes=2) if (s.layer, s.name) in names else s)
        # Tables are looked up as they are.
        multiplying = {task.layer for task in work.computes if task.kind == "matmul"}
        casts = [
            Resident(
                layer=slot.layer,
                category="gathered",
                repeat=slot.repeat,
                bytes=slot.elements * 2,
                life="always" if slot.copy_bytes else "microbatch",
                cut="none" if slot.cut is None else "tensor",
                origin=self.name,
                shared_out=slot.shared_out,
            )
            for slot in work.slots
            if slot.layer in multiplying and slot.element_bytes > 2 and self.weights != "bf16"
        ]
        work = work.map_tasks(task).map_residents(resident).with_residents(*casts)
        if self.weights != "bf16":
            work = work.with_tasks(*_casting(work, multiplying))
        else:
            work = work.map_slots(lambda slot: replace(slot, element_bytes=_narrow(slot))).with_widths(reduce=2)
            work = work.forbid(not work.optimizer.is_elementwise)
        stream = 2 if work.profile.stream == "compute" else work.facts.widths.stream
        work = work.with_facts(compute_dtype=self.dtype, scales_loss=self.scales_loss)
        work = work.with_widths(compute=2, gather=2, stream=stream)
        return self._price_fp8(work) if self.matmul else work

    def _narrows_frozen(self, profile: Profile) -> bool:
        """Under autocast, modules see the dtype of their weights."""
        return self.dtype == "bf16" and profile.stream == "compute"

    def _price_fp8(self, work: Work) -> Work:
        """Linear layers of all blocks but those at the ends, each block as an average one; rounding as compiled code
        does it: joined to its neighbours, once for all readers of an input."""
        share = max(0.0, 1.0 - 2.0 * self.edge_blocks / max(work.profile.num_blocks, 1))
        shares_input: set[tuple[str, str]] = set()
        for layer in work.profile.block_layers:
            for before, op in itertools.pairwise(layer.ops):
                if before.role == op.role == "linear":
                    shares_input.add((layer.name, op.name))
        blocks = {layer.name for layer in work.profile.block_layers}
        tasks: list[Task] = []
        for task in work.tasks:
            if not isinstance(task, Compute) or task.layer not in blocks or not _is_fp8(task.role, task.shape):
                tasks.append(task)
                continue
            for part, dtype in ((share, "fp8"), (1.0 - share, task.dtype)):
                if part:
                    kernels, moved = task.kernels * part, task.moved_bytes * part * (0.75 if dtype == "fp8" else 1.0)
                    flops = task.flops * part
                    tasks.append(replace(task, dtype=dtype, flops=flops, kernels=kernels, moved_bytes=moved))
            is_forward = task.phase == "forward"
            of_input, of_weight, of_gradient = _ROUNDED_BYTES[self.matmul][is_forward]
            n, k = task.shape
            rows = task.flops / (2.0 * n * k * task.kernels)
            inputs = 0.0 if (task.layer, task.name) in shares_input else of_input * rows * k
            gradients, weights = of_gradient * rows * n, of_weight * float(n * k)
            whole, cut = (inputs, gradients + weights) if task.cut_dim == "n" else (gradients, inputs + weights)
            for moved, by in ((whole, "none"), (cut, task.cut)):
                common: dict[str, Any] = {"layer": task.layer, "phase": task.phase, "repeat": task.repeat, "cut": by}
                common |= {"kind": "memory", "role": "cast", "origin": self.name, "kernels": share}
                tasks.append(Compute(name=f"{task.name}.{self.matmul}", moved_bytes=moved * share, **common))
        is_once = self.matmul == "fp8_tensorwise"
        layers = work.profile.block_layers
        read = {(each.name, f"{op.name}.weight") for each in layers for op in each.ops if op.role == "linear"}
        work = work.map_slots(lambda slot: replace(slot, is_narrow=is_once and (slot.layer, slot.name) in read))
        work = work.with_facts(compute_dtype="fp8", remade_inputs=share * is_once, edge_blocks=self.edge_blocks)
        return replace(work, tasks=tuple(tasks))

    def apply(self, build: Build) -> None:
        build.at("swap", self._swap)

    def _swap(self, build: Build) -> None:
        import torch

        if self.dtype != "fp32":
            build.compute_dtype = torch.bfloat16 if self.dtype == "bf16" else torch.float16
            build.model.set_compute_dtype(build.compute_dtype)
        if self._narrows_frozen(build.profile):
            build.frozen_dtype = torch.bfloat16
        if self.scales_loss:
            from meshwright.optimizers.loss_scaling import LossScaling

            build.loss_scaling = LossScaling()
        if self.weights == "bf16":
            from functools import partial

            from meshwright.optimizers.rounded_weights import RoundedWeights

            build.weight_dtype = torch.bfloat16
            # After whoever changes the rule's states, before whoever changes when it is called.
            build.at("optimizer", lambda build: build.rule_wraps.append(lambda make: partial(RoundedWeights, make)))
        if self.weights == "master":
            build.at("optimizer", self._copy)
        if self.matmul:
            from meshwright.ops.fp8 import linear_fp8

            if build.mesh.device.type == "cuda" and torch.cuda.get_device_capability(build.mesh.device) < (8, 9):
                what = f"{torch.cuda.get_device_name(build.mesh.device)} does not multiply in fp8."
                raise MeshwrightError([self.problem(what, 'Use matmul = "".')])
            product = linear_fp8("rowwise" if self.matmul == "fp8_rowwise" else "tensorwise")
            for number, block in enumerate(build.model.block_modules()):  # no stage is cut yet
                if self.edge_blocks <= number < build.profile.num_blocks - self.edge_blocks:
                    for module in block.modules():
                        if isinstance(module, torch.nn.Linear) and hasattr(module, "product"):
                            module.product = product

    def _copy(self, build: Build) -> None:
        """Weights are there, and the optimizer is not."""
        names = {name for _, name in _copied(build.profile)}
        parameters = dict(build.named_parameters())
        inside = {id(each) for block in build.model.block_modules() for each in block.parameters()}
        for name, param in build.named_params():
            parameter = parameters[name]
            if param.name in names and id(parameter) in inside and parameter.requires_grad:
                build.wide[name] = parameter.data
                parameter.data = parameter.data.to(build.compute_dtype)


_FP32_WEIGHTS = 'Use weights = "fp32".'
_ROUNDED_BYTES: dict[str, dict[bool, tuple[int, int, int]]] = {
    "fp8_tensorwise": {True: (5, 5, 0), False: (3, 3, 6)},
    "fp8_rowwise": {True: (3, 3, 0), False: (9, 9, 14)},
}
"""Setting -> whether forward -> bytes moved to round an element of the input, the weight and the output's gradient:
2 for each time it is read, 1 for each layout in which it is written. A scale of a whole tensor asks for a pass of its
own, one of each column for strided ones (an H200: blocks of llama3.2-1b in 205 ms, tensorwise 166, rowwise 191)."""


def _copied(profile: Profile) -> set[tuple[str, str]]:
    """(layer, parameter) of the trained weights that may have copies for products to read."""
    result = set()
    for layer in profile.block_layers:
        names = {f"{op.name}.weight" for op in layer.ops if op.role in ("linear", "convolution")}
        trained = {param.name for param in layer.params if not (param.frozen or param.tied)}
        result |= {(layer.name, name) for name in names & trained}
    return result


def _narrow(slot: ParameterSlot) -> int:
    return min(slot.element_bytes, 2)


def _is_fp8(role: str, shape: tuple[Num, ...]) -> bool:
    """Whether an op is a linear layer's product whose sizes 8-bit products take."""
    return role == "linear" and len(shape) == 2 and all(size % FP8_MULTIPLE == 0 for size in shape)


def _fp8_problems(profile: Profile, edge_blocks: int) -> list[tuple[str, str]]:
    """(what, fix) where nothing of a model can be multiplied in fp8."""
    if profile.stream != "compute":
        return [(f"{profile.name} runs under autocast, which knows no fp8.", 'Use matmul = "".')]
    if any(layer.has_adapters for layer in profile.layers):
        return [("linear layers with adapters multiply in 16 bits.", 'Use matmul = "".')]
    if profile.num_blocks <= 2 * edge_blocks:
        what = f"edge_blocks is {edge_blocks} and the model has {profile.num_blocks} blocks: none is left for fp8."
        return [(what, "Use fewer edge_blocks.")]
    if not any(_is_fp8(op.role, op.shape) for layer in profile.block_layers for op in layer.ops):
        return [("no linear layer of a block has sizes that are multiples of 16.", 'Use matmul = "".')]
    return []


def _casting(work: Work, layers: set[str]) -> list[Compute]:
    """Weights are made 16-bit for each forward and their gradients 32-bit again, then added to those there are."""
    grouped: dict[tuple[str, bool, str], list[ParameterSlot]] = {}
    for slot in work.slots:
        if slot.layer in layers and slot.element_bytes > 2 and not slot.copy_bytes:
            grouped.setdefault((slot.layer, slot.cut is None, slot.shared_out), []).append(slot)
    width = work.facts.widths.state
    added = 3 * width * (work.size("num_microbatches") > 1)
    tasks = []
    for (layer, is_whole, shared_out), slots in grouped.items():
        trained = [slot for slot in slots if not slot.frozen]
        phases: tuple[tuple[Phase, list[ParameterSlot], Num], ...] = (
            ("forward", slots, width + 2),
            ("backward", trained, width + 2 + added),
        )
        for phase, those, each in phases:
            common: dict[str, Any] = {"layer": layer, "kind": "memory", "role": "weight_cast", "phase": phase}
            tasks.append(
                Compute(
                    **common,
                    name="cast",
                    origin=Precision.name,
                    shared_out=shared_out,
                    repeat=slots[0].repeat,
                    moved_bytes=sum(slot.elements for slot in those) * each,
                    cut="none" if is_whole else "tensor",
                    kernels=float(len(those)),
                )
            )
    return tasks
