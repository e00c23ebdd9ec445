"""Share embedding tables out to ranks that see different samples: each looks up for all the others.

What: ranks along `emb` run different samples through the dense part, whose gradients they sum once a step. Of the
tables each has a share: of every table 1/n of the rows (`by = "rows"`), or whole tables dealt out largest first, so
that bytes balance (`by = "tables"`). Ids go to whoever has the row, vectors come back; going backward, the gradients
of the vectors take the way of the ids. With `tier = "host"` a rank's share, with its optimizer states, lies in host
memory, also of one rank alone: each row that a microbatch asks for is copied to the device once (on one rank while the
layers before the look-up run), the sum of its gradients back once, and the host updates those rows.
When it helps: tables are most of the model, as in recommendation: of a table only the rows that were asked for travel,
where `replicate` would sum and `shard` would gather all of it. On the host: tables do not fit on the devices.
When it does not: tables are small (two exposed exchanges a look-up). By rows, where a few hot ids are asked for all the
time, their owner is; by tables, where one table is larger than a device, or tables are few and uneven. On the host:
only for optimizers that leave a row without a gradient alone (row-wise Adagrad, SGD without momentum).
Cost: per microbatch all_to_alls of b·T ids (8 bytes each; by rows also n·T counts) and b·T·d vectors forward, of their
gradients backward; an all_reduce of the dense gradients per step (Naumov et al. 2019; Mudigere et al. 2022). Bytes are
the mean over the ranks, what stays at home included: exact whatever the ids are, and whoever has more of the tables.
On the host: copies of at most min(b, rows) rows of each table either way, fewer where ids repeat; the host's own reads
and writes of these rows at the rate of its copies (not priced: a pass over all rows where they decay).
Exactness: reordered: the order of sums over samples changes. Axis: emb.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Layer, Profile
from meshwright.core.technique import Axis, Choice, Option, Technique, axis_sizes
from meshwright.core.work import Collective, Compute, Copy, Num, ParameterSlot, Resident, Work, replace, statistics

_ID_BYTES = 8
_COPIES = 3
"""Times that a vector is copied on its way, beside its look-up: put together, in order of the askers, of the asker."""
_PASSES = 24
"""Times that an id is read or written on the device to find the distinct ones: a sort by 8 bits at a time."""


@dataclass(frozen=True, kw_only=True)
class Rows(Technique):
    name: ClassVar[str] = "rows"
    phase: ClassVar[str] = "split"
    axis: ClassVar[str] = "emb"
    closeness: ClassVar[int] = 2
    splits_samples: ClassVar[bool] = True
    sums_late: ClassVar[bool] = True
    later_settings: ClassVar[tuple[str, ...]] = ("tier",)

    size: int
    """Ranks that share the tables."""
    by: Literal["rows", "tables"] = "rows"
    """What is shared out: the rows of every table, or whole tables."""
    tier: Literal["device", "host"] = "device"
    """The memory that holds the tables and their optimizer states."""

    @property
    def acts_alone(self) -> bool:
        return self.tier == "host"

    joins_gradients = acts_alone

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        rows = _rows_of(_layer_of(profile))
        sizes = tuple(size for size in axis_sizes(cluster) if rows and size <= max(rows))
        rescues = ("host",) if rows and cluster.tiers["host"].bytes else ()
        tier = Choice("tier", ("device",), rescues, moves_base=bool(rescues))
        return (Axis("size", sizes), Choice("by", ("rows", "tables")), tier) if sizes or rescues else ()

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        rows = _rows_of(_layer_of(profile))
        if not rows:
            what = f"{profile.name} has no embedding tables whose rows could be shared out."
            return (self.problem(what, "Leave rows out: shard shares out any parameter."),)
        if self.by == "tables" and self.size > len(rows):
            what = f"{len(rows)} tables cannot be dealt to {self.size} ranks (axis emb)."
            return (self.problem(what, f'Use a size of 1 to {len(rows)}, or by = "rows".'),)
        if self.size > max(rows):
            what = f"{max(rows)} rows of the largest table cannot be shared by {self.size} ranks (axis emb)."
            return (self.problem(what, f"Use a size of 1 to {max(rows)}."),)
        problems = []
        for other in plan.techniques if self.tier == "host" else ():
            why = "shares samples or layers out too" if other.axis and other is not self else ""
            why = "updates whole parameters, not rows" if other.updates_each_alone or other.takes_gradients else why
            if why:
                fix = f'Leave out {other.name} (size = {plan.num_ranks}), or use tier = "device".'
                problems.append(self.problem(f"tables are in host memory, and {other.name} {why}.", fix))
        if self.tier == "host" and cluster is not None and not cluster.tiers["host"].bytes:
            problems.append(self.problem(f"nothing is known of the hosts of {cluster.name}.", "Measure: mw probe."))
        return tuple(problems)

    def refused_optimizer(self, optimizer: Any) -> Problems:
        if self.tier == "device" or optimizer.takes_rows:
            return ()
        what = "this optimizer changes all rows of a table in every step, tables in host memory those looked up."
        fix = 'Use rowwise_adagrad, sgd with momentum = 0, or tier = "device".'
        return (self.problem(what, fix),)

    def price(self, work: Work) -> Work:
        layer = _layer_of(work.profile)
        if layer is None:
            return work.owing(self.axis, self.name)
        rows, ways = _rows_of(layer), work.size(self.axis)
        kept = [-(-each // ways) for each in rows]
        answers: Num = len(rows)  # look-ups that the busiest rank does, for each sample of its own
        if self.by == "tables":
            *kept, answers = _for_each_size(ways, lambda size: _fullest(rows, size))
        held = {param.name: count for param, count in zip(_tables_of(layer), kept, strict=True)}

        def slot(item: ParameterSlot) -> ParameterSlot:
            is_table = item.shared_out == "rows"
            return replace(item, shape=(held[item.name], *item.shape[1:])) if is_table else item

        owned = sum(kept) / sum(rows) if self.tier == "device" else 0  # on the host, tables have no dense gradient
        work = self._thinned(work, layer, owned, answers / len(rows))
        work = self._with_copies(work, layer, answers).map_slots(slot)
        if self.tier == "host":
            work = self._on_host(work, layer, kept, answers)
        work = work.owing(self.axis, self.name, "rows")
        return work.with_tasks(*self._exchanges(work, layer), *statistics(work, self.axis, self.name))

    def _thinned(self, work: Work, layer: Layer, owned: Num, crowding: Num) -> Work:
        """What this rank has of the tables, and does of the look-ups."""
        counts = work.size("microbatch"), work.size("sequence"), work.size("sequence_parts")
        ops = {op.name: op for op in layer.ops}

        def task(item: Any) -> Any:
            if not isinstance(item, Compute) or item.layer != layer.name or item.kind != "gather":
                return item
            poly = ops[item.name].backward_moved if item.phase == "backward" else ops[item.name].moved
            by_rows = item.moved_bytes * (poly.one / poly(*counts))
            by_samples = item.moved_bytes - by_rows
            # As differences: an axis of one rank must change nothing, not even the last bit.
            moved = item.moved_bytes - by_rows * (1 - owned) + by_samples * (crowding - 1)
            return replace(item, moved_bytes=moved)

        def resident(item: Resident) -> Resident:
            is_table = item.layer == layer.name and item.category == "gathered"
            return replace(item, bytes=item.bytes * owned) if is_table else item

        return work.map_tasks(task).map_residents(resident)

    def _with_copies(self, work: Work, layer: Layer, answers: Num) -> Work:
        """What the exchange moves and keeps here."""
        answered = answers * _vector_bytes(work, layer)
        ids = work.size("microbatch") * (len(_tables_of(layer)) + answers) * _ID_BYTES
        common: dict[str, Any] = {"layer": layer.name, "origin": self.name}
        common["repeat"] = (work.size(self.axis) > 1) * 1
        moved: dict[str, Any] = {"name": "exchange", "kind": "memory", "moved_bytes": 2 * _COPIES * answered}
        # Where each id stood and where each answer goes; a message and what it is made of.
        orders = Resident(**common, category="activations", bytes=ids, life="microbatch")
        messages = Resident(**common, category="working", bytes=(1 + _COPIES) * answered, life="moment")
        work = work.with_tasks(
            Compute(**common, **moved, phase="forward"), Compute(**common, **moved, phase="backward")
        )
        return work.with_residents(orders, messages)

    def _on_host(self, work: Work, layer: Layer, kept: Sequence[Num], answers: Num) -> Work:
        """Tables and states off the device; of a microbatch the distinct rows, at most, as they come and go."""
        slots = [slot for slot in work.slots if slot.shared_out == "rows"]
        ways, microbatch, count = (work.size(name) for name in (self.axis, "microbatch", "num_microbatches"))
        asked = microbatch * (ways if self.by == "tables" else 1)  # of each table that is here
        rows, updated = (sum(np.minimum(each, asked * times) for each in kept) for times in (1, count))
        is_trained, width = any(not slot.frozen for slot in slots), slots[0].element_bytes
        vector, ids = slots[0].shape[1] * width, microbatch * answers * _ID_BYTES
        size, back = rows * vector, rows * vector * is_trained
        common: dict[str, Any] = {"layer": layer.name, "repeat": slots[0].repeat, "origin": self.name}
        task: dict[str, Any] = {"name": "distinct", "kind": "memory", "phase": "forward"}

        def copy(source: Any, target: Any, phase: Any, size: Num) -> Copy:
            return Copy(**common, source=source, target=target, phase=phase, bytes=size, per_step=phase == "step")

        def held(category: Any, size: Num, life: Any = "always", tier: Any = "host") -> Resident:
            return Resident(**common, category=category, bytes=size, life=life, tier=tier)

        work = replace(work, slots=tuple(slot for slot in work.slots if slot.shared_out != "rows"))
        is_elsewhere = work.size("batch") // (microbatch * count) != ways
        is_elsewhere |= width < slots[0].state_width
        work = self.forbid(work.forbid(is_elsewhere)).with_facts(joins_gradients=True)
        work = work.with_tasks(
            copy("device", "host", "forward", rows * _ID_BYTES),
            copy("host", "host", "forward", size),
            copy("host", "device", "forward", size),
            copy("device", "host", "backward", back),
            # Of each row its gradient and its value are read, and the value is written.
            copy("host", "host", "step", 1.5 * updated * vector * is_trained),
            Compute(**common, **task, moved_bytes=_PASSES * ids, kernels=_PASSES // 2),
        )
        return work.with_residents(
            held("parameters", sum(slot.elements * width for slot in slots)),
            held("optimizer", sum(work.optimizer.state_bytes_of(slot) for slot in slots if not slot.frozen)),
            # Rows on their way, and gradients: of each microbatch, and of all of them together.
            held("buffers", size + (count + (count > 1)) * (back + rows * _ID_BYTES)),
            held("activations", size + ids, "microbatch", "device"),
            held("working", back, "backward", "device"),
        )

    def _exchanges(self, work: Work, layer: Layer) -> list[Collective]:
        tables = _tables_of(layer)
        num_tables = len(tables)
        common: dict[str, Any] = {"layer": layer.name, "kind": "all_to_all", "axis": self.axis, "origin": self.name}
        repeat = work.repeat_of(layer.name)
        goes_back = repeat * any(not param.frozen for param in tables)
        vectors = num_tables * _vector_bytes(work, layer)
        sent = [work.size("microbatch") * num_tables * _ID_BYTES, vectors]
        if self.by == "rows":  # how many ids of each table
            sent.insert(0, work.size(self.axis) * num_tables * _ID_BYTES)
        return [
            *(Collective(**common, phase="forward", repeat=repeat, bytes=size) for size in sent),
            Collective(**common, phase="backward", repeat=goes_back, bytes=vectors),
        ]

    def apply(self, build: Build) -> None:
        aside: list[Any] = []
        build.at("split", self._split)
        build.at("wrap", lambda build: self._set_aside(build, aside))
        build.at("optimizer", lambda build: self._put_back(build, aside))

    def _split(self, build: Build) -> None:
        from meshwright.ops.table_lookup import HostTables, Lookup

        group, index = build.mesh.group(self.axis), build.mesh.index(self.axis)
        rows = _rows_of(_layer_of(build.profile))
        names = [name for name, param in build.named_params() if param.shared_out == "rows"]
        is_whole = self.by == "tables"
        first = _dealt(rows, self.size) if is_whole else (0,) * len(rows)
        step = rows if is_whole else [-(-each // self.size) for each in rows]
        for name, owner in zip(names, first, strict=True):
            # The second of one piece is what lies behind it: nothing.
            piece, pieces = (int(owner != index), 1) if is_whole else (index, self.size)
            build.cut(name, 0, piece, pieces, self.axis)
        tables = _module_of(build)
        find: Any = lambda ids: [table(each) for table, each in zip(tables.tables, ids, strict=True)]  # noqa: E731
        if self.tier == "host":
            find = HostTables(tables.tables, build.mesh.device)
            build.add_exchange(self, find)
            if self.size == 1:
                build.model.register_forward_pre_hook(lambda *_: find.mark())
                tables.look_up = lambda ids, dtype: [vectors.to(dtype) for vectors in find(ids.unbind(1))]
                return
        build.sum_rest_late(self)
        build.model.share_statistics(group, self.size)
        tables.look_up = Lookup(find, first, step, group, build.mesh.device, is_whole=is_whole)

    def _set_aside(self, build: Build, aside: list[Any]) -> None:
        """Keep what this rank has no row of from wrappers: FSDP's reduction refuses tensors without elements."""
        from meshwright.ops.table_lookup import HOST, take_out_empty

        tables = _module_of(build)
        aside += take_out_empty(tables)
        if self.tier == "host":
            build.materialise(tables.parameters(), HOST)

    def _put_back(self, build: Build, aside: list[Any]) -> None:
        from meshwright.ops.table_lookup import HOST, put_back

        put_back(aside, build.dtype, HOST if self.tier == "host" else build.mesh.device)


