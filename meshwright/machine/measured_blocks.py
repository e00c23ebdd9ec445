"""The decoder blocks that are measured whole, and what they are made of. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.core.device import Device
from meshwright.core.profile import Layer
from meshwright.core.work import ADAM, Compute, Phase, base_work
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.dimensions import DecoderConfig
from meshwright.simulator.op_seconds import compute_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSize:
    config: DecoderConfig
    batch: int
    sequence: int


def _config(hidden: int, heads: int, ffn: int) -> DecoderConfig:
    return DecoderConfig(
        num_layers=1,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=max(1, heads // 4),
        ffn_size=ffn,
        vocab_size=256,
    )


TINY = BlockSize(config=_config(64, 4, 128), batch=1, sequence=16)
"""Nothing but launches."""
_WHOLE = {
    "cuda": BlockSize(config=_config(2048, 32, 8192), batch=4, sequence=4096),
    "cpu": BlockSize(config=_config(512, 8, 1376), batch=1, sequence=512),
}


def whole_block(kind: str) -> BlockSize:
    return _WHOLE[kind]


def num_kernels(size: BlockSize) -> float:
    """Launches of its forward and backward, as forecasts count them."""
    return float(sum(task.kernels for task in block_tasks(size, on_gpu=False)))


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSeconds:
    arithmetic: float
    """Of matmuls and attention."""
    traffic: float
    """Of everything else."""

    @property
    def total(self) -> float:
        return self.arithmetic + self.traffic


def forecast_seconds(size: BlockSize, device: Device) -> BlockSeconds:
    """Forward and backward, by the same rates as any forecast."""
    tasks = block_tasks(size, on_gpu=device.kind == "cuda")
    by_kind = [(task.kind == "memory", float(compute_seconds(task, device))) for task in tasks]
    return BlockSeconds(
        arithmetic=sum(seconds for is_traffic, seconds in by_kind if not is_traffic),
        traffic=sum(seconds for is_traffic, seconds in by_kind if is_traffic),
    )


def block_tasks(size: BlockSize, *, on_gpu: bool) -> list[Compute]:
    whole = decoder_profile(size.config, "block")
    layers: tuple[Layer, ...] = whole.block_layers
    sizes = {"microbatch": size.batch, "sequence": size.sequence}
    work = base_work(replace(whole, layers=layers), sizes, element_bytes=4, optimizer=ADAM)
    if not on_gpu:
        return list(work.computes)
    # Its weights are fp32: made bf16 where they are used, their gradients fp32 again.
    weights = [slot.elements for slot in work.slots]
    passes: tuple[Phase, ...] = ("forward", "backward")
    casts = [
        Compute(
            layer="blocks",
            name="cast",
            kind="memory",
            phase=phase,
            repeat=1,
            moved_bytes=6.0 * sum(weights),
            kernels=float(len(weights)),
        )
        for phase in passes
    ]
    return casts + [
        replace(task, dtype="bf16", moved_bytes=task.moved_bytes / 2) if task.dtype == "compute" else task
        for task in work.computes
    ]
