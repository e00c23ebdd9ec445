"""What one step asks of one rank: compute, collectives, copies between tiers of memory, resident bytes.

The techniques' `price` rewrites it.

Every number may be a scalar or a NumPy array with one entry per candidate (a plan and one of its stages), so one
call prices ten thousand plans. Items are per layer instance; `repeat` says how many instances this rank has.
Flops are floats (a 405B step overflows int64); bytes of a collective are those of the whole message: what every
rank holds afterwards (all_gather), gives (reduce_scatter), or both (all_reduce).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from meshwright.core.all_reduce import AllReduce
from meshwright.core.cluster import TIERS, TierName
from meshwright.core.profile import Cut, CutDim, Layer, Op, Poly, Profile, Role

if TYPE_CHECKING:
    from meshwright.schedules import Timetable

Num = Any
"""An int or float, or a NumPy array of them with one entry per candidate."""

Phase = Literal["forward", "recompute", "backward", "weight", "step"]
"""`weight`: the half of backward that makes weights' gradients, where a schedule takes it apart."""
FP8_MULTIPLE = 16
"""Both sizes of a matrix that is multiplied in 8 bits are multiples of this."""
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "ring"]
"""send: to the next stage; ring: from each rank of an axis to the next, all at once."""

UPDATE_LAUNCHES = 1.0
"""Ops of the host for each parameter in a step: its gradient let go of, its place in the lists of norm and update (20
to 40 us each beside an H200)."""


def replace(item: Any, **changes: Any) -> Any:
    """As dataclasses.replace, in a quarter of the time for what has slots: search makes half a million."""
    kind: type = type(item)
    values_of, setters = _slots_of(kind)
    if not setters:
        return dataclasses.replace(item, **changes)
    new: Any = object.__new__(kind)
    for setter, value in zip(setters.values(), values_of(item), strict=True):
        setter(new, value)
    try:
        for name, value in changes.items():
            setters[name](new, value)
    except KeyError:
        return dataclasses.replace(item, **changes)  # which knows what to say of a wrong name
    return new


