"""What the frameworks that others measured keep in memory, where it differs from us. One record each.

Constants come from what the frameworks say they keep; the few that nobody tells (marked) were fitted on calibration
rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.published_frameworks import Framework, framework_of
from benchmarks.published_rows import Row
from meshwright.core.profile import Layer
from meshwright.core.work import ParameterSlot, Resident, Work

STATIC = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Of each attention score, where a kernel writes them down; those of a flash kernel never leave the chip."""

    kept_bytes: float = 0.0
    """Its softmax in 16 bits; with dropout also a mask and what is left."""
    passing_bytes: float = 0.0
    """While the layer runs: scaled, masked, in float32, and the gradients of these."""


@dataclass(frozen=True, kw_only=True)
class Keeping:
    parameter_bytes: float = 0.0
    """Of each parameter as it is used; 0: parameters, gradients and optimizer are as ours."""
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0
    """The copy in float32 that is updated included."""
    logits_kept_bytes: float = 0.0
    """Of each logit from forward to backward; 0: the loss is as ours."""
    logits_bytes: float = 0.0
    """Of each logit beside it while the loss runs."""
    split_logits_bytes: float = 0.0
    """The same where ranks share the vocabulary; 0: as many."""
    splits_logits: bool = True
    """Ranks that share the inside of layers share the vocabulary's logits."""
    fused: Scores = Scores(kept_bytes=2.0)
    plain: Scores = Scores(kept_bytes=5.0)
    norm_bytes: float = 0.0
    """Of each number between layers, for what root-mean-square norms in many steps keep beside ours."""
    kernel: str = "flash"
    """Of attention, as a row tells it."""
    has_fused_norm: bool = False
    stream_bytes: float = 0.0
    """Of each number between layers, for what blocks keep beside ours: masks of dropout, copies."""
    inner_bytes: float = 0.0
    """The same of what is divided with a layer's inside."""
    regathers: bool = False
    """Where the sequence is split between layers, the whole input of a region is not kept but gathered again."""
    once_bytes: float = 0.0
    """Workspaces that torch allocates and nobody frees."""

    def change(self, work: Work) -> Work:
        residents = list(work.residents)
        if self.parameter_bytes:
            residents = [*self._static(work), *(item for item in residents if not _is_static(item))]
        if self.logits_kept_bytes:
            residents = [*self._logits(work), *(item for item in residents if item.category != "logits")]
        if self.regathers:
            residents = [_in_parts(work, item) for item in residents]
        for layer in work.profile.block_layers:
            residents += self._beside(work, layer, residents)
        if self.once_bytes:
            common: dict[str, Any] = {"category": "working", "layer": work.profile.layers[0].name}
            residents.append(Resident(**common, repeat=1, bytes=self.once_bytes, life="always"))
        return replace(work, residents=tuple(residents))

    def _static(self, work: Work) -> Iterator[Resident]:
        shards = _sharing(work)
        for slot in work.slots:
            if slot.copy_of:
                continue
            ways = {category: slot.shards if category in shards else 1 for category in STATIC}
            common: dict[str, Any] = {"layer": slot.layer, "repeat": slot.repeat, "life": "always"}
            for category, size in zip(STATIC, self._bytes_of(slot), strict=True):
                stored = slot.stored(ways[category])
                yield Resident(**common, category=category, bytes=stored * size)  # type: ignore[arg-type]

    def _bytes_of(self, slot: ParameterSlot) -> tuple[float, float, float]:
        return self.parameter_bytes, *((0.0, 0.0) if slot.frozen else (self.gradient_bytes, self.optimizer_bytes))

    def _logits(self, work: Work) -> Iterator[Resident]:
        logits = (item for item in work.residents if item.category == "logits" and item.life == "microbatch")
        kept = next(logits, None)
        if kept is None:
            return
        ways = work.size("tp") if not self.splits_logits else 1
        elements = kept.bytes * ways / work.facts.widths.compute
        beside = np.where(work.size("tp") > 1, self.split_logits_bytes or self.logits_bytes, self.logits_bytes)
        # Not as `logits`: unlike ours it is still there when weights' gradients are made.
        yield replace(kept, category="activations", bytes=elements * self.logits_kept_bytes)
        yield replace(kept, bytes=elements * beside, life="forward")
        # Going back the gradient takes as much as what it was made of.
        yield replace(kept, bytes=elements * beside, life="backward")

    def _beside(self, work: Work, layer: Layer, residents: list[Resident]) -> Iterator[Resident]:
        size = self._extra_bytes(work, layer)
        if not np.any(size):
            return
        passing = _scores(work, layer) * self._kernel().passing_bytes
        here = work.repeat_of(layer.name)
        yield Resident(layer=layer.name, category="working", repeat=here, bytes=passing, life="moment")
        kept = [item for item in residents if item.layer == layer.name and item.category == "activations"]
        late, early = (
            _most(i for i in kept if i.life == "microbatch" and (i.turn < 0) == is_early) for is_early in (False, True)
        )
        common: dict[str, Any] = {"layer": layer.name, "category": "activations", "bytes": size}
        yield Resident(**common, repeat=late, life="microbatch")
        if np.any(early):
            yield Resident(**common, repeat=(early > 0) * 1, life="backward", turn=-1)

    def _extra_bytes(self, work: Work, layer: Layer) -> float:
        """Of one block."""
        samples, tokens = work.size("microbatch"), work.size("sequence")
        ways = work.size("tp")
        numbers = samples * tokens * work.profile.hidden_size
        is_one_step = self.has_fused_norm or any(param.name.endswith("norm.bias") for param in layer.params)
        stream = self.stream_bytes + (0.0 if is_one_step else self.norm_bytes)
        beside = stream / work.facts.sequence_ways + self.inner_bytes / ways
        return _scores(work, layer) * self._kernel().kept_bytes + numbers * beside

    def _kernel(self) -> Scores:
        return {"fused_scores": self.fused, "plain_scores": self.plain}.get(self.kernel, Scores())


