"""How the frameworks that others measured do what a plan asks for, where it differs from us. One record each, nothing
per row: what a row itself tells (its attention kernel) picks among the kernels below.

Constants were fitted on calibration rows only (benchmarks/published_fit.py), inside physical limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.published_frameworks import Framework, framework_of
from benchmarks.published_memory import OUR_KEEPING, Keeping, keeping_of
from benchmarks.published_rows import Row
from meshwright.core.cluster import Cluster
from meshwright.core.work import Collective, Compute, Work


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A kernel: flash ones by their share of the device's rate, others by what they do to the scores."""

    share: float = 1.0
    passes: float = 0.0
    """Elements read and written for each score between its two matmuls, going forward; 0: scores never leave the
    chip."""
    kernels: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Dialect:
    name: str
    launch_seconds: float = 0.0
    """The host's time for one op; 0: as the cluster's."""
    step_seconds: float = 0.0
    """Of the host in each step: checks, logging, the optimizer's Python."""
    flash: Attention = Attention()
    older_flash: Attention = Attention(share=0.7)
    fused_scores: Attention = Attention(passes=4.5, kernels=2)
    plain_scores: Attention = Attention(passes=14.0, kernels=6)
    attention: Attention = Attention()
    """The one of them that a row tells."""
    matmul: float = 1.0
    """Times as long as ours that matmuls take: other layouts, fused or separate."""
    traffic: float = 1.0
    """Times the memory traffic of our norms, activations and residuals."""
    fused_norm_traffic: float = 1.0
    """The same where a row tells of a fused norm."""
    loss_traffic: float = 1.0
    """Times the memory traffic of a loss in plain PyTorch."""
    hides_gradients: bool = True
    """Sums of gradients run beside backward."""
    hides_gathers: bool = True
    """Gathers of parameters run beside compute."""
    casts_weights: bool = False
    """Weights are kept in 32 bits and made 16-bit for each forward, as ours are."""
    fuses: bool = False
    """Chains of small ops are one kernel, as if compiled."""
    balances_stages: bool = False
    """Stages are cut by their cost, not by counting layers."""
    stage_wait_seconds: float = 0.0
    """Of the host for each collective and rank in it, where there are stages."""
    far_latencies: float = 0.0
    """Of collectives inside layers that leave the node, beside the one that each has."""
    partitions_sends: bool = False
    """Of ranks that share the inside of layers each sends a part of what they all have; the others' parts are gathered
    on arrival (Megatron's scatter and gather, Narayanan et al. 2021; DeepSpeed's partitioned pipeline)."""
    gathers_by_node: float = 0.0
    """Bytes in a second that gathers of parameters reach out of a node, where that is less than its links give."""
    expert_launches: float = 0.0
    """Of the host for each expert of a rank, layer and pass, beside those of our grouped products."""
    narrow_sums: bool = False
    """Gradients are summed over ranks in 16 bits."""
    hidden_tensor: float = 0.0
    """Share of the collectives inside layers that runs beside their matmuls."""
    hides_dispatch: bool = False
    """Tokens travel to experts and back beside the compute of another microbatch."""
    sends_by_node: bool = False
    """A token travels once to each node that has experts of its choice, and on from there by the inner link (DeepEP,
    HybridEP)."""
    dispatch_share: float = 1.0
    """Of the bytes that experts and tokens in 16 bits would take: by `sends_by_node` and the dtype of dispatch."""

    keeping: Keeping = OUR_KEEPING
    """What it has in memory."""

    def cluster(self, cluster: Cluster) -> Cluster:
        if self.launch_seconds:
            cluster = replace(cluster, device=replace(cluster.device, launch_seconds=self.launch_seconds))
        each = self.gathers_by_node / cluster.devices_per_node
        if not each or each >= cluster.outer.bytes_per_second:
            return cluster
        return replace(cluster, outer=replace(cluster.outer, bytes_per_second=each, fractions={}, by_nodes=()))

    def change(self, work: Work) -> Work:
        """What one step asks of a rank, as this framework would have it."""
        has_stages = work.size("num_stages") > 1
        work = self.keeping.change(work)
        return replace(work, tasks=tuple(new for task in work.tasks for new in self._as_done(task, work, has_stages)))

    def _as_done(self, task: Any, work: Work, has_stages: bool) -> Iterator[Any]:
        if isinstance(task, Collective):
            if task.kind == "send" and self.partitions_sends:
                yield from self._parted(task, work)
                return
            yield from self._talk(task)
            if self.far_latencies and task.origin == "tensor" and not task.per_step:
                yield replace(task, bytes=0.0, repeat=task.repeat * self.far_latencies)
            if has_stages and self.stage_wait_seconds and not task.per_step and task.kind != "send":
                yield self._wait(task, work.size(task.axis))
        elif task.name.startswith("cast") and not self.casts_weights:
            return
        elif task.kind == "attention":
            yield from self._attention(task, work.size("microbatch") * task.shape[0], work.size("sequence"))
        elif task.kind == "matmul":
            yield replace(task, flops=task.flops * self.matmul)
            if task.role == "experts" and self.expert_launches:
                kernels = self.expert_launches * task.kernels * task.matrices
                yield Compute(
                    layer=task.layer,
                    name="launches",
                    kind="memory",
                    phase=task.phase,
                    repeat=task.repeat,
                    kernels=kernels,
                )
        elif task.kind == "loss" and task.phase == "forward":
            yield from self._loss(task, work)
        elif task.phase != "step" and task.kind == "memory":
            yield replace(task, moved_bytes=task.moved_bytes * self.traffic)
        else:
            yield task

    def _talk(self, task: Collective) -> Iterator[Collective]:
        if task.kind == "all_to_all":
            yield replace(task, bytes=task.bytes * self.dispatch_share, hidden=task.hidden or self.hides_dispatch)
            return
        if task.origin == "tensor" and not task.per_step and self.hidden_tensor:
            for share, hidden in ((self.hidden_tensor, True), (1 - self.hidden_tensor, task.hidden)):
                yield replace(task, repeat=task.repeat * share, hidden=hidden)
            return
        is_sum = task.kind in ("all_reduce", "reduce_scatter") and (task.per_step or task.origin == "shard")
        stays = self.hides_gathers if task.kind == "all_gather" else self.hides_gradients
        narrow = 0.5 if is_sum and self.narrow_sums else 1.0
        yield replace(task, bytes=task.bytes * narrow, hidden=task.hidden and stays)

    def _parted(self, task: Collective, work: Work) -> Iterator[Collective]:
        ways = work.size("tp") / work.facts.sequence_ways  # where the sequence is split each has its own part
        yield replace(task, bytes=task.bytes / ways)
        if ways > 1:
            yield replace(task, kind="all_gather", axis="tp")

    def _loss(self, task: Compute, work: Work) -> Iterator[Compute]:
        """In plain PyTorch: of a copy of the logits in float32, three passes forward and five back."""
        width = work.facts.widths.compute
        logits = task.moved_bytes / (2 * width)  # ours reads them, and writes their gradient in their place
        for phase, passes, kernels in (("forward", 3, 4.0), ("backward", 5, 5.0)):
            moved = logits * (4 * passes + width) * self.loss_traffic
            yield replace(task, phase=phase, moved_bytes=moved, kernels=kernels)

    def _wait(self, task: Collective, size: Any) -> Compute:
        """Nothing but the host's time."""
        kernels = self.stage_wait_seconds * size / self.launch_seconds
        layer, phase = task.layer, task.phase
        return Compute(layer=layer, name="wait", kind="memory", phase=phase, repeat=task.repeat, kernels=kernels)

    def _attention(self, task: Compute, count: Any, tokens: Any) -> Iterator[Compute]:
        """`count` heads, each over all pairs of `tokens`."""
        kernel = self.attention
        if not kernel.passes:
            yield replace(task, flops=task.flops / kernel.share)
            return
        head_size = task.shape[1]
        forward = task.is_forward
        products = 2.0 if forward else 4.0
        flops = 2 * products * count * tokens * tokens * head_size  # all scores: a flash kernel may leave half out
        scores = count * tokens * tokens * (4 if task.dtype == "fp32" else 2)
        yield replace(
            task,
            kind="matmul",
            flops=flops,
            moved_bytes=task.moved_bytes + 2 * scores,
            shape=(tokens, head_size),
            matrices=count,
            kernels=products,
        )
        passes = kernel.passes * (1.0 if forward else 1.5)
        yield replace(task, kind="memory", flops=0.0, moved_bytes=passes * scores, kernels=kernel.kernels)


