"""FSDP2 over an axis, one unit per layer, with the boxes of the pieces written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState

from meshwright.core.build import Build, Exchange
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.ops.collectives import all_gather, reduce_scatter
from meshwright.ops.device_mesh import Mesh


class _GlooCollective:
    """What FSDP asks of a way to gather, and with `op` of one to reduce and scatter."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any = None,
        async_op: bool = False,
    ) -> None:
        if op is None:
            all_gather(output_tensor, input_tensor, group)
            return
        reduce_scatter(output_tensor, input_tensor, group)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        else:
            assert op == dist.ReduceOp.SUM, f"FSDP asks gloo for {op}"


class SecondaryCopies:
    """Copies of units that each `count` neighbours of an axis share out from forward to backward, as FSDP does with
    `reshard_after_forward=count`. One process group for all units: FSDP makes some for each, and of this rank's row of
    the mesh only."""

    def __init__(self, mesh: Mesh, axis: str, count: int):
        rows = mesh.along(axis)
        groups = [ranks[start : start + count] for ranks in rows for start in range(0, len(ranks), count)]
        group = mesh.new_group(f"{axis}/{count}", groups)
        assert group is not None
        mine = torch.tensor(next(ranks for ranks in rows if mesh.rank in ranks)).view(-1, count)
        # Nothing is sent over the first dim: any group will do.
        names = (axis, f"{axis}_neighbours")
        grid = DeviceMesh.from_group([mesh.group(axis), group], mesh.device.type, mine, mesh_dim_names=names)
        self.neighbours = HSDPMeshInfo(grid, shard_mesh_dim=1, replicate_mesh_dim=0)

    def keep(self, module: Any) -> None:
        """From its forward to its backward."""
        for group in _groups(module):
            group.post_forward_mesh_info = self.neighbours
            for each in group.fsdp_params:
                each.post_forward_mesh_info = self.neighbours
                each._init_sharded_post_forward_param_metadata(torch.empty(each._orig_size, device="meta"))

    def free(self, module: Any) -> None:
        """After a forward without a backward."""
        for group in _groups(module):
            for each in group.fsdp_params:
                each._sharded_post_forward_param = each._sharded_post_forward_param_data = None


