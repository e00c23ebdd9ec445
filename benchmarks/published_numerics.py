"""In which numbers a published run computes and keeps its state, where the package's `precision` has no word for it.

Composes with a dialect's change: first the numbers, then the framework.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.published_frameworks import framework_of
from benchmarks.published_rows import Row, Unscored
from meshwright.core.cluster import Device
from meshwright.core.work import Compute, Resident, Work

NF4_BITS, NF4_TWICE_BITS = 4.5, 4.127
"""Of a weight: four, and a scale of 32 bits for 64 of them, itself in 8 bits if quantised twice (QLoRA)."""
WIDE_BYTES = 2
_ELEMENT_BYTES = {"fp8": 1.0, "fp4": 0.5}
_ALL_16_BIT = "torchtune"
"""Its bf16 is that of parameters and optimizer too."""
_TF32 = "nvidia-examples"
"""NVIDIA's containers multiply fp32 in TF32 unless told otherwise."""
_ONE_INPUT = re.compile(r"(query|key|value|up|gate)$")
_WORDS = (
    # First match wins: where two are named the first, faster one was measured.
    ("fp4", r"nv-?fp4|mx-?fp4|\bfp4"),
    ("fp8", r"fp8|float8"),
    ("bf16", r"bf16|bfloat16|fp16|float16|\bhalf\b|amp|mixed|16-"),
    ("tf32", r"tf32"),
    ("fp32", r"fp32|float32|\b32\b|32-true"),
)


@dataclass(frozen=True, kw_only=True)
class Numerics:
    is_16_bit: bool = True
    """Activations and matmuls; else all in fp32."""
    matmul: Literal["", "tf32", "fp8", "fp4"] = ""
    """What blocks multiply in, if in something else."""
    keeps_16_bit: bool = False
    """Parameters, gradients and optimizer too."""
    weight_bits: float = 0.0
    """Of blocks' frozen weights; 0: as all others."""
    state_share: float = 1.0
    """Of the optimizer's state that is kept (8-bit states)."""
    updates_early: bool = False
    """A gradient is used and let go as soon as it is there."""
    offloads: bool = False
    """What recomputation keeps waits in the host's memory."""

    def change(self, work: Work) -> Work:
        if self.matmul:
            work = replace(work, tasks=tuple(self._multiplied(work)))
        if self.keeps_16_bit:
            work = _all_16_bit(work)
        if self.weight_bits:
            work = self._quantised(work)
        return replace(work, residents=tuple(self._resident(item) for item in work.residents if self._is_here(item)))

    def _is_here(self, item: Resident) -> bool:
        return not (self.offloads and item.category == "activations" and item.origin == "recompute")

    def _resident(self, item: Resident) -> Resident:
        if item.category == "optimizer":
            return replace(item, bytes=item.bytes * self.state_share)
        return replace(item, life="moment") if item.category == "gradients" and self.updates_early else item

    def _multiplied(self, work: Work) -> Iterator[Any]:
        blocks = {layer.name for layer in work.profile.block_layers}
        done: set[tuple[str, ...]] = set()
        for task in work.tasks:
            if not isinstance(task, Compute) or task.kind != "matmul":
                yield task
                continue
            if self.matmul == "tf32":
                yield replace(task, dtype="tf32") if task.dtype in ("compute", "fp32") else task
                continue
            if task.layer not in blocks or task.dtype != "bf16":
                yield task
                continue
            n, k = task.shape
            going_back = task.phase in ("backward", "weight")
            # Matmuls of one input share its cast; going back each has a gradient of its own.
            read = (task.layer, task.phase, task.name if going_back else _ONE_INPUT.sub("input", task.name))
            if task.phase != "weight" and read not in done:
                cast = task.flops / (2.0 * (k if going_back else n) * task.kernels)
                yield _cast(task, cast * (WIDE_BYTES + 2 * _ELEMENT_BYTES[self.matmul]))
            done.add(read)
            yield replace(task, dtype=self.matmul)

    def _quantised(self, work: Work) -> Work:
        """Frozen matrices of blocks are packed, and unpacked for each use."""
        packed = [slot for slot in work.slots if slot.is_block and slot.frozen and len(slot.shape) > 1]
        phases = {task.phase for task in work.computes if task.phase in ("forward", "recompute", "backward")}
        unpacking = [
            Compute(
                layer=slot.layer,
                name=f"{slot.name}.unpack",
                kind="memory",
                phase=phase,
                repeat=slot.repeat,
                moved_bytes=slot.elements * (self.weight_bits / 8 + WIDE_BYTES),
            )
            for slot in packed
            for phase in sorted(phases)
        ]
        largest = max((float(slot.elements) for slot in packed), default=0.0)
        wide = [
            Resident(
                layer=slot.layer, category="working", repeat=slot.repeat, bytes=largest * WIDE_BYTES, life="moment"
            )
            for slot in packed[:1]
        ]
        layers = {slot.layer for slot in packed}
        kept = [
            Resident(
                layer=slot.layer,
                category="parameters",
                repeat=slot.repeat,
                bytes=slot.stored(slot.shards) * (self.weight_bits / 8 if slot in packed else WIDE_BYTES),
                life="always",
            )
            for slot in work.slots
            if slot.layer in layers and not slot.copy_of
        ]
        wide = [
            Resident(layer=layer, category="working", repeat=1, bytes=largest * WIDE_BYTES, life="moment")
            for layer in sorted(layers)
        ]
        others = (item for item in work.residents if item.category != "parameters" or item.layer not in layers)
        return replace(work, residents=(*others, *kept, *wide)).with_tasks(*unpacking)