OURS = Dialect(name="ours", casts_weights=True)
MEGATRON_DEEPSPEED = Dialect(
    name="megatron-deepspeed",
    launch_seconds=4.37e-5,
    step_seconds=0.0106,
    traffic=1.15,
    loss_traffic=1.92,
    fused_scores=Attention(passes=4.37, kernels=2),
    hides_gradients=False,
    partitions_sends=True,
)
SCALING = Dialect(
    name="scaling",
    launch_seconds=6.1e-5,
    step_seconds=0.047,
    traffic=2.81,
    fused_norm_traffic=0.9,
    loss_traffic=5.0,
    older_flash=Attention(share=0.52),
    fused_scores=Attention(passes=6.8, kernels=2),
    plain_scores=Attention(passes=15.0, kernels=6),
    hides_gradients=False,
)
LLM_FOUNDRY = Dialect(
    name="llm-foundry",
    launch_seconds=1.6e-5,
    step_seconds=0.011,
    traffic=1.19,
    loss_traffic=0.84,
    flash=Attention(share=0.78),
)
NANOTRON = Dialect(
    name="nanotron",
    launch_seconds=4.0e-5,
    step_seconds=5e-4,
    traffic=1.25,
    loss_traffic=0.55,
    hides_gathers=False,
    balances_stages=True,
    stage_wait_seconds=0.28e-3,
    far_latencies=1.5,
    hidden_tensor=0.25,
)
"""Its ZeRO-1 gathers parameters after the update, before anything else runs; the benchmark's tensor parallelism has
`tp_linear_async_communication`, which hides some of its collectives (scripts/scaling_benchmarks.py). Beyond a node
those take 2.5 times the steps that sums of gradients do (microbatches of 1 to 16 on 16 ranks)."""
MEGATRON = Dialect(name="megatron", launch_seconds=1.2e-5, fuses=True, partitions_sends=True, expert_launches=5.0)
"""Megatron-Core with Transformer Engine, and what is built like it. Fitted: launches for experts (Qwen3 30B with
microbatches of 1 and of 4)."""
DEEPSPEED = Dialect(name="deepspeed", launch_seconds=2.0e-5, gathers_by_node=17e9)
"""ZeRO-3 of 2021: a collective for each parameter, at what one card of a node gives. Fitted: six rows of 48 to 280
nodes (Narayanan et al. 2021, table 2), which gather at 14 to 18 GB/s whatever their number."""
FAIRSCALE = Dialect(name="fairscale", narrow_sums=True)
"""FSDP before it was torch's: gradients are summed in the dtype of compute unless `fp32_reduce_scatter` is set."""
HAI_LLM = Dialect(name="hai-llm", launch_seconds=1.2e-5, fuses=True, hides_dispatch=True, sends_by_node=True)
"""DeepSeek's: tokens are sent in fp8 and come back in bf16, behind the compute of another microbatch, to at most four
nodes (DeepSeek-AI 2024, sections 3.2 and 3.3)."""
_DIALECTS: dict[Framework, Dialect] = {
    "fairscale": FAIRSCALE,
    "hai-llm": HAI_LLM,
    "megatron-deepspeed": MEGATRON_DEEPSPEED,
    "deepspeed": DEEPSPEED,
    "scaling": SCALING,
    "llm-foundry": LLM_FOUNDRY,
    "nanotron": NANOTRON,
    "megatron-core": MEGATRON,
    "nemo": MEGATRON,
    "megatron-lm": MEGATRON,
    "internevo": MEGATRON,
    "jax": MEGATRON,
}
"""Others are taken to be like us: torch's own FSDP, eager."""
_KERNELS = (
    (r"unfused|local|torch|eager", "plain_scores"),
    (r"fused|no flash", "fused_scores"),
    (r"flash.*v1", "older_flash"),
)
_NEWEST, _HOPPER = re.compile(r"cudnn|flash.*3"), re.compile(r"[HB][123]00|H20\b|H800", re.IGNORECASE)
_WITH_NEWEST: tuple[Framework, ...] = ("megatron-core", "jax")
"""Transformer Engine's and XLA's attention is cuDNN's; NeMo's tables are from before that."""
_WITHOUT_FLASH: tuple[Framework, ...] = ("nvidia-examples",)
"""Written before there were such kernels."""
FLASH2_ON_HOPPER = 0.52
"""Of cuDNN's rate, which presets of Hopper and later cards have, what FlashAttention-2 reaches there: 335 to 380 of 640
TFLOP/s forward and about 300 of 550 backward (Shah et al. 2024, FlashAttention-3; from memory). Agrees with NeMo's
long sequences."""