def _in_parts(work: Work, item: Resident) -> Resident:
    is_whole = item.category == "activations" and item.life == "microbatch" and item.cut == "none" and item.turn == 0
    return replace(item, bytes=item.bytes / work.facts.sequence_ways) if is_whole else item


def _scores(work: Work, layer: Layer) -> Any:
    """Of one block on one rank."""
    heads = sum(op.shape[0] for op in layer.ops if op.kind == "attention")
    tokens = work.size("sequence")
    return work.size("microbatch") * heads / work.size("tp") * tokens * tokens * work.size("sequence_parts")


def _most(items: Iterable[Resident]) -> Any:
    """Instances."""
    found: Any = 0
    for item in items:
        found = np.maximum(found, item.repeat)
    return found


def _is_static(item: Resident) -> bool:
    """Also what our sharding gathers, and casts of weights: these frameworks use parameters as they are kept."""
    return item.category in (*STATIC, "gathered")


def _sharing(work: Work) -> tuple[str, ...]:
    """What is shared out, by what our sharding keeps whole: gradients in stage 1, parameters in stage 2."""
    lives = {item.life for item in work.residents if item.category == "gathered" and item.origin == "shard"}
    if "step" in lives:
        return ("optimizer",)
    return STATIC if "moment" in lives else ("gradients", "optimizer")


OUR_KEEPING = Keeping(logits_kept_bytes=4.0, logits_bytes=6.0, split_logits_bytes=2.0)
"""All as ours but the loss, which is that of plain PyTorch: logits in 16 bits, their copy in float32, and what is kept
of it. Over a split vocabulary the copy is what is kept."""
MEGATRON_CORE = Keeping(parameter_bytes=2.0, logits_kept_bytes=4.0, logits_bytes=2.0, stream_bytes=2.0, regathers=True)
"""18 bytes a parameter, 6 + 12 / n with a distributed optimizer; a loss over the split vocabulary that works in place;
masks of two dropouts. Its own formula of activations (Korthikanti et al. 2022) is ours with these."""
SCALING = Keeping(
    parameter_bytes=2.0,
    gradient_bytes=2.0,
    logits_kept_bytes=6.0,
    logits_bytes=8.0,
    splits_logits=False,
    fused=Scores(kept_bytes=5.0),
    plain=Scores(kept_bytes=6.0, passing_bytes=24.0),
    norm_bytes=16.0,
    inner_bytes=8.0,
)
"""Gradients in bf16; whole logits on every rank, in float32 too; norms, rotations and gates in many steps. Fitted:
bytes of logits, scores, norms and inner copies."""
NANOTRON = Keeping(
    parameter_bytes=2.0,
    gradient_bytes=6.0,
    logits_kept_bytes=8.0,
    logits_bytes=2.0,
    stream_bytes=8.0,
    inner_bytes=12.0,
    regathers=True,
    once_bytes=0.3e9,
)
"""Gradients in bf16 and their sums in float32; norms, rotations and gates in many steps. Fitted: bytes of logits, of
copies between layers and inside, and once."""
LLM_FOUNDRY = Keeping(logits_kept_bytes=2.0, logits_bytes=2.0)
"""FSDP as ours; its fused loss turns bf16 logits into their gradient in place."""
IN_STEPS = replace(OUR_KEEPING, norm_bytes=14.0, inner_bytes=8.0)
"""Blocks written out in plain PyTorch: norms and rotations in float32. Fitted: both."""
_BY_FRAMEWORK: dict[Framework, Keeping] = {
    "llm-foundry": LLM_FOUNDRY,
    "internevo": Keeping(),  # flash-attn's loss, which writes the gradient over the logits as ours does
    "litgpt": IN_STEPS,
    "torchtune": IN_STEPS,
    "megatron-core": MEGATRON_CORE,
    "nemo": MEGATRON_CORE,
    "megatron-lm": MEGATRON_CORE,
    "scaling": SCALING,
    "nanotron": NANOTRON,
}
_LOCAL = re.compile(r"mcore_tp|uninstall_te")
"""Megatron's tests whose names say that they run without Transformer Engine, so with its own attention."""


def keeping_of(row: Row, kernel: str) -> Keeping:
    """`kernel`: of attention, as the row tells it."""
    if row.text("attention_kernel") == "unspecified" and _LOCAL.search(row.text("row_id")):
        kernel = "plain_scores"
    has_fused_norm = "rms kernel" in row.text("attention_kernel").lower()
    return replace(_BY_FRAMEWORK.get(framework_of(row), OUR_KEEPING), kernel=kernel, has_fused_norm=has_fused_norm)
