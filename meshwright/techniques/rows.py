"""Share embedding tables out to ranks that see different samples: each looks up for all the others.

What: ranks along `emb` run different samples through the dense part, whose gradients they sum once a step. Of the
tables each has a share: of every table 1/n of the rows (`by = "rows"`), or whole tables dealt out largest first, so
that bytes balance (`by = "tables"`). Ids go to whoever has the row, vectors come back; going backward, the gradients
of the vectors take the way of the ids.
When it helps: tables are most of the model, as in recommendation: of a table only the rows that were asked for travel,
where `replicate` would sum and `shard` would gather all of it.
When it does not: tables are small (two exposed exchanges a look-up). By rows, where a few hot ids are asked for all the
time, their owner is; by tables, where one table is larger than a device, or tables are few and uneven.
Cost: per microbatch all_to_alls of b·T ids (8 bytes each; by rows also n·T counts) and b·T·d vectors forward, of their
gradients backward; an all_reduce of the dense gradients per step (Naumov et al. 2019; Mudigere et al. 2022). Bytes are
the mean over the ranks, what stays at home included: exact whatever the ids are, and whoever has more of the tables.
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
from meshwright.core.work import Collective, Compute, Num, ParameterSlot, Resident, Work, replace, statistics

_ID_BYTES = 8
_COPIES = 3
"""Times that a vector is copied on its way, beside its look-up: put together, in order of the askers, of the asker."""


@dataclass(frozen=True, kw_only=True)
class Rows(Technique):
    name: ClassVar[str] = "rows"
    phase: ClassVar[str] = "split"
    axis: ClassVar[str] = "emb"
    closeness: ClassVar[int] = 2
    splits_samples: ClassVar[bool] = True
    sums_late: ClassVar[bool] = True

    size: int
    """Ranks that share the tables."""
    by: Literal["rows", "tables"] = "rows"
    """What is shared out: the rows of every table, or whole tables."""

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        rows = _rows_of(_layer_of(profile))
        sizes = tuple(size for size in axis_sizes(cluster) if rows and size <= max(rows))
        return (Axis("size", sizes), Choice("by", ("rows", "tables"))) if sizes else ()

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
        return ()

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

        work = self._thinned(work, layer, sum(kept) / sum(rows), answers / len(rows))
        work = self._with_copies(work, layer, answers)
        work = work.map_slots(slot).owing(self.axis, self.name, "rows")
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
        from meshwright.ops.table_lookup import Lookup

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
        build.sum_rest_late(self)
        build.model.share_statistics(group, self.size)
        tables = _module_of(build)
        tables.look_up = Lookup(tables.tables, first, step, group, build.mesh.device, is_whole=is_whole)

    def _set_aside(self, build: Build, aside: list[Any]) -> None:
        """Keep what this rank has no row of from wrappers: FSDP's reduction refuses tensors without elements."""
        from meshwright.ops.table_lookup import take_out_empty

        aside += take_out_empty(_module_of(build))

    def _put_back(self, build: Build, aside: list[Any]) -> None:
        from meshwright.ops.table_lookup import put_back

        put_back(aside, build.dtype, build.mesh.device)


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