def dialect_of(row: Row) -> Dialect:
    return as_told(_DIALECTS.get(framework_of(row), OURS), row)


def as_told(dialect: Dialect, row: Row) -> Dialect:
    """With the kernels that a row tells of, on the cards that it ran on."""
    told = row.text("attention_kernel").lower()
    usual = "plain_scores" if framework_of(row) in _WITHOUT_FLASH else "flash"
    kernel = next((kernel for pattern, kernel in _KERNELS if re.search(pattern, told)), usual)
    attention = getattr(dialect, kernel)
    is_newest = _NEWEST.search(told) or (not told and framework_of(row) in _WITH_NEWEST)
    if not attention.passes and _HOPPER.search(row.text("hardware")) and not is_newest:
        attention = replace(attention, share=attention.share * FLASH2_ON_HOPPER)
    found = replace(
        dialect,
        attention=attention,
        keeping=keeping_of(row, kernel),
        narrow_sums=dialect.narrow_sums or _sums_in_16_bits(row),
        hides_dispatch=dialect.hides_dispatch or _overlaps_dispatch(row),
        sends_by_node=dialect.sends_by_node or _sends_by_node(row),
        far_latencies=dialect.far_latencies if row.whole("tp", 1) > row.whole("gpus_per_node", 8) else 0.0,
    )
    found = replace(found, dispatch_share=_dispatch_share(found, row))
    return replace(found, traffic=found.fused_norm_traffic) if "rms kernel" in told else found


