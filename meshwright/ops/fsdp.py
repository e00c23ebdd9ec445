"""FSDP2 over an axis, one unit per layer, with the boxes of the pieces written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.ops.gloo_collectives import all_gather, reduce_scatter


class _GlooGather:
    """What FSDP asks of a way to gather."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        all_gather(output_tensor, input_tensor, group)


class _GlooReduce(_GlooGather):
    def __call__(  # type: ignore[override]
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        reduce_scatter(output_tensor, input_tensor, group)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        else:
            assert op == dist.ReduceOp.SUM, f"FSDP asks gloo for {op}"


def shard_units(
    build: Any,
    axis: str,
    replicas: list[str],
    *,
    stage: int,
    prefetch: int,
    reduce_dtype: torch.dtype,
    problem: Callable[[str, str], Problem],
) -> Callable[[bool, int], None]:
    """Shard every unit of `build` and return what to call before each backward: flags(is_last, chunk)."""
    mesh = build.mesh
    assert len(replicas) <= 1, "hybrid sharding sums over one axis of replicas"
    grid = mesh.submesh(*replicas, axis)
    options: dict[str, Any] = {"mesh": grid}
    if not build.compute_dtype == build.dtype == reduce_dtype:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=build.compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        )
        if mesh.device.type == "cpu":
            _match_norms(build.model)
    wrapped, goes_back, chunks, are_blocks = [], [], [], []
    root_chunk = len(build.spans) - 1
    has_backward = build.first_block > 0
    for unit in build.units():
        has_backward = has_backward or any(parameter.requires_grad for parameter in unit.parameters)
        build.materialise(unit.parameters)
        if unit.module is not None:
            # The ends stay gathered from forward to backward: the head's come one after the other, and the embedding's
            # backward needs no weight, but FSDP would gather it all the same.
            wrapped.append(fully_shard(unit.module, reshard_after_forward=stage == 3 and unit.is_block, **options))
            goes_back.append(has_backward)
            chunks.append(unit.chunk)
            are_blocks.append(unit.is_block)
        else:
            root_chunk = min(root_chunk, unit.chunk)
    # The root takes what no unit took: the layers that share a weight.
    wrapped.append(fully_shard(build.model, reshard_after_forward=False, **options))
    set_prefetch(wrapped, goes_back, chunks, prefetch)
    for module in wrapped:
        _fill_unused(module, build.zero_filled)
    trained = [id(parameter) for parameter in build.model.parameters() if parameter.requires_grad]
    build.on_step.append(lambda: build.zero_filled.update(trained))
    if build.model.block_order is not None:
        _require_order(build.model, build.model.block_order, problem)
    if mesh.device.type == "cpu":
        _take_over_gloo(wrapped)
    for name in build.boxes:
        build.boxes[name] = build.boxes[name].chunk(0, mesh.index(axis), mesh.size(axis))
        build.cut_axes[name] |= {axis}
    # FSDP divides gradients by the ranks it sums over; the loss is already divided by all tokens.
    build.loss_scale *= grid.size()

    # A forward without a backward leaves layers gathered, and their parameters whole: nothing to save or to update.
    build.on_evaluated.append(lambda: [module.reshard() for module in wrapped])
    ends = [module for module, is_block in zip(wrapped, [*are_blocks, False], strict=True) if not is_block]
    members: dict[int, list[Any]] = {chunk: [] for chunk in range(len(build.spans))}
    for module, chunk in zip(wrapped, [*chunks, root_chunk], strict=True):
        members[chunk].append(module)
    return _flags(build, members, ends, stage, bool(replicas), root_chunk)


