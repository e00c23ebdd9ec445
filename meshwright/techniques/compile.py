"""Compile blocks, or the whole model before its loss, with torch.compile.

What: every block's forward becomes one compiled graph; chains of pointwise ops become one kernel each. With `scope` =
model the embedding, all blocks and the final norm are one graph; the head and its loss stay outside. Of image models
all layers are one graph. With `graphs` the
kernels of compiled graphs are replayed as CUDA graphs: the host launches one graph in place of hundreds of kernels.
Inputs (masks of packed documents too) are copied into the graph's memory and, before another microbatch replays it,
gradients out of it.
With `keep` = products backward has only what matmuls and attention have made; norms, activations and 16-bit copies of
weights are computed again (torch's partitioner, without its rules against that).
When it helps: on GPUs, where it removes launches and memory passes (torchtitan reports +16 % on Llama 8B). One graph:
small models (gpt2-124m, 32 x 1024 on an H200: blocks 62.1 ms, one graph 61.1, with CUDA graphs 60.8). CUDA graphs: a
device that waits for its host. Search tries both on one GPU, for decoders of less than half a billion parameters.
Products alone: where activations are the peak (llama-1b, 4 x 4096 on an H200: 43.8 GiB and 249 ms, 35.0 and 253; with
recomputed blocks 24.5 and 289).
When it does not: short runs (tens of seconds to compile), or CPUs (0 to 7 % here). One graph: large models (llama-1b, 4
x 4096: 274 ms against 269 by blocks, 37 s to compile against 5), and several ranks: all gradients are made at the end
of its backward, so their sums hide behind nothing.
Cost: a chain reads what enters and writes what leaves it, in one kernel; what its profile says of each op. Activations
that only pointwise gradients read are computed again (torch's min-cut partitioner). Temporaries are not counted less.
One graph: a norm at the border of two blocks is part of the kernel of the sum before it: one read of the stream and one
kernel less. CUDA graphs: no launches but one for each graph; the memory of a graph stays reserved through the step, and
with several microbatches every gradient is copied once a step.
Exactness: reordered: the order of operations inside a fused kernel changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Op, Poly, Profile
from meshwright.core.technique import Choice, Option, Technique, technique_named, technique_names
from meshwright.core.work import Circumstances, Compute, Num, Phase, Resident, Work, replace

if TYPE_CHECKING:
    from meshwright.ops.model_interface import Model

LARGEST_OFFERED = 500_000_000
"""Parameters up to which search tries one graph and CUDA graphs: each doubles the ways to set the technique, and of
larger models blocks keep the device busy (llama-1b is 2 % slower as one graph)."""

FIRST_LAYERS = ("embed", "stem")
"""Of models that can be one graph."""


@dataclass(frozen=True, kw_only=True)
class Compile(Technique):
    name: ClassVar[str] = "compile"
    phase: ClassVar[str] = "compile"
    draws_alike: ClassVar[bool] = False
    later_settings: ClassVar[tuple[str, ...]] = ("scope", "graphs", "keep")

    backend: Literal["inductor", "aot_eager"] = "inductor"
    scope: Literal["block", "model"] = "block"
    """What becomes one graph: each block, or all layers before the loss."""
    graphs: bool = False
    """Compiled kernels are replayed as CUDA graphs; on a CPU, where plans are compared, they run as without."""
    keep: Literal["fastest", "products"] = "fastest"
    """What compiled graphs keep for backward: whatever makes it fastest, or only what matmuls and attention made."""

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        if cluster.device.kind != "cuda":
            return ()
        result = (Choice("backend", ("inductor",)), Choice("keep", ("fastest", "products")))
        # CUDA graphs were never run on more than one GPU, and one graph gains less than its late sums cost there.
        is_offered = cluster.num_devices == 1 and profile.num_params < LARGEST_OFFERED
        if not is_offered or cls(scope="model", graphs=True)._problems_with(profile):
            return result
        return (*result, Choice("scope", ("block", "model")), Choice("graphs", (False, True)))

    @property
    def joins_gradients(self) -> bool:
        """One backward makes them all, or the memory of the graphs holds them all."""
        return self.scope == "model" or self.graphs

    def refusals(self, given: Circumstances) -> Iterator[tuple[Num, Problem]]:
        what = "a compiled backward is one piece, and this schedule takes its halves apart."
        yield given.splits_backward, self.problem(what, "Use another schedule, or leave it out.")
        what = "slots decides while backward runs which blocks run again; a compiled block cannot."
        yield given.replays_blocks, self.problem(what, "Use recompute.slots = 0, or leave it out.")

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        problems = [*self.refused(plan, profile), *self._problems_with(profile)]
        for other in plan.techniques:
            if other.axis and self.graphs:
                what = f"graphs is on, and with {other.name} ranks exchange data, which no CUDA graph here holds."
                problems.append(self.problem(what, f"Use graphs = false, or leave out {other.name}."))
            elif other.axis and self.scope == "model" and "samples" in profile.uncut:
                what = f"scope is model, and with {other.name} ranks exchange the statistics of batch norms inside it."
                problems.append(self.problem(what, f'Use scope = "block", or leave out {other.name}.'))
            elif self._must_be_apart(type(other)):
                what = f"scope is model, and with {other.name} something is done between layers or with parts of them."
                problems.append(self.problem(what, f'Use scope = "block", or leave out {other.name}.'))
        if self.graphs and cluster is not None and cluster.device.kind != "cuda":
            what = f"graphs is on, and the devices of {cluster.name} have no CUDA graphs."
            problems.append(self.problem(what, "Use graphs = false."))
        return tuple(problems)

    def _problems_with(self, profile: Profile) -> list[Problem]:
        """What is wrong with these settings for a model, in any plan."""
        problems = []
        if self.graphs and self.backend != "inductor":
            what = f"graphs is on, and the backend {self.backend} makes no kernels of its own."
            problems.append(self.problem(what, 'Use backend = "inductor", or graphs = false.'))
        if self.keep == "products" and self.backend != "inductor":
            what = f"keep is products, and the backend {self.backend} decides by itself what is kept."
            problems.append(self.problem(what, 'Use backend = "inductor", or keep = "fastest".'))
        if self.scope == "model" and profile.layers[0].name not in FIRST_LAYERS:
            what = f"scope is model, and {profile.name} is neither our decoder nor an image model of ours: of such "
            what += "models only blocks are compiled."
            problems.append(self.problem(what, 'Use scope = "block".'))
        if self.scope == "model" and profile.group_borders:
            what = f"scope is model, and {profile.name} has heads with losses of their own between its blocks."
            problems.append(self.problem(what, 'Use scope = "block", or a model with local_heads = 0.'))
        has_experts = any(op.role == "experts" for layer in profile.layers for op in layer.ops)
        if has_experts and self.joins_gradients:
            what = f"{profile.name} has experts, whose rows are counted while they run: a block is several graphs."
            problems.append(self.problem(what, 'Use scope = "block" and graphs = false.'))
        return problems

    def _must_be_apart(self, kind: type[Technique]) -> bool:
        """Whether layers cannot be compiled so where there are several ranks along the technique's axis. For one graph
        ranks must have whole layers and only sum gradients, once these are made."""
        only_sums = kind.splits_samples and not kind.sums_late and not kind.makes_whole_gradients
        return bool(kind.axis) and (self.graphs or (self.scope == "model" and not only_sums))

    def price(self, work: Work) -> Work:
        work = self.forbid(work)
        if self.joins_gradients:
            work = work.with_facts(joins_gradients=True)
            for kind in filter(self._must_be_apart, map(technique_named, technique_names())):
                work = work.forbid(work.size(kind.axis) > 1)
        if self.backend != "inductor":
            return work
        remade = 1.0 if self.keep == "products" else work.facts.remade_inputs
        traffic, launches, kept = _left(work, is_whole=self.scope == "model", remade=remade)
        blocks = {layer.name for layer in work.profile.block_layers}

        def fuse(task: Any) -> Any:
            if not isinstance(task, Compute):
                return task
            place = task.layer, task.name, task.phase in ("backward", "weight")
            moved, kernels = task.moved_bytes * traffic.get(place, 1.0), task.kernels * launches.get(place, 1.0)
            if all(isinstance(each, float) and each == 0.0 for each in (task.flops, task.moved_bytes)):
                return replace(task, kernels=0.0)  # of the host alone: compiled away
            return replace(task, moved_bytes=moved, kernels=kernels) if place in traffic else task

        def keep(item: Resident) -> Resident:
            if item.category == "gathered" and item.life == "microbatch" and item.layer in blocks:
                return replace(item, bytes=item.bytes * (1.0 - remade))  # copies of weights
            if item.category != "activations" or item.life != "microbatch" or item.origin:
                return item
            return replace(item, bytes=item.bytes * kept.get((item.layer, item.cut, item.dtype == "float32"), 1.0))

        work = work.map_tasks(fuse).map_residents(keep)
        if self.keep == "products":
            work = work.with_tasks(*_again(work, blocks))
        return self.replayed(work) if self.graphs else work

    def replayed(self, work: Work) -> Work:
        """Kernels of the graphs as the device runs them, without the host; one launch for each graph."""
        *before, last = work.profile.layers
        blocks = [layer.name for layer in work.profile.block_layers]
        inside = set(blocks) if self.scope == "block" else {layer.name for layer in before}
        norms = {(last.name, op.name) for op in last.ops if op.role == "norm" and self.scope == "model"}

        def task(item: Any) -> Any:
            is_inside = isinstance(item, Compute) and (item.layer in inside or (item.layer, item.name) in norms)
            return replace(item, is_replayed=True) if is_inside else item

        def resident(item: Resident) -> Resident:
            # The pool of a graph is never given back: what a microbatch keeps is reserved beside head and update too.
            is_pooled = item.layer in inside and item.life == "microbatch" and item.tier == "device"
            return replace(item, life="always") if is_pooled else item

        own: dict[str, Any] = {"kind": "memory", "origin": self.name}
        tasks, pooled, phases = [], [], tuple[Phase, ...](("forward", "backward"))
        for layer in blocks if self.scope == "block" else blocks[:1]:
            count = work.repeat_of(layer) if self.scope == "block" else 1
            tasks += [Compute(**own, layer=layer, name="graph", phase=phase, repeat=count) for phase in phases]
        is_copied = (work.size("num_microbatches") > 1) * 1.0  # `copy_gradients`
        for slot in work.slots:
            if not (slot.frozen or slot.copy_of):
                size = slot.elements * slot.element_bytes * is_copied
                copy: dict[str, Any] = {"name": f"{slot.name}.copy", "moved_bytes": 2.0 * size, "kernels": is_copied}
                tasks.append(Compute(**own, **copy, layer=slot.layer, repeat=slot.repeat, phase="step"))
                left: dict[str, Any] = {"category": "buffers", "life": "step", "origin": self.name}
                if slot.layer in inside:
                    pooled.append(Resident(**left, layer=slot.layer, repeat=slot.repeat, bytes=size))
        return work.map_tasks(task).map_residents(resident).with_tasks(*tasks).with_residents(*pooled)

    def apply(self, build: Build) -> None:
        build.at("compile", self._compile)

    def _compile(self, build: Build) -> None:
        import torch

        def compiled(forward: Any) -> Any:
            run = torch.compile(forward, backend=self.backend, mode=mode)
            return run if self.keep == "fastest" else keeps_products(run)

        replays = self.graphs and build.mesh.device.type == "cuda"  # comparisons run any plan on CPUs
        mode = "reduce-overhead" if replays else None
        if replays:
            # A replay overwrites what the one before it made. By the next forward the head has read the stream and
            # backward has run; gradients of this step are still to be used.
            def begin(*_: Any) -> None:
                if torch.is_grad_enabled():
                    copy_gradients(build.model)
                torch.compiler.cudagraph_mark_step_begin()

            build.model.register_forward_pre_hook(begin)
        if self.scope == "model":
            build.model.compile_trunk(compiled)
            return
        blocks = build.model.block_modules()
        # Blocks of one class share their code, and each of another shape is compiled anew.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(blocks))
        for block in blocks:
            block.forward = compiled(block.forward)


def keeps_products(run: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function whose graphs are cut for the least memory, whenever they are made."""
    import torch._functorch.config as config

    rules = ("used_far_apart", "long_fusible_chains", "materialized_backward")
    settings = {f"ban_recompute_{rule}": False for rule in rules}

    def call(*given: Any, **named: Any) -> Any:
        with config.patch(settings):
            return run(*given, **named)

    return call