@cache
def _slots_of(kind: type) -> tuple[Callable[[Any], tuple[Any, ...]], dict[str, Callable[[Any, Any], None]]]:
    """A function that reads all fields at once, and one for each field that sets it, though the class is frozen; none
    for a class without slots."""
    names = [each.name for each in dataclasses.fields(kind)]
    has_slots = "__slots__" in vars(kind) and len(names) > 1  # of one name, attrgetter makes no tuple
    return attrgetter(*names), {name: getattr(kind, name).__set__ for name in names} if has_slots else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    layer: str
    name: str
    kind: str
    phase: Phase
    repeat: Num
    role: Role = ""
    flops: Num = 0.0
    moved_bytes: Num = 0.0
    dtype: str = "fp32"
    cut: Cut = "none"
    origin: str = ""
    shape: tuple[Num, ...] = ()
    """As in `Op`, of this rank's part, the sequence filled in."""
    matrices: Num = 1
    cut_dim: CutDim = "n"
    kernels: Num = 1.0
    """Launched, one after the other; of a matmul, how many products."""
    shared_out: str = ""
    """As in `Param`: of the weights it is about."""
    is_replayed: bool = False
    """Its kernels are part of a CUDA graph: the host launches none of them."""

    @property
    def per_step(self) -> bool:
        return self.phase == "step"

    @property
    def is_forward(self) -> bool:
        """For the first time or again."""
        return self.phase in ("forward", "recompute")

    def divided(self, ways: Num) -> Compute:
        """One of `ways` equal parts, cut where it is cut."""
        shape, matrices = self.shape, self.matrices
        if self.kind == "matmul" and shape:
            n, k = shape
            shape = (n / ways, k) if self.cut_dim == "n" else (n, k / ways) if self.cut_dim == "k" else shape
            matrices = matrices / ways if self.cut_dim == "matrices" else matrices
        elif self.kind == "attention" and shape:
            shape = (shape[0] / ways, *shape[1:])
        flops, moved = self.flops / ways, self.moved_bytes / ways
        return replace(self, flops=flops, moved_bytes=moved, shape=shape, matrices=matrices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    layer: str
    kind: Kind
    axis: str
    phase: Phase
    repeat: Num
    """Layer instances that issue it; 0 where this stage does not."""
    bytes: Num
    origin: str
    per_step: bool = False
    hidden: bool = False
    """Runs beside compute: only what compute cannot cover costs time."""
    tail: bool = False
    cut: Cut = "none"
    at_most: bool = False
    """Fewer bytes go where the data decides so."""
    algorithm: AllReduce | None = None
    """Of an all_reduce that sends of ranks make; None: the backend's own."""
    within: int = 0
    """Each so many neighbours of the axis among themselves; 0: all its ranks."""
    window: float = 0.0
    """Share of a whole step's compute that it may run beside; 0: one microbatch's pass of its phase."""

    @property
    def where(self) -> str:
        """The axis, or `fsdp/8`: 8 neighbours of it."""
        return f"{self.axis}/{self.within}" if self.within else self.axis


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Bytes that a copy engine moves between two tiers of memory (`Cluster.tiers`), beside cores and network."""

    layer: str
    """Empty: of no layer."""
    source: TierName
    target: TierName
    phase: Phase
    repeat: Num
    bytes: Num
    origin: str
    per_step: bool = False
    hidden: bool = False
    """Runs beside compute: only what compute cannot cover costs time."""
    cut: Cut = "none"

    @property
    def is_inward(self) -> bool:
        """Towards the device."""
        return TIERS.index(self.target) < TIERS.index(self.source)

    @property
    def tier(self) -> TierName:
        """The farther one of the two."""
        return self.source if self.is_inward else self.target


@dataclass(frozen=True, kw_only=True, slots=True)
class HostUpdate:
    """Parameters that cores of the host update, beside the device."""

    layer: str
    phase: Phase
    repeat: Num
    elements: Num
    origin: str
    hidden: bool = False
    """Runs beside compute: only what compute cannot cover costs time."""
    per_step: bool = True
    cut: Cut = "none"


Task = Compute | Collective | Copy | HostUpdate

Category = Literal[
    "parameters", "gradients", "optimizer", "gathered", "activations", "logits", "working", "buffers", "non_torch"
]

Life = Literal["always", "step", "microbatch", "moment", "forward", "backward"]
"""`step`: from its layer's first backward to the end of the step; `microbatch`: from a microbatch's forward to its
backward; the others while a layer runs, one layer instance at a time: either way, or only going forward or back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resident:
    layer: str
    category: Category
    repeat: Num
    bytes: Num
    life: Life
    tier: TierName = "device"
    """Which memory holds it."""
    turn: int = 0
    """Where instances of a layer differ: of those that come so many turns before the last ones (-1, -2); 0: of the last
    ones, or while any of them runs."""
    cut: Cut = "none"
    dtype: str = "fp32"
    origin: str = ""
    shared_out: str = ""
    """As in `Param`: whose copy it is."""
    is_input: bool = False
    """The input of blocks that are computed again as a whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSlot:
    """A parameter as this rank holds it. Residents and gradient traffic follow from the slots."""

    layer: str
    name: str
    repeat: Num
    shape: tuple[Num, ...]
    cut: int | None
    element_bytes: int
    """Of the parameter and its gradient; 1: of bytes, which stay as they are."""
    state_width: int
    """Bytes of one number that the optimizer keeps."""
    is_block: bool
    unit: str
    """The layers gathered and reduced together: the layer's own name, or `shared` where weights are tied."""
    cut_axis: str = ""
    """The axis whose ranks share the inside of its layer, and the dim `cut` of it."""
    shards: Num = 1
    shard_axis: str = ""
    """The axis whose ranks share it out in `shards`."""
    gradient_shards: Num = 1
    inside: bool = False
    late: tuple[tuple[str, str], ...] = ()
    """(axis, technique): sums of the gradient still owed over an axis once the backward passes are over."""
    copy_of: str = ""
    """The tied parameter whose storage it is, where both live on this rank."""
    frozen: bool = False
    shared_out: str = ""
    """As in `Param`."""
    state_tiers: tuple[tuple[TierName, Num], ...] = ()
    """(tier, share of its optimizer state) where not all of it is kept on the device."""
    host_share: Num = 0
    """Share of its instances that the host updates: the device has a working copy."""
    working_bytes: Num = 0
    """Of an element of that copy and of its gradient."""
    taken_share: Num = 0
    """Share of its instances whose gradients leave the device during backward."""
    is_streamed: bool = False
    """The working copy is on the host, and on the device only while its layer runs."""
    is_narrow: bool = False
    """Whether 8-bit products read it, but for blocks at the ends: it is gathered so where rows are shared evenly."""
    copy_bytes: int = 0
    """Of an element of its copy in fewer bits, which products read and updates write, and of its gradient; 0: none."""

    @property
    def elements(self) -> Num:
        return _product(self.shape)

    @property
    def gradient_bytes(self) -> int:
        """Of an element of its gradient."""
        return self.copy_bytes or self.element_bytes

    def stored(self, shards: Num) -> Num:
        """Elements of the largest of `shards` equal pieces along dim 0, padding included."""
        return -(-self.shape[0] // shards) * _product(self.shape[1:]) if self.shape else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """Bytes of one element, by its role in a step."""

    state: int = 4
    """Parameters, and what the optimizer keeps of them."""
    compute: int = 4
    """What is multiplied, and what comes out."""
    stream: int = 4
    """What flows from layer to layer."""
    gather: int = 4
    """Weights, as ranks gather them from each other."""
    reduce: int = 4
    """Gradients, as they are summed over ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rests:
    """Instances of layers that some steps do not train."""

    share: float = 0.0
    """Of all steps."""
    weights: Mapping[str, Num] = field(default_factory=dict)
    """Layer -> its instances whose weights have no gradient in such a step."""
    passes: Mapping[str, Num] = field(default_factory=dict)
    """Of these, those that have no backward at all."""

    def trained(self, layer: str, repeat: Num) -> Num:
        """Instances whose weights have a gradient, on average over steps."""
        return repeat - self.share * self.weights[layer] if layer in self.weights else repeat

    def passed(self, layer: str, count: Num, repeat: Num) -> Num:
        """Of something that backward does `count` times for `repeat` instances: how often, on average over steps."""
        if layer not in self.passes:
            return count
        return count - self.share * self.passes[layer] * count / np.maximum(repeat, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkFacts:
    """What the techniques priced so far have decided, for those that are priced after them."""

    compute_dtype: str = "fp32"
    widths: Widths = Widths()
    schedule: Timetable | None = None
    """None: the model is not cut into stages."""
    inside_ways: Num = 1
    """Ranks that share the inside of each layer."""
    sequence_ways: Num = 1
    """Ranks that share the sequence between the insides of layers."""
    loss_calls: int = 1
    """Pieces in which the loss is computed."""
    edge_blocks: int = 0
    """Blocks at each end of the model whose products are not of 8 bits, where others are."""
    remade_inputs: float = 0.0
    """Share of blocks whose linear layers keep no input where a compiler can make it anew from what others keep."""
    replays: Mapping[str, Num] = field(default_factory=dict)
    """Layer -> its instances whose forward runs again during backward."""
    replays_blocks: bool = False
    """Which blocks run again is decided while backward runs."""
    scales_loss: bool = False
    """Gradients come multiplied by a factor, and a step in which they overflow is skipped."""
    joins_gradients: bool = False
    """Gradients of all layers exist at once, whatever is done with each of them."""
    keeps_gradients: Num = 0
    """1 where whole gradients stay allocated from step to step."""
    frees_gradients: bool = False
    """A parameter's gradient is used up as soon as backward has made it."""
    codes_states: bool = False
    """Optimizer states are not one number for each element."""
    older_versions: Num = 0
    """Versions of the trained parameters kept beside the newest one."""
    rests: Rests = Rests()
    cut_before: tuple[int, ...] = ()
    """Blocks that hand no gradient back to those before them."""
    coding: Coding | None = None
    """How the next technique that sums gradients or parameters codes them; it leaves None."""
    agreement: tuple[str, str] = ("", "")
    """(axis, technique) of islands: in a step without any other message they still wait for the few numbers that all
    ranks agree on."""
    forbidden: Num = False
    """Candidates that search need not look at."""

    @property
    def chunks(self) -> int:
        return 1 if self.schedule is None else self.schedule.chunks

    @property
    def splits_backward(self) -> bool:
        return self.schedule is not None and self.schedule.splits_backward

    @property
    def overlaps_steps(self) -> bool:
        return self.schedule is not None and self.schedule.overlaps_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """What a technique's refusals depend on beside its settings: of one plan, or arrays over candidates."""

    size: Num
    """Ranks along the technique's axis."""
    num_microbatches: Num
    num_stages: Num
    num_blocks: int
    splits_backward: bool
    overlaps_steps: bool
    replays_blocks: bool
    scales_loss: bool
    joins_gradients: bool


class Coding(Protocol):
    """Sums in few bits."""

    def priced(
        self, work: Work, axis: str, shards: Callable[[ParameterSlot], Num], width: Callable[[ParameterSlot], Num],
        every: int, origin: str,
    ) -> Work: ...  # fmt: skip


class Updating(Protocol):
    """What an optimizer asks of a rank: bytes it remembers, messages of its own."""

    @property
    def clip(self) -> float:
        """Largest global norm of gradients; 0: they are not clipped."""

    @property
    def is_elementwise(self) -> bool:
        """An element's update needs nothing of other elements."""

    @property
    def has_low_bit_form(self) -> bool:
        """There is a form of it that keeps its states in a few bits."""

    @property
    def takes_rows(self) -> bool:
        """Rows without a gradient need no update, but for decay."""

    def state_bytes_of(self, slot: ParameterSlot) -> Num: ...

    def collectives(self, work: Work) -> tuple[Collective, ...]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    profile: Profile
    sizes: Mapping[str, Num]
    """num_ranks, batch, sequence (of the one of `sequence_parts` parts of a sample that a rank has), microbatch,
    num_microbatches, stage, num_stages, first_block, blocks, every axis, settings."""
    optimizer: Updating
    slots: tuple[ParameterSlot, ...] = ()
    tasks: tuple[Task, ...] = ()
    residents: tuple[Resident, ...] = ()
    facts: WorkFacts = WorkFacts()

    def size(self, name: str) -> Num:
        return self.sizes.get(name, 1)

    @property
    def computes(self) -> Iterable[Compute]:
        return (task for task in self.tasks if isinstance(task, Compute))

    @property
    def collectives(self) -> Iterable[Collective]:
        return (task for task in self.tasks if isinstance(task, Collective))

    @property
    def copies(self) -> Iterable[Copy]:
        return (task for task in self.tasks if isinstance(task, Copy))

    def with_tasks(self, *tasks: Task) -> Work:
        return replace(self, tasks=self.tasks + tasks)

    def with_residents(self, *residents: Resident) -> Work:
        return replace(self, residents=self.residents + residents)

    def with_facts(self, **changes: object) -> Work:
        """With fields of `WorkFacts` changed."""
        return replace(self, facts=replace(self.facts, **changes))

    def with_widths(self, **changes: int) -> Work:
        """With fields of `Widths` changed."""
        return self.with_facts(widths=replace(self.facts.widths, **changes))

    def forbid(self, which: Num) -> Work:
        """Search need not look at these candidates: a technique refuses them, or they are never better."""
        return self.with_facts(forbidden=self.facts.forbidden | which)

    def circumstances(self, axis: str) -> Circumstances:
        return Circumstances(
            size=self.size(axis),
            num_microbatches=self.size("num_microbatches"),
            num_stages=self.size("num_stages"),
            num_blocks=self.profile.num_blocks,
            splits_backward=self.facts.splits_backward,
            overlaps_steps=self.facts.overlaps_steps,
            replays_blocks=self.facts.replays_blocks,
            scales_loss=self.facts.scales_loss,
            joins_gradients=self.facts.joins_gradients,
        )

    def map_tasks(self, change: Callable[[Any], Any]) -> Work:
        return replace(self, tasks=tuple(change(task) for task in self.tasks))

    def map_residents(self, change: Callable[[Resident], Resident]) -> Work:
        return replace(self, residents=tuple(change(item) for item in self.residents))

    def map_slots(self, change: Callable[[ParameterSlot], ParameterSlot]) -> Work:
        return replace(self, slots=tuple(change(slot) for slot in self.slots))

    def owing(self, axis: str, origin: str, shared_out: str = "none") -> Work:
        """All gradients but those of what `axis` shares out are still to be summed over it: `Build.sum_rest_late`."""
        owed = (axis, origin)
        others = (s if s.shared_out == shared_out else replace(s, late=(*s.late, owed)) for s in self.slots)
        return replace(self, slots=tuple(others))

    def following(self, technique: str, policy: str, layer: str) -> Num:
        """Blocks of a kind that follow a technique's policy here (`Technique.counts_in`)."""
        return np.minimum(self.sizes.get(f"{technique}.{policy}.{layer}", 0), self.repeat_of(layer))

    def repeat_of(self, layer: str) -> Num:
        # A layer without parameters has no slots.
        items: Iterable[ParameterSlot | Resident] = chain(self.slots, self.residents)
        return next((item.repeat for item in items if item.layer == layer), 0)

    def has_backward(self, layer: str, after: int = -1) -> Num:
        """Whether gradients pass back through a layer, to before its first `after` parameters (-1: to its end): if
        anything up to there is trained."""
        names = [each.name for each in self.profile.layers]
        *before, own = self.profile.layers[: names.index(layer) + 1]
        params = [param for each in before for param in each.params]
        params += own.params if after < 0 else own.params[:after]
        return 1 if any(not param.frozen for param in params) else 0

    def passing_back(self, layer: str, after: int) -> Num:
        """Instances of a layer that pass gradients back to there: of equal ones that are trained, all but the first of
        the model do in any case."""
        repeat = self.repeat_of(layer)
        if self.has_backward(layer, after):
            return repeat
        at = next(at for at, each in enumerate(self.profile.layers) if each.name == layer)
        if all(param.frozen for param in self.profile.layers[at].params):
            return 0 * repeat
        start = sum(each.repeat for each in self.profile.layers[:at] if each.is_block)
        is_first = self.sizes.get("first_block", 0) <= start
        return repeat - (repeat > 0) * is_first

    def units(self, size: Callable[[ParameterSlot], Num], *, trained: bool = False) -> list[tuple[str, Num, Num]]:
        """(layer, instances, bytes of one) for whatever is gathered and reduced together, storage counted once.

        `trained`: of what has a gradient only.
        """
        grouped: dict[str, list[ParameterSlot]] = {}
        for slot in self.slots:
            if not slot.copy_of and not (trained and slot.frozen):
                grouped.setdefault(slot.unit, []).append(slot)
        units = []
        for slots in grouped.values():
            # Slots of one layer have one repeat; a shared unit may have some of its layers on another stage.
            repeat = slots[0].repeat
            for slot in slots[1:]:
                repeat = np.maximum(repeat, slot.repeat)
            total = sum(slot.repeat * size(slot) for slot in slots) // np.maximum(repeat, 1)
            units.append((slots[0].layer, repeat, total))
        return units


@dataclass(frozen=True, kw_only=True, slots=True)
class EachElement:
    """An optimizer known only by the bytes it remembers for each float32 element (8: Adam's two moments)."""

    state_bytes: Num = 8
    clip: float = 1.0
    is_elementwise: bool = True
    takes_rows: bool = False

    @property
    def has_low_bit_form(self) -> bool:
        return bool(self.state_bytes == ADAM.state_bytes)

    def state_bytes_of(self, slot: ParameterSlot) -> Num:
        return slot.stored(slot.shards) * (self.state_bytes * slot.state_width // 4)

    def collectives(self, work: Work) -> tuple[Collective, ...]:
        return ()


ADAM = EachElement()
"""Two moments in float32: what is assumed where nobody says."""


def base_work(profile: Profile, sizes: Mapping[str, Num], *, element_bytes: int, optimizer: Updating) -> Work:
    """One device that does it all: the work every plan starts from."""
    counts = sizes["microbatch"], sizes["sequence"], sizes.get("sequence_parts", 1)
    tied = {p.tied.split(".")[0] for layer in profile.layers for p in layer.params if p.tied}
    slots: list[ParameterSlot] = []
    tasks: list[Task] = []
    residents: list[Resident] = []
    for layer in profile.layers:
        is_shared = layer.name in tied or any(param.tied for param in layer.params)
        for param in layer.params:
            slots.append(
                ParameterSlot(
                    layer=layer.name,
                    name=param.name,
                    repeat=layer.repeat,
                    shape=param.stored_shape,
                    cut=param.cut,
                    element_bytes=1 if param.packed else element_bytes,
                    state_width=element_bytes,
                    is_block=layer.is_block,
                    unit="shared" if is_shared else layer.unit or layer.name,
                    inside=param.inside,
                    copy_of=param.tied,
                    frozen=param.frozen,
                    shared_out=param.shared_out,
                )
            )
        for op in layer.ops:
            tasks += _op_tasks(layer, op, counts, element_bytes)
            residents += _op_residents(layer, op, counts, element_bytes)
    return Work(
        profile=profile,
        sizes=sizes,
        optimizer=optimizer,
        slots=tuple(slots),
        tasks=tuple(tasks),
        residents=tuple(residents),
        facts=WorkFacts(widths=Widths(**dict.fromkeys(Widths.__slots__, element_bytes))),
    )


def _op_tasks(layer: Layer, op: Op, counts: tuple[Num, Num, Num], element_bytes: int) -> list[Compute]:
    halves: tuple[tuple[Phase, Poly, Poly, float], ...] = (
        ("forward", op.flops, op.moved, op.kernels),
        ("backward", op.backward_flops, op.backward_moved, op.backward_kernels),
    )
    _, sequence, parts = counts
    shape = tuple(size or sequence * parts for size in op.shape)
    if op.sees_all:  # as fast as a causal one of twice the tokens: heads of 64 over 512 of them on an H200, within 10 %
        shape = (*shape[:-1], 2 * shape[-1])
    return [
        Compute(
            layer=layer.name,
            name=op.name,
            kind=op.kind,
            role=op.role,
            phase=phase,
            repeat=layer.repeat,
            flops=flops(*counts),
            moved_bytes=moved(*counts) * element_bytes,
            dtype=op.dtype,
            cut=op.cut,
            shape=shape,
            matrices=op.matrices(*counts),
            cut_dim=op.cut_dim,
            kernels=kernels,
        )
        for phase, flops, moved, kernels in halves
        if flops != Poly() or moved != Poly()  # some ops only keep something
    ]


def _op_residents(layer: Layer, op: Op, counts: tuple[Num, Num, Num], element_bytes: int) -> list[Resident]:
    kinds: tuple[tuple[Poly, Category, Life], ...] = (
        (op.saved, "activations", "microbatch"),
        (op.working, "working", "moment"),
    )
    if op.kind == "loss":  # logits, or the gradient in their place
        kinds = ((op.saved, "logits", "microbatch"), (op.working, "logits", "backward"))
    return [
        Resident(
            layer=layer.name,
            category=category,
            repeat=layer.repeat,
            bytes=elements(*counts) * element_bytes,
            life=life,
            cut=op.cut,
            dtype=op.dtype,
        )
        for elements, category, life in kinds
        if elements != Poly()
    ]


def settle(work: Work) -> Work:
    """After the last technique: what a rank holds of parameters, gradients and optimizer, and what updating them asks,
    as it follows from the slots."""
    tasks: list[Task] = [*work.optimizer.collectives(work)]
    residents, rests = [], work.facts.rests
    for axis, origin in sorted({late for slot in work.slots for late in slot.late}):
        owed = [s for s in work.slots if (axis, origin) in s.late and not (s.copy_of or s.frozen)]
        late: dict[str, Any] = {"kind": "all_reduce", "axis": axis, "origin": origin}
        for share, left_out in ((1 - rests.share, {}), (rests.share, rests.weights)) if rests.share else ((1, {}),):
            size = sum(
                (s.repeat - left_out.get(s.layer, 0)) * s.stored(s.gradient_shards) * s.element_bytes for s in owed
            )
            here = (size > 0) * share
            tasks.append(Collective(**late, bytes=size, layer="", phase="step", repeat=here, per_step=True))
    has_older_versions = bool(np.any(work.facts.older_versions))
    keeps_gradients = bool(np.any(work.facts.keeps_gradients))
    updating: dict[str, Any] = {"kind": "memory", "role": "optimizer", "phase": "step"}
    # A tied weight's gradient is first made where the weight is used last.
    last_layers = {slot.copy_of: slot.layer for slot in work.slots if slot.copy_of}
    for slot in work.slots:
        if slot.copy_of:
            continue
        stored = slot.stored(slot.shards)
        common: dict[str, Any] = {"layer": slot.layer, "repeat": slot.repeat, "life": "always"}
        here = 1 - slot.host_share
        width = slot.element_bytes * here + slot.working_bytes * slot.host_share * (not slot.is_streamed)
        residents.append(Resident(category="parameters", bytes=stored * width, **common))
        if slot.frozen:
            continue
        state_bytes = work.optimizer.state_bytes_of(slot)
        for tier, share in slot.state_tiers or (("device", 1),):
            residents.append(Resident(category="optimizer", bytes=state_bytes * share, tier=tier, **common))
        residents += _gradients(work, slot, last_layers.get(f"{slot.layer}.{slot.name}"), keeps_gradients)
        older_bytes: Num = 0
        if has_older_versions:
            older_bytes = work.facts.older_versions * stored * slot.element_bytes
            residents.append(Resident(category="buffers", bytes=older_bytes, **common))
        # read gradient for the norm; read gradient, read and write parameter and state for the update; an older version
        # is read and written, a copy written. One kernel for very many parameters.
        widths = 2 * slot.gradient_bytes + 2 * slot.element_bytes + slot.copy_bytes
        moved = (stored * widths + 2 * state_bytes) * here + 2 * older_bytes
        moved = moved + stored * slot.working_bytes * slot.host_share  # the norm alone
        updated = rests.trained(slot.layer, slot.repeat)
        about: dict[str, Any] = {"layer": slot.layer, "name": slot.name, "repeat": updated}
        tasks.append(Compute(**updating, **about, moved_bytes=moved, kernels=0.0))
    trained = sum(slot.repeat for slot in work.slots if not (slot.frozen or slot.copy_of))
    tasks.append(Compute(**updating, layer="", name="update", repeat=1, kernels=UPDATE_LAUNCHES * trained))
    return work.with_tasks(*tasks).with_residents(*residents, *_made_gradients(work))


def _gradients(work: Work, slot: ParameterSlot, last_layer: str | None, is_kept: bool) -> list[Resident]:
    """Kept from step to step where somebody keeps them in one place to be summed, else made anew in each."""
    common: dict[str, Any] = {"category": "gradients", "layer": last_layer or slot.layer, "repeat": slot.repeat}
    size = slot.stored(slot.gradient_shards) * slot.gradient_bytes * (1 - slot.taken_share)
    if work.facts.frees_gradients and last_layer is None:
        return [Resident(**common, bytes=size, life="backward")]
    if not is_kept:
        return [Resident(**common, bytes=size, life="step")]
    kept = work.facts.keeps_gradients * (slot.gradient_shards == 1)
    return [
        Resident(**common, bytes=size * (1 - kept), life="step"),
        Resident(**common, bytes=size * kept, life="always"),
    ]


def _made_gradients(work: Work) -> list[Resident]:
    """A weight's gradient as it is computed, on its way into the one that is kept: one weight at a time."""
    widths = work.facts.widths
    # Narrow results: the parameters are copied to be used.
    width = widths.compute if widths.compute < widths.state else 0
    tied = {slot.copy_of for slot in work.slots if slot.copy_of}
    largest: dict[str, tuple[Num, Num]] = {}
    for slot in work.slots:
        if slot.frozen:
            continue
        is_added = (work.size("num_microbatches") > 1) | (f"{slot.layer}.{slot.name}" in tied)
        made = width if width < slot.gradient_bytes else 0
        size = slot.elements * (made + slot.element_bytes * is_added) * (slot.gradient_shards == 1)
        size = size * (slot.taken_share < 1)
        largest[slot.layer] = slot.repeat, np.maximum(largest.get(slot.layer, (0, 0))[1], size)
    return [
        Resident(layer=layer, category="working", repeat=repeat, bytes=size, life="backward")
        for layer, (repeat, size) in largest.items()
    ]


def statistics(work: Work, axis: str, origin: str) -> list[Collective]:
    """What batch norms send along an axis whose ranks see different samples: means and variances gathered forward, sums
    of gradients reduced backward."""
    width, sent, again = max(4, work.facts.widths.state), [], []
    sites = [(layer, site) for layer in work.profile.layers for site in layer.sites if site.kind == "statistics"]
    for layer, site in sites:
        size, repeat = site.elements(1, 1) * width, work.repeat_of(layer.name)
        common: dict[str, Any] = {"layer": layer.name, "axis": axis, "origin": origin}
        gather = common | {"kind": "all_gather", "bytes": size * work.size(axis)}
        sent.append(Collective(**gather, phase="forward", repeat=repeat))
        sent.append(Collective(**common, kind="all_reduce", phase="backward", repeat=repeat, bytes=size))
        if layer.name in work.facts.replays:
            again.append(Collective(**gather, phase="recompute", repeat=work.facts.replays[layer.name]))
    return [*sent, *again]


def _product(shape: Iterable[Num]) -> Num:
    total: Num = 1
    for size in shape:
        total = total * size
    return total