SIXTEEN_BIT = Numerics()


def _cast(task: Compute, moved_bytes: Any) -> Compute:
    return replace(
        task,
        name=f"{task.name}.cast",
        kind="memory",
        flops=0.0,
        moved_bytes=moved_bytes,
        shape=(),
        matrices=1,
        kernels=1.0,
    )


def _all_16_bit(work: Work) -> Work:
    """Parameters and their gradients are used as they are kept, in half the bytes."""

    def task(item: Any) -> Any:
        if isinstance(item, Compute):
            return replace(item, moved_bytes=item.moved_bytes / 2) if item.per_step else item
        is_gradient = item.kind in ("all_reduce", "reduce_scatter") and (item.per_step or item.origin == "shard")
        return replace(item, bytes=item.bytes / 2) if is_gradient else item

    def share(item: Resident) -> Any:
        """Frozen parameters are kept in 16 bits by us too."""
        slots = [slot for slot in work.slots if slot.layer == item.layer and not slot.copy_of]
        if item.category != "parameters" or not any(slot.frozen for slot in slots):
            return 0.5
        elements = sum(slot.stored(slot.shards) for slot in slots)
        return 2 * elements / sum(slot.stored(slot.shards) * slot.element_bytes for slot in slots)

    halved = ("parameters", "gradients", "optimizer")
    residents = tuple(
        replace(item, bytes=item.bytes * share(item)) if item.category in halved else item
        for item in work.residents
        if not (item.category == "gathered" and item.origin == "precision")
    )
    return replace(work, residents=residents).map_tasks(task)


def numerics_of(row: Row, device: Device) -> Numerics:
    text = row.text("precision").lower()
    task = row.text("task").lower()
    bits = _weight_bits(f"{text} {task}")
    word = next((word for word, pattern in _WORDS if re.search(pattern, re.sub(r"nf4|bnb\S*", "", text))), None)
    if word is None and bits:
        word = "bf16"  # what quantised weights are unpacked to
    if word is None:
        raise Unscored(f"precision is {text or 'not told'}")
    if word == "fp32" and "tf32" in device.flops_per_second and framework_of(row) == _TF32:
        word = "tf32"
    if word in ("tf32", "fp8", "fp4") and word not in device.flops_per_second:
        raise Unscored(f"{word} on a device that has no rate for it")
    keeps = "true" in text or bool(bits) or framework_of(row) == _ALL_16_BIT
    return Numerics(
        is_16_bit=word in ("bf16", "fp8", "fp4"),
        matmul=word if word in ("tf32", "fp8", "fp4") else "",  # type: ignore[arg-type]
        keeps_16_bit=keeps and word == "bf16",
        weight_bits=bits,
        state_share=_state_share(row.text("optimizer").lower(), keeps),
        updates_early=row.is_on("early_update"),
        offloads=row.is_on("activation_offload"),
    )


def _state_share(optimizer: str, keeps_16_bit: bool) -> float:
    """Of two numbers for each parameter, as wide as it is kept."""
    if re.search(r"8.?bit", optimizer):
        return 0.5 if keeps_16_bit else 0.25
    return 0.5 if re.search(r"sgd|momentum|lion", optimizer) and "adam" not in optimizer else 1.0


def _weight_bits(text: str) -> float:
    if re.search(r"int8|8.?bit|int4|gptq|awq", text):
        raise Unscored("quantised weights (other than nf4)")
    if not re.search(r"nf4|qlora|4.?bit", text):
        return 0.0
    # torchtune's and most recipes quantise the scales as well; bitsandbytes alone does not unless it says so.
    return NF4_BITS if re.search(r"nf4(?!-dq)", text) and "dq" not in text else NF4_TWICE_BITS
