"""Records of a few sizes -> ops, as polynomials in samples and sequence; as they run, and as a compiler would leave
them: chains of pointwise ops and reductions become one kernel each.

    matmul ──> [ norm  add  gate ] ──> matmul        one kernel: reads what enters the chain, writes what leaves it

Two fusible events are of one chain if one feeds the other and no product lies between them on any way. Kept for
backward is what products' gradients read; what only pointwise gradients read is computed again where that needs less
to be kept (torch's min-cut partitioner does so; it never recomputes what a product reads).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from meshwright.core.profile import FusedCost, Op, Poly, Role
from meshwright.foreign.trace_record import NORM_GRADIENTS, PRODUCTS, Label, OpEvent, Record, Storage, Touch

Points = Sequence[tuple[int, int]]
"""(samples, sequence) of each record."""


NEGLIGIBLE = 0.02
"""Of what is alive at a layer's fullest moment."""
TOLD = ("flops", "backward_flops", "saved")
"""Of what no polynomial fits, these; traffic of tables that all samples share never fits exactly."""
ROLES: dict[str, Role] = {
    **dict.fromkeys(("rms_norm", "native_layer_norm", "native_batch_norm", "native_group_norm"), "norm"),
    **dict.fromkeys(("gelu", "silu", "relu", "relu_", "sigmoid", "tanh", "leaky_relu", "hardtanh"), "activation"),
    **dict.fromkeys(("elu", "softplus", "mish"), "activation"),
    **dict.fromkeys(("rows_times", "outer", "_grouped_mm", "grouped_mm"), "experts"),
    "convolution": "convolution",
    "embedding": "embedding",
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d"), "pool"),
    "_to_copy": "cast",
}
"""Roles by the names of the operators that a module calls; the first that it calls any of is its own."""
WITH_STATISTICS = {"rms_norm", "rms_norm_backward", "native_layer_norm", "native_layer_norm_backward"}
WITH_STATISTICS |= {"native_batch_norm", "native_batch_norm_backward"}
"""Of 16-bit numbers they keep a few in float32, which are not told apart."""


class Key(NamedTuple):
    """One op of one layer."""

    layer: int
    path: str
    kind: str
    cut: str
    is_wide: bool
    shape: tuple[int, ...] = ()


Sums = dict[str, float]
Peaks = dict[tuple[int, bool], int]
"""(layer, whether backward) -> number of the event at which most is alive."""


@dataclass
class Summary:
    ops: dict[Key, Sums]
    operators: dict[Key, set[str]]
    """Names of the operators that each op calls going forward."""
    working: dict[tuple[int, str, bool], float]
    """(layer, cut, is wide) -> elements at its fullest moment."""
    peaks: Peaks
    num_events: int


def summarise(record: Record, sequence: int, peaks: Peaks | None = None) -> Summary:
    """`peaks`: of a record of the same events, so that the same moment is looked at."""
    ops: dict[Key, Sums] = defaultdict(lambda: defaultdict(float))
    operators: dict[Key, set[str]] = defaultdict(set)
    others: list[tuple[str, Key, OpEvent]] = []
    kept_instead = fuse(record)
    for event in record.events:
        if event.is_dropped:
            continue
        way, touches = "backward_" if event.is_backward else "", [*event.reads, *event.writes]
        key = _key(event, _bytes(touches, True) > _bytes(touches, False), sequence)
        ops[key][f"{way}kernels"] += event.products
        ops[key][f"{way}flops"] += event.flops
        if not event.is_backward:
            ops[key]["matrices"] += event.matrices
            ops[key]["count"] += 1
            operators[key].add(event.name)
        for is_wide, moved in _moved(event, touches):
            ops[_key(event, is_wide, sequence)][f"{way}moved"] += moved
        if event.kind not in PRODUCTS:
            others.append((way, key, event))
    for storage in record.storages:
        if storage.saver is not None and not storage.is_given:
            sums = ops[_saved_key(storage.saver, storage.is_wide)]
            sums["saved"] += storage.elements
            sums["fused_saved"] += 0.0 if storage.is_forgotten else storage.elements
    for way, key, event in others:
        ops[key][f"fused_{way}kernels"] += event.fused_kernels
        for is_wide, moved in _moved(event, event.fused_touches):
            ops[_key(event, is_wide, sequence)][f"fused_{way}moved"] += moved
    for event, storage in kept_instead:
        ops[_saved_key(event.label, storage.is_wide)]["fused_saved"] += storage.elements
    working, peaks = _working(record, peaks)
    return Summary(dict(ops), operators, working, peaks, len(record.events))