class ShardedUnits(Exchange):
    """Every unit of a build sharded by FSDP: it sums gradients itself, and is told here which backward is the last."""

    def __init__(
        self,
        build: Build,
        axis: str,
        replicas: list[str],
        *,
        stage: int,
        prefetch: int,
        reduce_dtype: torch.dtype,
        secondary: int,
        problem: Callable[[str, str], Problem],
    ):
        """Gradients are shared out over `axis` and then summed over the axis of `replicas`, where there is one."""
        self.build, self.stage, self.has_replicas = build, stage, bool(replicas)
        self.secondary = SecondaryCopies(build.mesh, axis, secondary) if secondary else None
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
        self.wrapped: list[Any] = []
        self.ends, self.prefetch, self.chunks = list[Any](), prefetch, list[int]()
        self.root_chunk = len(build.spans) - 1
        for unit in build.units():
            build.materialise(unit.parameters)
            if unit.module is None:
                self.root_chunk = min(self.root_chunk, unit.chunk)
                continue
            # The ends stay gathered from forward to backward: the head's come one after the other, and the embedding's
            # backward needs no weight, but FSDP would gather it all the same.
            module = fully_shard(unit.module, reshard_after_forward=stage == 3 and unit.is_block, **options)
            self.wrapped.append(module)
            self.chunks.append(unit.chunk)
            self.ends += [] if unit.is_block else [module]
        # The root takes what no unit took: the layers that share a weight.
        self.wrapped.append(fully_shard(build.model, reshard_after_forward=False, **options))
        self.ends.append(self.wrapped[-1])
        self.forward_only: list[Any] = []
        """Units without a backward, at the end of which FSDP would let go of what was gathered."""
        self.trained = self._look_ahead()
        if self.secondary is not None:
            for module in self.wrapped:
                if module not in self.ends and module not in self.forward_only:
                    self.secondary.keep(module)
        for module in build.model.modules() if self.secondary is None else ():
            if (gather := getattr(getattr(module, "product", None), "gather_narrow", None)) is not None:
                gather(module.weight, mesh.size(axis))
        for module in self.wrapped:
            _fill_unused(module, build.zero_filled)
        if build.model.block_order is not None:
            _require_order(build.model, build.model.block_order, problem)
        if mesh.device.type == "cpu":
            for module in self.wrapped:
                if hasattr(module, "set_custom_all_gather") and hasattr(module, "set_custom_reduce_scatter"):
                    module.set_custom_all_gather(_GlooCollective())
                    module.set_custom_reduce_scatter(_GlooCollective())
        for name in build.boxes:
            build.boxes[name] = build.boxes[name].chunk(0, mesh.index(axis), mesh.size(axis))
            build.cut_axes[name] |= {axis}
        # FSDP divides gradients by the ranks it sums over; the loss is already divided by all tokens.
        build.loss_scale *= grid.size()
        self.members: dict[int, list[Any]] = {chunk: [] for chunk in range(len(build.spans))}
        for module, chunk in zip(self.wrapped, [*self.chunks, self.root_chunk], strict=True):
            self.members[chunk].append(module)
        # Every chunk's backward is the root's too: it sums when its own chunk is due and stays gathered until the end.
        self.root = build.model if len(self.members) > 1 else None
        if self.root is not None:
            self.members[self.root_chunk].remove(self.root)
        self.told: dict[int, bool] = {}
        """Chunk -> whether its last backward was the last thing FSDP was told of it."""

    def _look_ahead(self) -> list[int]:
        """Which parameters have a gradient now; units ask for those that a backward comes to."""
        build, goes_back = self.build, list[bool]()
        firsts = [first for first, _ in build.spans]
        has_backward = [build.profile.trains_before(each) and each > build.trained_from for each in firsts]
        for unit in build.units():
            has_backward[unit.chunk] |= any(parameter.requires_grad for parameter in unit.parameters)
            goes_back += [] if unit.module is None else [has_backward[unit.chunk]]
        set_prefetch(self.wrapped, goes_back, self.chunks, self.prefetch)
        self.forward_only = [module for module, goes in zip(self.wrapped, goes_back, strict=False) if not goes]
        for each in (each for module in self.wrapped for group in _groups(module) for each in group.fsdp_params):
            if (weight := getattr(each, "_unsharded_param", None)) is not None:
                weight.requires_grad_(each.sharded_param.requires_grad)
        return [id(parameter) for parameter in build.model.parameters() if parameter.requires_grad]

    def begin_step(self) -> None:
        if self.trained != [id(parameter) for parameter in self.build.model.parameters() if parameter.requires_grad]:
            self.trained = self._look_ahead()
        self.build.zero_filled.update(self.trained)
        if self.build.later is None:
            # Before the first backward of a chunk another one's may do what was last said here.
            for chunk in self.members if len(self.members) > 1 else ():
                self._tell(chunk, is_last=False)
            return
        # No backward reduces anything, whatever it is the last of.
        self.told.clear()
        for module in (self.build.model, *(module for each in self.members.values() for module in each)):
            self._set(module, sums=False, reshards=False, is_last=False)
        self.build.model.set_is_last_backward(False)

    def before_backward(self, chunk: int, *, is_last: bool) -> None:
        if self.build.later is None:
            self._tell(chunk, is_last=is_last)

    def _tell(self, chunk: int, *, is_last: bool) -> None:
        """By chunk: what is not at its end keeps its gradients and weights when another is."""
        if self.told.get(chunk) != is_last:  # telling takes time
            for module in self.members[chunk]:
                # What stays gathered for backward would be let go of by the end of another chunk's.
                keeps = module in self.ends and len(self.members) > 1
                reshards = is_last or (self.stage == 3 and not keeps)
                self._set(module, sums=self.stage > 1 or is_last, reshards=reshards, is_last=is_last)
        self.told[chunk] = is_last
        if self.root is not None:
            is_due = chunk == self.root_chunk and (self.stage > 1 or is_last)
            self._set(self.root, sums=is_due, reshards=self._is_end(), is_last=is_last)
        self.build.model.set_is_last_backward(self._is_end())

    def _set(self, module: Any, *, sums: bool, reshards: bool, is_last: bool) -> None:
        """What a module does at the end of its next backward."""
        module.set_requires_gradient_sync(sums, recurse=False)
        module.set_reshard_after_backward(reshards, recurse=False)
        if self.has_replicas:
            module.set_requires_all_reduce(is_last, recurse=False)

    def _is_end(self) -> bool:
        return len(self.told) == len(self.members) and all(self.told.values())

    def gradients_ready(self, chunk: int, *, is_last: bool) -> None:
        """Where the second half of a backward has made gradients, which FSDP does not see by itself."""
        if self.build.later is None:
            return
        is_due = self.stage > 1 or is_last
        root = [self.root] if self.root is not None and chunk == self.root_chunk else []
        for module in (*self.members[chunk], *root):
            self._set(module, sums=is_due, reshards=is_last and module is not self.root, is_last=is_last)
            for group in _groups(module):
                _note_used(group, self.build.zero_filled)
                if is_due:
                    _fill_gradients(group)
                group.post_backward()
            module.set_requires_gradient_sync(False, recurse=False)
        self.told[chunk] = is_last
        if self._is_end():
            self.build.model.set_is_last_backward(True)
            fully_shard.state(self.build.model)._root_post_backward_final_callback()
            if self.root is not None:
                self.root.reshard()

    def finish(self) -> None:
        for module in self.forward_only:
            module.reshard()

    def after_evaluation(self) -> None:
        """A forward without a backward leaves layers gathered, and their parameters whole."""
        for module in self.wrapped:
            module.reshard()
            if self.secondary is not None:
                self.secondary.free(module)


def _groups(module: Any) -> list[Any]:
    """FSDP's parameters of a module; one group, or a list of them, by its version."""
    state = fully_shard.state(module)
    result = getattr(state, "_fsdp_param_groups", None)
    return list(result) if result is not None else [each for each in (state._fsdp_param_group,) if each is not None]


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


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The piece of a possibly sharded tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