def copy_gradients(model: Model) -> None:
    """Take gradients out of the memory of CUDA graphs, once a step. Autograd makes what a graph has written a
    parameter's gradient without a copy, and the next replay writes there again (pytorch/pytorch#169545, #96693)."""
    for parameter in model.parameters():
        if parameter.grad is not None and not hasattr(parameter.grad, "is_copy"):
            parameter.grad = parameter.grad.clone()
            parameter.grad.is_copy = True


Counts = tuple[Num, Num, Num]
Shares = dict[tuple[str, str, bool], Num]


def _again(work: Work, blocks: set[str]) -> list[Compute]:
    """What backward computes once more where only products are kept: inputs of linear layers, copies of weights."""
    counts = work.size("microbatch"), work.size("sequence"), work.size("sequence_parts")
    common: dict[str, Any] = {"phase": "backward", "kind": "memory", "origin": Compile.name}
    share = 1.0 - work.facts.remade_inputs  # of blocks that do not so already
    tasks = [
        replace(task, phase="backward", origin=Compile.name, moved_bytes=task.moved_bytes * share)
        for task in work.computes
        if task.role == "weight_cast" and task.layer in blocks and task.phase == "forward"
    ]
    for layer in work.profile.block_layers:
        repeat = work.repeat_of(layer.name) - work.facts.replays.get(layer.name, 0)
        for op, after in itertools.pairwise(layer.ops):
            size = _read_by_product(op, after, counts, op.saved(*counts)) * share * work.facts.widths.compute
            # Read and written; an activation's backward reads what it is made of anyway.
            is_joined = op.role == "activation"
            given: dict[str, Any] = {"moved_bytes": size if is_joined else 2.0 * size, "kernels": float(not is_joined)}
            if not (isinstance(size, float) and size == 0.0):
                tasks.append(
                    Compute(**common, **given, layer=layer.name, name=f"{op.name}.again", cut=op.cut, repeat=repeat)
                )
    return tasks