def _key(event: OpEvent, is_wide: bool, sequence: int) -> Key:
    """A product's gradient is of the product's op."""
    own = event.forward if event.kind == "matmul" and event.forward is not None else event
    label = own.label
    shape: tuple[int, ...] = ()
    if own.kind in PRODUCTS:
        is_wide = own.writes[0].is_wide
        shape = tuple(0 if size == sequence else size for size in own.shape)
    if event.kind == "attention" and event.is_backward and event.forward is not None:
        shape = tuple(0 if size == sequence else size for size in event.forward.shape)
    kind = "memory" if own.kind == "unknown" else own.kind
    return Key(label.layer, _folded(label.path), kind, label.cut, is_wide, shape)


def _folded(path: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def _bytes(touches: Iterable[Touch], is_wide: bool) -> float:
    return sum(touch.elements * (4 if is_wide else 2) for touch in touches if touch.is_wide == is_wide)


def _moved(event: OpEvent, touches: list[Touch]) -> list[tuple[bool, float]]:
    """Elements of either width; a product is one op of one width, whatever it reads."""
    if event.kind in PRODUCTS:
        is_wide = (event.forward or event).writes[0].is_wide
        total = _bytes(touches, True) + _bytes(touches, False)
        return [(is_wide, total / (4 if is_wide else 2))]
    floats = [touch for touch in touches if not touch.is_index]
    narrow, wide = _bytes(floats, False), _bytes(floats, True)
    total = _bytes(touches, False) + _bytes(touches, True)
    if event.name in WITH_STATISTICS and narrow > wide:
        wide = 0.0
    if not narrow or not wide:
        return [(not narrow, total / (2 if narrow else 4))] if touches else []
    counted = total - narrow - wide  # go with what is wide, being of its size
    return [(False, narrow / 2), (True, (wide + counted) / 4)]


def _saved_key(label: Label, is_wide: bool) -> Key:
    return Key(label.layer, _folded(label.path), "loss" if label.role == "loss" else "memory", label.cut, is_wide)


def _working(record: Record, peaks: Peaks | None) -> tuple[dict[tuple[int, str, bool], float], Peaks]:
    """Live bytes that nobody keeps, where they are most; not parameters, inputs or parameters' gradients."""
    count = len(record.events)
    passing = [
        s
        for s in record.storages
        if not (s.is_given or s.is_input or s.is_gradient or s.saver is not None or not s.bytes)
    ]
    change = np.zeros(count + 1)
    for storage in passing:
        change[min(storage.birth, count)] += storage.bytes
        change[min(storage.death, count)] -= storage.bytes
    alive = np.cumsum(change)
    if peaks is None:
        peaks = {}
        for event in record.events:
            place = event.label.layer, event.is_backward
            if place not in peaks or alive[event.number] > alive[peaks[place]]:
                peaks[place] = event.number
    working: dict[tuple[int, str, bool], float] = {}
    for layer in {layer for layer, _ in peaks}:
        moments = [peaks[layer, way] for way in (False, True) if (layer, way) in peaks]
        fullest = max(moments, key=lambda number: alive[number])
        for storage in passing:
            if storage.birth <= fullest < storage.death and storage.bytes > NEGLIGIBLE * alive[fullest]:
                part = layer, storage.label.cut, storage.is_wide
                working[part] = working.get(part, 0.0) + storage.elements
    return working, peaks


def fit(points: Points, values: Sequence[float], has_sequence: bool, is_signed: bool = False) -> Poly:
    """The polynomial through the values at these (samples, sequence); without terms below zero, unless `is_signed`."""
    if not any(values):
        return Poly()
    terms = np.array([[1.0, b, b * s, b * s * s] if has_sequence else [1.0, b] for b, s in points])
    largest = np.abs(terms).max(axis=0)
    solved = np.linalg.lstsq(terms / largest, np.array(values), rcond=None)[0]
    scale = max(map(abs, values))
    factors = []
    for x, top in zip(solved, largest, strict=True):
        factor = float(x / top) if (abs(x) if is_signed else x) > 1e-7 * scale else 0.0
        near = round(factor * 24) / 24  # elements, and halves, quarters and thirds of them
        factors.append(near if abs(factor - near) < 1e-5 * max(1.0, abs(factor)) else factor)
    names = ("one", "b", "bs", "bss") if has_sequence else ("one", "b")
    return Poly(**dict(zip(names, factors, strict=True)))


def ops_of(
    layer: int, summaries: Sequence[Summary], points: Points, has_sequence: bool, is_block: bool, rows: Sequence[str]
) -> tuple[tuple[Op, ...], list[str]]:
    """The layer's ops, and the names of those that no polynomial fits. `rows`: linears whose inputs a cut divides."""
    largest = summaries[-1]
    unfitted: list[str] = []
    totals = {name: sum(sums.get(name, 0.0) for sums in largest.ops.values()) for name in TOLD}
    ops = []
    for key in (key for key in largest.ops if key.layer == layer):
        name = f"{key.path or 'own'}.{key.kind}" + (".wide" if key.is_wide else "")

        def of(quantity: str, key: Key = key, name: str = name) -> Poly:
            values = [summary.ops.get(key, {}).get(quantity, 0.0) for summary in summaries]
            poly = fit(points, values, has_sequence)
            if quantity in TOLD and values[-1] > NEGLIGIBLE * totals[quantity]:
                pairs = zip(points, values, strict=True)
                if not all(abs(poly(b, s) - value) <= 0.05 * abs(value) + 1 for (b, s), value in pairs):
                    unfitted.append(name)
            return poly

        ops.append(_op(key, name, largest, of, is_block, rows))
    for (place, cut, is_wide), _ in sorted(largest.working.items()):
        if place == layer:
            values = [summary.working.get((place, cut, is_wide), 0.0) for summary in summaries]
            dtype = "float32" if is_wide else "compute"
            name = f"moment.{cut}" + (".wide" if is_wide else "")
            working = fit(points, values, has_sequence)
            ops.append(Op(name=name, kind="memory", working=working, dtype=dtype, cut=cut))  # type: ignore[arg-type]
    return tuple(ops), list(dict.fromkeys(unfitted))


def _op(key: Key, name: str, summary: Summary, of: Callable[[str], Poly], is_block: bool, rows: Sequence[str]) -> Op:
    sums, operators = summary.ops[key], summary.operators.get(key, set())
    role: Role = next((role for name, role in ROLES.items() if name in operators), "")
    if key.kind in ("attention", "loss"):
        role = key.kind  # type: ignore[assignment]
    elif key.kind == "matmul":  # whether one factor is a weight is not recorded
        role = role if role in ("experts", "convolution") else "matmul"
    elif not key.path and is_block:
        role = "block"
    fused = None
    if key.kind not in PRODUCTS:
        counts = {name: sums.get(f"fused_{name}", 0.0) for name in ("kernels", "backward_kernels")}
        moves = {name: of(f"fused_{name}") for name in ("moved", "backward_moved", "saved")}
        fused = FusedCost(**moves, **counts)  # type: ignore[arg-type]
    matrices = Poly(one=1.0)
    if key.kind == "matmul" and sums.get("count"):
        total, count = of("matrices"), sums["count"]
        matrices = Poly(one=total.one / count, b=total.b / count, bs=total.bs / count, bss=total.bss / count)
    about: dict[str, Any] = {"kind": key.kind, "role": role, "cut": key.cut, "shape": key.shape}
    about |= {name: of(name) for name in ("flops", "backward_flops", "moved", "backward_moved", "saved")}
    about |= {name: sums.get(name, 0.0) for name in ("kernels", "backward_kernels")}
    dtype: Any = "float32" if key.is_wide else "compute"
    cut_dim: Any = "k" if key.path in rows else "n" if matrices == Poly(one=1.0) else "matrices"
    return Op(name=name, dtype=dtype, matrices=matrices, cut_dim=cut_dim, fused=fused, **about)


def fuse(record: Record) -> list[tuple[OpEvent, Storage]]:
    """What a compiler leaves of the events is written into them and their storages; returned are the storages that are
    kept in place of those that are computed again, and the events that read them."""
    kept_instead: list[tuple[OpEvent, Storage]] = []
    scopes: dict[tuple[int, bool], list[OpEvent]] = defaultdict(list)
    for event in record.events:
        if not event.is_dropped:
            scopes[event.label.layer, event.is_backward].append(event)
    readers: dict[int, list[OpEvent]] = defaultdict(list)
    for event in record.events:
        for touch in event.reads:
            readers[id(touch.storage)].append(event)
    for (_, is_backward), events in scopes.items():
        for group in _groups(events):
            _charge(group, events[-1].number, readers)
            if not is_backward and group[0].is_fusible:
                kept_instead += _recompute(group, readers)
    return kept_instead


def _groups(events: list[OpEvent]) -> Iterable[list[OpEvent]]:
    """Chains, and every other event by itself."""
    # Whose results each event reads, and who reads its own.
    makers: dict[int, set[int]] = {}
    users: dict[int, set[int]] = defaultdict(set)
    writer: dict[int, int] = {}
    for event in events:
        makers[event.number] = {writer[id(touch.storage)] for touch in event.reads if id(touch.storage) in writer}
        for maker in makers[event.number]:
            users[maker].add(event.number)
        for touch in event.writes:
            writer[id(touch.storage)] = event.number
    # How many products lie before each event on its longest way; what can be fused waits for who reads it.
    fusible = {event.number for event in events if event.is_fusible}
    level: dict[int, int] = {}
    for event in events:
        ahead = (level[maker] + (maker not in fusible) for maker in makers[event.number])
        level[event.number] = max(ahead, default=0)
    for event in reversed(events):
        if event.number in fusible and users[event.number]:
            level[event.number] = min(level[user] for user in users[event.number])
    parent = {event.number: event.number for event in events}

    def root(number: int) -> int:
        while parent[number] != number:
            number = parent[number]
        return number

    reader: dict[tuple[int, int, float], int] = {}
    for event in events:
        if event.number not in fusible:
            continue
        for maker in makers[event.number]:
            if maker in fusible and level[maker] == level[event.number]:
                parent[root(event.number)] = root(maker)
        for touch in event.reads:  # side by side, where they read the same
            if touch.elements > 1 and not touch.storage.is_given:
                place = id(touch.storage), level[event.number], touch.elements
                parent[root(event.number)] = root(reader.setdefault(place, event.number))
    groups: dict[int, list[OpEvent]] = defaultdict(list)
    for event in events:
        groups[root(event.number)].append(event)
    return groups.values()


def _charge(group: list[OpEvent], end: int, readers: dict[int, list[OpEvent]]) -> None:
    numbers = {event.number for event in group}
    made: set[int] = set()
    left: dict[int, float] = {}
    for event in group:
        for touch in event.reads:
            key = id(touch.storage)
            # In pieces, perhaps several times: no more than there is.
            there = min(touch.elements, left.setdefault(key, touch.storage.elements))
            if key not in made and there > 0:
                left[key] -= there
                event.fused_touches.append(touch._replace(elements=there))
        made |= {id(touch.storage) for touch in event.writes}
    last = {id(touch.storage): (event, touch) for event in group for touch in event.writes}
    for key, (event, touch) in last.items():
        leaves = touch.storage.saver is not None or touch.storage.death > end + 1
        if leaves or any(reader.number not in numbers for reader in readers[key] if reader.number > event.number):
            event.fused_touches.append(touch)
    group[0].fused_kernels += 1
    for event in group:
        if event.name in NORM_GRADIENTS:
            event.fused_kernels += 1
            event.fused_touches += event.reads[:2]


def _recompute(group: list[OpEvent], readers: dict[int, list[OpEvent]]) -> list[tuple[OpEvent, Storage]]:
    made = {id(touch.storage): touch.storage for event in group for touch in event.writes}
    forgotten = [
        storage
        for key, storage in made.items()
        if storage.saver is not None
        and storage.saver.layer == group[0].label.layer
        and all(e.is_fusible for e in readers[key] if e.is_backward)
    ]
    entering = {
        id(touch.storage): (event, touch.storage)
        for event in reversed(group)
        for touch in event.reads
        if id(touch.storage) not in made and not touch.storage.is_given
    }
    instead = [item for item in entering.values() if item[1].saver is None]
    if not forgotten or sum(s.bytes for _, s in instead) >= sum(s.bytes for s in forgotten):
        return []
    for storage in forgotten:
        storage.is_forgotten = True
    return instead