def _flags(
    build: Any, members: dict[int, list[Any]], ends: list[Any], stage: int, has_replicas: bool, root_chunk: int
) -> Callable[[bool, int], None]:
    told: dict[int, bool] = {}
    # Every chunk's backward is the root's too: it sums when its own chunk is due and stays gathered until the end.
    root = build.model if len(members) > 1 else None
    if root is not None:
        members[root_chunk].remove(root)

    def flags(is_last: bool, chunk: int) -> None:
        """By chunk: what is not at its end keeps its gradients and weights when another is."""
        if told.get(chunk) != is_last:  # telling takes time
            for module in members[chunk]:
                # What stays gathered for backward would be let go of by the end of another chunk's.
                keeps = module in ends and len(members) > 1
                module.set_requires_gradient_sync(stage > 1 or is_last, recurse=False)
                module.set_reshard_after_backward(is_last or (stage == 3 and not keeps), recurse=False)
                if has_replicas:
                    module.set_requires_all_reduce(is_last, recurse=False)
        told[chunk] = is_last
        is_end = len(told) == len(members) and all(told.values())
        if root is not None:
            root.set_requires_gradient_sync(chunk == root_chunk and (stage > 1 or is_last), recurse=False)
            root.set_reshard_after_backward(is_end, recurse=False)
            if has_replicas:
                root.set_requires_all_reduce(is_last, recurse=False)
        build.model.set_is_last_backward(is_end)

    def start() -> None:
        """Before the first backward of a chunk another one's may do what was last said here."""
        for chunk in members if len(members) > 1 else ():
            flags(False, chunk)

    def reduce(is_last: bool, chunk: int) -> None:
        """When the second half of a backward has made its gradients, which FSDP does not see by itself."""
        is_due = stage > 1 or is_last
        for module in (*members[chunk], *([root] if root is not None and chunk == root_chunk else [])):
            module.set_requires_gradient_sync(is_due, recurse=False)
            module.set_reshard_after_backward(is_last and module is not root, recurse=False)
            if has_replicas:
                module.set_requires_all_reduce(is_last, recurse=False)
            for group in _groups(module):
                _note_used(group, build.zero_filled)
                if is_due:
                    _fill_gradients(group)
                group.post_backward()
            module.set_requires_gradient_sync(False, recurse=False)
        done[chunk] = is_last
        if len(done) == len(members) and all(done.values()):
            build.model.set_is_last_backward(True)
            fully_shard.state(build.model)._root_post_backward_final_callback()
            if root is not None:
                root.reshard()

    def start_apart() -> None:
        """No backward reduces anything, whatever it is the last of."""
        done.clear()
        for module in (build.model, *(module for each in members.values() for module in each)):
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
        build.model.set_is_last_backward(False)

    done: dict[int, bool] = {}
    if build.later is not None:
        build.on_weights.append(reduce)
    build.on_step.append(start if build.later is None else start_apart)
    return flags if build.later is None else lambda is_last, chunk: None


def _groups(module: Any) -> list[Any]:
    """FSDP's parameters of a module; one group, or a list of them, by its version."""
    state = fully_shard.state(module)
    found = getattr(state, "_fsdp_param_groups", None)
    return list(found) if found is not None else [each for each in (state._fsdp_param_group,) if each is not None]


def _note_used(group: Any, zero_filled: set[int]) -> None:
    """Parameters of the group that have a gradient took part in the step."""
    for each in group.fsdp_params:
        weight = getattr(each, "_unsharded_param", None)
        if weight is not None and (weight.grad is not None or each.unsharded_accumulated_grad is not None):
            zero_filled.discard(id(each.sharded_param))


def _fill_gradients(group: Any) -> None:
    """Zeros for what has no gradient since the last sum, so that every sum is of the same size on all ranks: FSDP would
    leave it out. (torch 2.13 can do so by itself, but does not say which ones those were.)"""
    for each in group.fsdp_params:
        weight = getattr(each, "_unsharded_param", None)
        has_some = each.unsharded_accumulated_grad is not None
        if weight is not None and weight.requires_grad and weight.grad is None and not has_some:
            weight.grad = torch.zeros_like(weight)
    if any(each.unsharded_accumulated_grad is not None for each in group.fsdp_params):
        for each in group.fsdp_params:  # in one dtype: those summed over microbatches are wider than new ones
            if each.unsharded_accumulated_grad is None and getattr(each, "_unsharded_param", None) is not None:
                each.to_accumulated_grad_if_needed()