def _read_by_product(op: Op, after: Op | None, counts: Counts, kept: Num) -> Num:
    """Elements that an op keeps only as the input of a linear layer, and that backward can recompute."""
    if op.role == "layout":
        return kept
    if after is None or after.role != "linear" or op.role in ("linear", "attention"):
        return 0.0
    return np.minimum(kept, Poly(bs=float(after.shape[1]))(*counts))


def _left(work: Work, is_whole: bool, remade: Num) -> tuple[Shares, Shares, Shares]:
    """Shares that are left of compiled ops: traffic and kernels by (layer, op, whether going back), and of what is kept
    by (layer, cut, whether float32). `is_whole`: all layers before the loss are one graph; `remade`: share of blocks in
    which inputs of linear layers are made anew."""
    counts = work.size("microbatch"), work.size("sequence"), work.size("sequence_parts")
    sums: list[dict[tuple[str, str, bool], list[Num]]] = [{}, {}, {}]

    def add(which: int, place: tuple[str, str, bool], whole: Num, left: Num) -> None:
        before = sums[which].get(place, [0.0, 0.0])
        sums[which][place] = [before[0] + whole, before[1] + left]

    for layer in work.profile.block_layers:
        for op, after in zip(layer.ops, (*layer.ops[1:], None), strict=True):
            fused = op.fused or op
            if op.fused is not None:
                add(0, (layer.name, op.name, False), op.moved(*counts), fused.moved(*counts))
                add(0, (layer.name, op.name, True), op.backward_moved(*counts), fused.backward_moved(*counts))
                add(1, (layer.name, op.name, False), op.kernels, fused.kernels)
                add(1, (layer.name, op.name, True), op.backward_kernels, fused.backward_kernels)
            place = layer.name, op.cut, op.dtype == "float32"
            left = fused.saved(*counts)
            left = left - remade * _read_by_product(op, after, counts, left)
            add(2, place, op.saved(*counts), left)
    stream = Poly(bs=float(work.profile.hidden_size))(*counts)
    for layer in work.profile.layers[1:] if is_whole else ():
        # The norm that begins a layer joins the kernel of the sum that ends the one before, which has the stream.
        if (norm := layer.ops[0]).role == "norm":
            joined = layer.name, norm.name, False
            for which, whole, less in ((0, norm.moved(*counts), stream), (1, norm.kernels, 1.0)):
                whole = 0.0 if joined in sums[which] else whole
                add(which, joined, whole, whole - less)
    return tuple(  # type: ignore[return-value]
        {place: left / np.maximum(whole, 1e-30) for place, (whole, left) in each.items()} for each in sums
    )
