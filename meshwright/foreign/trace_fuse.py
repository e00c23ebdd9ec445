"""What a compiler would leave of a record: chains of pointwise ops and reductions become one kernel each.

    matmul ──> [ norm  add  gate ] ──> matmul        one kernel: reads what enters the chain, writes what leaves it

Two fusible events are of one chain if one feeds the other and no product lies between them on any way. Kept for
backward is what products' gradients read; what only pointwise gradients read is computed again where that needs less
to be kept (torch's min-cut partitioner does so; it never recomputes what a product reads).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from meshwright.foreign.trace_record import NORM_GRADIENTS, OpEvent, Record, Storage, Touch


@dataclass
class FusedEvents:
    """By number of the event that is charged."""

    moved: dict[int, list[Touch]] = field(default_factory=lambda: defaultdict(list))
    kernels: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    forgotten: set[int] = field(default_factory=set)
    """Storages (by id) that are no longer kept."""
    kept_instead: list[tuple[OpEvent, Storage]] = field(default_factory=list)


def fuse(record: Record) -> FusedEvents:
    found = FusedEvents()
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
            _charge(group, events[-1].number, readers, found)
            if not is_backward and group[0].is_fusible:
                _recompute(group, readers, found)
    return found


def _groups(events: list[OpEvent]) -> Iterable[list[OpEvent]]:
    """Chains, and every other event by itself."""
    makers, users = _makers(events)
    level = _levels(events, makers, users)
    parent = {event.number: event.number for event in events}

    def root(number: int) -> int:
        while parent[number] != number:
            number = parent[number]
        return number

    fusible = {event.number for event in events if event.is_fusible}
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


def _makers(events: list[OpEvent]) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """Whose results each event reads, and who reads its own."""
    makers: dict[int, set[int]] = {}
    users: dict[int, set[int]] = defaultdict(set)
    writer: dict[int, int] = {}
    for event in events:
        makers[event.number] = {writer[id(touch.storage)] for touch in event.reads if id(touch.storage) in writer}
        for maker in makers[event.number]:
            users[maker].add(event.number)
        for touch in event.writes:
            writer[id(touch.storage)] = event.number
    return makers, users


def _levels(events: list[OpEvent], makers: dict[int, set[int]], users: dict[int, set[int]]) -> dict[int, int]:
    """How many products lie before each event on its longest way; what can be fused waits for who reads it."""
    by_number = {event.number: event for event in events}
    level: dict[int, int] = {}
    for event in events:
        ahead = (level[maker] + (not by_number[maker].is_fusible) for maker in makers[event.number])
        level[event.number] = max(ahead, default=0)
    for event in reversed(events):
        if event.is_fusible and users[event.number]:
            level[event.number] = min(level[user] for user in users[event.number])
    return level


def _charge(group: list[OpEvent], end: int, readers: dict[int, list[OpEvent]], found: FusedEvents) -> None:
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
                found.moved[event.number].append(touch._replace(elements=there))
        made |= {id(touch.storage) for touch in event.writes}
    last = {id(touch.storage): (event, touch) for event in group for touch in event.writes}
    for key, (event, touch) in last.items():
        leaves = touch.storage.saver is not None or touch.storage.death > end + 1
        if leaves or any(reader.number not in numbers for reader in readers[key] if reader.number > event.number):
            found.moved[event.number].append(touch)
    found.kernels[group[0].number] += 1
    for event in group:
        if event.name in NORM_GRADIENTS:
            found.kernels[event.number] += 1
            found.moved[event.number] += event.reads[:2]


def _recompute(group: list[OpEvent], readers: dict[int, list[OpEvent]], found: FusedEvents) -> None:
    made = {id(touch.storage): touch.storage for event in group for touch in event.writes}
    forgotten = [
        storage
        for key, storage in made.items()
        if storage.saver is not None
        and storage.saver.layer == group[0].label.layer
        and all(e.is_fusible for e in readers[key] if e.is_backward)
    ]
    inside = set(made)
    entering = {
        id(touch.storage): (event, touch.storage)
        for event in reversed(group)
        for touch in event.reads
        if id(touch.storage) not in inside and not touch.storage.is_given
    }
    instead = [item for item in entering.values() if item[1].saver is None]
    if forgotten and sum(s.bytes for _, s in instead) < sum(s.bytes for s in forgotten):
        found.forgotten |= {id(storage) for storage in forgotten}
        found.kept_instead += instead