def set_prefetch(wrapped: list[Any], goes_back: list[bool], chunks: list[int], prefetch: int) -> None:
    """Each unit asks for those after it in forward and before it in backward, of its own chunk; the root comes last.

    Said outright, because FSDP's own guess fetches one layer too many when microbatches interleave. What is frozen,
    with nothing trained before it, has no backward to fetch for; a module that asks for itself keeps FSDP from
    guessing.
    """
    # The root is at the end of every chunk: with several, it cannot know whose backward begins.
    place_of_root = chunks[-1] if len(set(chunks)) == 1 else None
    units = list(zip(wrapped[:-1], chunks, goes_back, strict=True))
    for place, (module, chunk) in enumerate(zip(wrapped, [*chunks, place_of_root], strict=True)):
        after = [unit for unit, its, _ in units[place + 1 :] if its == chunk]
        before = [unit for unit, its, is_needed in reversed(units[:place]) if its == chunk and is_needed]
        module.set_modules_to_forward_prefetch(after[:prefetch])
        module.set_modules_to_backward_prefetch(before[:prefetch] or [module])


def _fill_unused(module: Any, zero_filled: set[int]) -> None:
    """Fill the gradients of unused parameters at the end of every backward of the module that sums."""
    for group in _groups(module):

        def post_backward(*given: Any, group: Any = group, inner: Any = group.post_backward) -> None:
            # Also called at the end of backwards that the group had no part in.
            if group._training_state == TrainingState.PRE_BACKWARD:
                _note_used(group, zero_filled)
                if group.reduce_grads:
                    _fill_gradients(group)
            inner(*given)

        group.post_backward = post_backward


def _require_order(model: Any, order: tuple[int, ...], problem: Callable[[str, str], Problem]) -> None:
    """Raise before a block is gathered that does not come next: other ranks would gather another one, and wait."""
    here = {number for _, number in model.numbered_blocks()}
    to_come: list[int] = []

    def refuse(block: int, event: str) -> None:
        what = f"block {block} {event}, but all ranks gather every block in every forward, in one order."
        fix = "Split the samples without sharding, or run the block on every input and multiply its result by zero."
        raise MeshwrightError([problem(what, fix)])

    def begin(*_: Any) -> None:
        to_come[:] = [block for block in order if block in here and model.runs(block)]

    def enter(block: int) -> None:
        if torch._C._current_graph_task_id() != -1:  # computed again for a backward
            return
        if not to_come:
            refuse(block, "ran when none was to come")
        if to_come[0] != block:
            refuse(to_come[0], f"did not run before block {block}")
        to_come.pop(0)

    def end(*_: Any) -> None:
        if to_come:
            refuse(to_come[0], "did not run")

    model.register_forward_pre_hook(begin, prepend=True)
    model.register_forward_hook(end)
    for module, number in model.numbered_blocks():
        module.register_forward_pre_hook(lambda *_, number=number: enter(number), prepend=True)


def _match_norms(model: Any) -> None:
    """Give norms their input in the dtype of their gathered weights: unlike CUDA's, a CPU's autocast leaves them alone,
    and their kernels fail on a float32 stream (a later stage's, or images) beside bfloat16 weights."""

    def match(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = next((each.dtype for each in module.parameters(recurse=False)), None)

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() and dtype else value

        return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}

    for module in model.modules():
        bases = " ".join(each.__name__ for each in type(module).__mro__)
        if any(name in bases for name in ("LayerNorm", "GroupNorm", "InstanceNorm", "Bilinear")):
            module.register_forward_pre_hook(match, with_kwargs=True)


def _take_over_gloo(wrapped: list[Any]) -> None:
    for module in wrapped:
        if hasattr(module, "set_custom_all_gather") and hasattr(module, "set_custom_reduce_scatter"):
            module.set_custom_all_gather(_GlooGather())
            module.set_custom_reduce_scatter(_GlooReduce())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The piece of a possibly sharded tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
