"""Every operator a module runs, forward and backward, and the life of every storage it makes.

A backward operator belongs to the forward one whose autograd node it runs for: autograd numbers its nodes, and the
number that comes next is written down with every forward operator.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from meshwright.foreign import trace_ops

PRODUCTS = ("matmul", "attention")
"""Kinds of operators that multiply matrices: no compiler fuses them."""
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "_reshape_alias"}
FREE |= {"detach", "alias", "lift_fresh", "device", "sym_size", "sym_stride", "sym_numel", "_version", "is_same_size"}
"""They launch nothing."""
GATHERS = {"embedding", "index_select", "gather", "index", "embedding_dense_backward", "_unsafe_index", "take"}
SCATTERS = {"scatter_add", "scatter_add_", "scatter", "scatter_", "index_add", "index_add_", "index_put", "index_put_"}
SCATTERS |= {"_index_put_impl_", "index_copy_"}
SORTS = {"sort", "topk", "bincount", "argsort"}
GROUPED = {"rows_times", "outer", "_grouped_mm", "grouped_mm"}
RECURRENT = {"recurrent", "recurrent_backward"}
UNKNOWN = ("fft", "linalg", "mkldnn_rnn", "_cudnn_rnn", "cdist", "svd", "qr", "cholesky", "grid_sampler")
"""Begin the names of operators whose arithmetic may be large and is not counted."""
NORM_GRADIENTS = {"native_layer_norm_backward", "rms_norm_backward", "native_batch_norm_backward"}
"""A pass over gradient and input for the input's gradient, another for the weight's."""
OVERWRITES = {"fill_", "zero_", "copy_", "normal_", "uniform_", "bernoulli_", "random_"}
FUSED_WITH_NOTHING = SORTS | SCATTERS | {"embedding_dense_backward", "cumsum", "cummax", "max_pool2d_with_indices"}
FUSED_WITH_NOTHING |= {"max_pool2d_with_indices_backward", "_local_scalar_dense", "nonzero", "convolution_backward"}


class Label(NamedTuple):
    """Where in a model something happens."""

    layer: int = 0
    path: str = ""
    """Path of the module inside of its layer."""
    cut: str = "none"
    role: str = ""
    is_block: bool = False


@dataclass(slots=True)
class Storage:
    bytes: int
    is_wide: bool
    """Whether the dtype is kept whatever precision the model computes in."""
    label: Label
    birth: int
    """Number of the event that made it."""
    death: int = 1 << 60
    saver: Label | None = None
    is_given: bool = False
    """A parameter, a buffer or a copy of one."""
    is_input: bool = False
    is_handed: bool = False
    """To a block, as the tensor it works on."""
    is_gradient: bool = False
    is_forgotten: bool = False
    """Computed again rather than kept, where its layer is compiled."""

    @property
    def elements(self) -> float:
        """In numbers of four bytes, or of the width that is computed in."""
        return self.bytes / (4 if self.is_wide else 2)


class Touch(NamedTuple):
    storage: Storage
    elements: float
    is_wide: bool
    is_index: bool = False
    """Whole numbers: few beside what they count, and told together with it."""


@dataclass(slots=True)
class OpEvent:
    number: int
    name: str
    kind: str
    label: Label
    is_backward: bool
    reads: list[Touch]
    writes: list[Touch]
    flops: float = 0.0
    shape: tuple[int, ...] = ()
    matrices: int = 1
    products: int = 1
    forward: OpEvent | None = None
    """The forward event whose gradient it computes."""
    is_dropped: bool = False
    is_column_sum: bool = False
    """Over all rows, as of a bias's gradient: a kernel by itself, because the rows must be there first."""
    fused_touches: list[Touch] = field(default_factory=list)
    """What it reads and writes where its layer is compiled."""
    fused_kernels: int = 0

    @property
    def is_fusible(self) -> bool:
        outside = self.kind in (*PRODUCTS, "unknown") or self.name in FUSED_WITH_NOTHING
        return not outside and not self.is_column_sum


@dataclass
class Record:
    events: list[OpEvent] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    unpriced: dict[str, None] = field(default_factory=dict)