_MEGATRONS: tuple[Framework, ...] = ("megatron-deepspeed", "megatron-lm", "deepspeed")
_RECIPES = re.compile(r"megatron.?bridge|nemo", re.IGNORECASE)


def _sums_in_16_bits(row: Row) -> bool:
    """Megatron sums gradients of fp16 in fp16 and of bf16 in fp32 unless told otherwise; NVIDIA's recipes for speed set
    `grad_reduce_in_fp32` to false; Composer's mixed precision "pure" sums in the dtype of compute."""
    framework, precision = framework_of(row), row.text("precision").lower()
    if framework in _MEGATRONS:
        return "fp16" in precision and "bf16" not in precision
    if framework == "llm-foundry":
        return "MP mode PURE" in row.text("notes")
    return framework in ("nemo", "megatron-core") and _is_recipe(row)


def _is_recipe(row: Row) -> bool:
    return _RECIPES.search(f"{row.text('provenance')} {row.text('url')}") is not None


def _overlaps_dispatch(row: Row) -> bool:
    """`moe_a2a_overlap` in Megatron-Bridge's scripts/performance: Qwen3 on H100, its larger model on B300 too."""
    model, cards = row.text("model").lower(), r"H100|\bB300|DGX-B300" if "235b" in row.text("model").lower() else "H100"
    return "qwen" in model and re.search(cards, row.text("hardware")) is not None and _is_recipe(row)


def _sends_by_node(row: Row) -> bool:
    """`moe_flex_dispatcher_backend` there: HybridEP for DeepSeek; Qwen3 has it inside NVLink's domain only."""
    return "deepseek" in row.text("model").lower() and _is_recipe(row)


MOST_NODES = {"hai-llm": 4}
"""That the router lets a token choose experts of."""
FP8_DISPATCH = 0.75
"""Of two trips in 16 bits, where one is in 8."""


def _dispatch_share(dialect: Dialect, row: Row) -> float:
    """Nodes that a token is sent to over experts that it is sent to, of other nodes, at random; times its dtype. Of
    Megatron-Core's tensor ranks, between which experts are whole, each sends its part of the sequence."""
    ways, chosen, per_node = row.whole("ep", 1), row.whole("topk", 1), row.whole("gpus_per_node", 8)
    dtype = FP8_DISPATCH if dialect.name == "hai-llm" else 1.0
    dtype /= row.whole("tp", 1) if framework_of(row) in ("megatron-core", "nemo") else 1
    nodes = -(-ways // per_node)
    if not dialect.sends_by_node or nodes < 2 or "NVL72" in row.text("interconnect"):
        return dtype
    reached = min(nodes * (1 - (1 - 1 / nodes) ** chosen), MOST_NODES.get(dialect.name, nodes))
    return dtype * reached / chosen