def _module_of(build: Build) -> Any:
    layer = _layer_of(build.profile)
    return next(part.module for part in build.model.parts() if layer is not None and part.kind == layer.name)


def _layer_of(profile: Profile) -> Layer | None:
    return next((layer for layer in profile.layers if _tables_of(layer)), None)


def _tables_of(layer: Layer) -> list[Any]:
    return [param for param in layer.params if param.shared_out == "rows"]


def _rows_of(layer: Layer | None) -> list[int]:
    return [] if layer is None else [param.shape[0] for param in _tables_of(layer)]


def _vector_bytes(work: Work, layer: Layer) -> Num:
    """Bytes of the vectors that a microbatch looks up in one table."""
    width = work.facts.widths.compute
    return work.size("microbatch") * _tables_of(layer)[0].shape[1] * width


def _dealt(rows: Sequence[int], ways: int) -> tuple[int, ...]:
    """The rank of every table: largest first to whoever has least; the fullest rank is rank 0."""
    totals, dealt = [0] * ways, [0] * len(rows)
    for table in sorted(range(len(rows)), key=lambda table: (-rows[table], table)):
        rank = totals.index(min(totals))
        dealt[table] = rank
        totals[rank] += rows[table]
    ranking = sorted(range(ways), key=lambda rank: (-totals[rank], rank))
    return tuple(ranking.index(rank) for rank in dealt)


def _fullest(rows: Sequence[int], ways: int) -> tuple[int, ...]:
    """The rows of each table that rank 0 has; and the look-ups the busiest rank does for each sample of its own."""
    dealt = _dealt(rows, ways)
    most = max(dealt.count(rank) for rank in set(dealt))
    return (*(count * (owner == 0) for count, owner in zip(rows, dealt, strict=True)), most * ways)


def _for_each_size(ways: Num, numbers: Callable[[int], Sequence[int]]) -> list[Num]:
    """`numbers` of a size, each an array where sizes are."""
    if not isinstance(ways, np.ndarray):
        return list(numbers(int(ways)))
    known = {size: numbers(size) for size in set(ways.ravel().tolist())}
    columns = zip(*(known[size] for size in ways.ravel().tolist()), strict=True)
    return [np.array(column).reshape(ways.shape) for column in columns]