class OpRecorder(TorchDispatchMode):
    def __init__(self, narrow: frozenset[torch.dtype]):
        super().__init__()
        self.narrow = narrow
        """Dtypes that stand for the one computed in."""
        self.record = Record()
        self.label = Label()
        self.at_work = False
        """Whether the forward or the backward pass is on."""
        self.is_backward = False
        self._alive: dict[int, tuple[Any, Storage]] = {}
        self._numbers: list[int] = []
        self._forwards: list[OpEvent | None] = []

    def know(self, tensor: Tensor, **facts: Any) -> Storage:
        """A tensor that was there before: a parameter, a buffer or an input."""
        storage = self._storage(tensor)
        for name, value in facts.items():
            setattr(storage, name, value)
        return storage

    def _storage(self, tensor: Tensor) -> Storage:
        held = tensor.untyped_storage()
        key = held._cdata
        if key in self._alive and self._alive[key][0]() is held:
            return self._alive[key][1]
        is_wide = tensor.dtype not in self.narrow
        size = held.nbytes()
        if not is_wide:  # whatever its width is here, two bytes stand for it
            size = size // tensor.element_size() * 2
        made = Storage(bytes=size, is_wide=is_wide, label=self.label, birth=len(self.record.events))
        self.record.storages.append(made)

        def died(reference: Any, made: Storage = made, key: int = key) -> None:
            made.death = len(self.record.events)
            if self._alive.get(key, (None,))[0] is reference:
                del self._alive[key]

        self._alive[key] = (weakref.ref(held, died), made)
        return made

    def pack(self, tensor: Tensor) -> Tensor:
        storage = self._storage(tensor)
        if storage.saver is None and not storage.is_given:
            # What all blocks read (rotary tables, masks) is kept once, however many blocks there are.
            is_shared = self.label.is_block and not storage.label.is_block and not storage.is_handed
            storage.saver = storage.label if is_shared else self.label
        return tensor

    @contextmanager
    def marked(self, **changes: Any) -> Iterator[None]:
        before, self.label = self.label, self.label._replace(**changes)
        try:
            yield
        finally:
            self.label = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        node = torch._C._current_autograd_node() if self.is_backward else None
        out = func(*args, **kwargs)
        if not self.at_work or func.namespace == "prim":
            return out
        name = func._overloadpacket.__name__
        is_free = bool(func.is_view) or name in FREE
        if not self.is_backward:
            event = None if is_free else self._event(func, name, self.label, args, kwargs, out)
            self._numbers.append(torch.autograd._get_sequence_nr())
            self._forwards.append(event)
            return out
        if node is None or is_free:
            return out
        start = bisect_right(self._numbers, node._sequence_nr())
        if start == len(self._numbers):
            self._event(func, name, self.label, args, kwargs, out)  # an accumulation: where backward just is
            return out
        stop = bisect_right(self._numbers, self._numbers[start])
        known = [event for event in self._forwards[start:stop] if event is not None]
        # A node without an event of its own is a view's: it belongs where the next event does.
        later = (event.label for event in self._forwards[start : start + 50] if event is not None)
        self.label = known[0].label if known else next(later, self.label)
        event = self._event(func, name, self.label, args, kwargs, out)
        if event is not None:
            event.forward = known[0] if known else None
            if event.kind == "matmul":
                products = [each for each in known if each.kind == "matmul"]
                same = [each for each in products if sorted(_sizes(each)) == sorted(_sizes(event))]
                event.forward = next(iter(same or products), None)
            event.is_dropped |= bool(known) and known[0].is_dropped and event.name == "_to_copy"
        return out

    def _event(self, func: Any, name: str, label: Label, args: Any, kwargs: Any, out: Any) -> OpEvent | None:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if not given and not made:
            return None
        adds_in_place = name in SCATTERS and name.endswith("_")
        event = OpEvent(
            number=len(self.record.events),
            name=name,
            kind=_kind(func, name, label),
            label=label,
            is_backward=self.is_backward,
            reads=self._reads(name, given, made),
            writes=[self._touch(made[0], given[-1].numel())] if adds_in_place else [self._touch(each) for each in made],
            is_column_sum=name == "sum" and 1 < made[0].numel() == given[0].shape[-1] < given[0].numel(),
        )
        self._count(event, func, args, kwargs, out)
        if event.kind == "unknown" or (name.startswith(UNKNOWN) and "vector_norm" not in name):
            self.record.unpriced[f"{func.namespace}.{name} ({label.path or 'the model itself'})"] = None
        if name == "_to_copy" and event.reads and event.reads[0].storage.is_given:
            # Weights in the dtype they are used in: whoever chooses that dtype prices the copies.
            event.is_dropped = True
            for touch in event.writes:
                touch.storage.is_given = True
        if name == "native_batch_norm":
            for touch in event.writes[1:]:  # statistics are float32, though they are not where there are no values
                touch.storage.bytes, touch.storage.is_wide = 4 * made[1].numel(), True
        self.record.events.append(event)
        return event

    def _touch(self, tensor: Tensor, elements: float | None = None) -> Touch:
        is_wide = tensor.dtype not in self.narrow
        width = tensor.element_size() / 4 if is_wide else 1.0
        if elements is None:  # that lie in memory: an expanded one is there once
            strides = zip(tensor.shape, tensor.stride(), strict=True)
            elements = float(math.prod(size if stride else 1 for size, stride in strides))
        return Touch(self._storage(tensor), elements * width, is_wide, not tensor.is_floating_point())

    def _reads(self, name: str, given: list[Tensor], made: list[Tensor]) -> list[Touch]:
        if name.startswith("new_") or name.endswith("_like"):
            return []
        if name in OVERWRITES:
            return [self._touch(each) for each in given[1:]]
        if name in GATHERS and name != "embedding_dense_backward":
            return [self._touch(given[0], made[0].numel()), *map(self._touch, given[1:])]
        if name in SCATTERS and name.endswith("_"):
            return [self._touch(given[0], given[-1].numel()), *map(self._touch, given[1:])]
        reads = [self._touch(each) for each in given]
        if name == "convolution_backward":  # each of its products reads the gradient; one the weight
            return [*reads, reads[0]] if made[0].shape == given[1].shape else reads[:2]
        # Statistics of a batch must be there before it is read again.
        return reads + reads[: 2 if name in NORM_GRADIENTS else 1 if name == "native_batch_norm" else 0]

    def _count(self, event: OpEvent, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        packet, name = func._overloadpacket, event.name
        if name == "attention" and event.kind == "attention":
            query, key, value, _, is_causal = args
            event.flops = trace_ops.attention_flops(query, key, value, is_causal)
            event.shape = (query.shape[-3] if query.dim() > 3 else 1, query.shape[-1], key.shape[-2])
        elif name == "attention_backward" and event.kind == "attention":
            flops = trace_ops.attention_flops(args[1], args[2], args[3], args[-1])
            event.flops = trace_ops.BACKWARD_ATTENTION * flops
        elif name in GROUPED:
            first, second = args[0], args[1]
            stack = next(each for each in (first, second, out) if each.dim() == 3)
            event.matrices = stack.shape[0]
            num_rows, event.shape = first.shape[0], (out.shape[-1], first.shape[-1])
            if first.dim() == second.dim() == 2:  # rows meet rows: a weight's gradient
                num_rows = first.shape[0] if name == "outer" else first.shape[1]
                event.shape = (stack.shape[1], stack.shape[2])
            event.flops = 2.0 * num_rows * stack.shape[1] * stack.shape[2]
        elif name in RECURRENT:
            x, weights = (args[0], args[1]) if name == "recurrent" else (args[1], args[4])
            event.products = 1 if name == "recurrent" else 2
            # Every step multiplies its input and its state by the matrices among the weights.
            matrices = [each.numel() for each in weights if each.dim() == 2]
            event.flops = sum(2.0 * math.prod(x.shape[:-1]) * size for size in matrices) * event.products
            event.shape = (weights[0].shape[0], weights[0].shape[1] + weights[1].shape[1])
        elif name in ("convolution", "convolution_backward"):  # the product it is, groups and all
            given, weight, is_transposed, result = args[0], args[1], args[6], out
            if name == "convolution_backward":  # as many such products as there are gradients
                result, given, weight, is_transposed, mask = args[0], args[1], args[2], args[7], args[10]
                event.products = int(mask[0]) + int(mask[1])
            event.shape = (weight.shape[0], weight[0].numel())
            rows = given if is_transposed else result
            event.flops = 2.0 * rows.numel() * event.shape[1] * event.products
        elif packet in flop_registry and event.kind == "matmul":
            event.flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
            left, right = [each for each in args if isinstance(each, Tensor)][-2:]
            event.shape = (right.shape[-1], left.shape[-1])
            event.matrices = left.shape[0] if left.dim() == 3 else 1


def _kind(func: Any, name: str, label: Label) -> str:
    if name in ("attention", "attention_backward") and func.namespace == trace_ops.NAMESPACE:
        return "attention"
    if func._overloadpacket in flop_registry or name in GROUPED | RECURRENT:
        return "matmul"
    if func.namespace not in ("aten", trace_ops.NAMESPACE):
        return "unknown"
    if label.role == "loss":
        return "loss"
    return "gather" if name in GATHERS | SCATTERS | SORTS else "memory"


def _sizes(event: OpEvent) -> tuple[float, ...]:
    """m, n, k of one of its products."""
    if not event.shape or 0 in event.shape:
        return ()
    n, k = event.shape
    return event.flops / max(1.0, 2.0 * n * k * event.matrices * event.products), n, k
