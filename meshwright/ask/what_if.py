"""`memory=+20GiB`, `outer=x2`, `nodes=+1`: the question with a machine or a batch that one does not have."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.ask.question import Outcome, Question, outcome, with_devices
from meshwright.ask.sizes import node_width, reshaped, resized
from meshwright.core.cluster import MOST_DEVICES, Device, Link
from meshwright.core.errors import MeshwrightError, Problem, nearest, raise_problems
from meshwright.core.units import GIB, MIB
from meshwright.models.presets import sequence_problem
from meshwright.planner.search import ScoredPlan

_FORM = re.compile(r"^([+x*-]?)([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,2})?)\s*([A-Za-z/%]*)$")
_MOST = 1e18
"""Above, floats and people lose count."""

MEMORY = {"B": 1, "KiB": 1024, "MiB": MIB, "GiB": GIB, "TiB": 1024**4, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
RATE = {"kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}
RATE |= {"Mb/s": 1e6 / 8, "Gb/s": 1e9 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8}
COUNT = {"": 1.0}
FACTOR: dict[str, float] = {}
"""Nothing but times and percent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    how: str
    """`+` and `-` add, `x` multiplies, `` sets."""
    value: float

    def of(self, before: float) -> float:
        value = self.value
        return {"": value, "+": before + value, "-": before - value, "x": before * value}[self.how]


def read_amount(text: str, units: dict[str, float], where: str, example: str, problems: list[Problem]) -> Amount | None:
    """`units`: what may stand behind the number, and how much it is of ours."""
    match = _FORM.match(text.strip())
    if match is None:
        problems.append(Problem(where=where, what=f'"{text}" is no amount.', fix=f"For example {example}."))
        return None
    sign, number, unit = match.groups()
    how, value = sign.replace("*", "x"), float(number)
    if value > _MOST or (how in ("", "x") and value == 0):
        problems.append(Problem(where=where, what=f"{number} cannot be.", fix=f"For example {example}."))
        return None
    if unit == "%" and how in ("+", "-"):
        return Amount(how="x", value=1 + (value if how == "+" else -value) / 100)
    if how == "x" and not unit:
        return Amount(how=how, value=value)
    # In any case of letters where that leaves no doubt: a bit is a b, a byte a B.
    sizes = {units[unit]} if unit in units else {units[name] for name in units if name.lower() == unit.lower()}
    if len(sizes) != 1 or how == "x":
        what = f'"{unit}" is no unit of it.' if unit else "has no unit."
        problems.append(Problem(where=where, what=f"{text}: {what}", fix=f"For example {example}."))
        return None
    return Amount(how=how, value=value * sizes.pop())


def read_memory(text: str, where: str, problems: list[Problem]) -> int | None:
    """`70GiB` -> bytes."""
    if text.strip()[:1] in "+-x*":
        problems.append(Problem(where=where, what=f"{text} is no size of a memory.", fix="For example 70GiB."))
        return None
    amount = read_amount(text, MEMORY, where, "70GiB", problems)
    return int(amount.value) if amount is not None else None


Change = Callable[[Question, Amount], "Question | Problem"]


@dataclass(frozen=True, kw_only=True)
class WhatIfChange:
    """One change, as it was written and as it is meant."""

    name: str
    text: str
    amount: Amount

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class ComparedPlans:
    """What was, what would be."""

    words: str
    before: ScoredPlan | None
    """None: nothing fits today."""
    after: Outcome

    @property
    def rate_ratio(self) -> float | None:
        """Times as many tokens a second, by what is learnt from them."""
        best = self.after.best
        if best is None or self.before is None:
            return None
        return best.tokens_to_target_per_second / self.before.tokens_to_target_per_second

    @property
    def device_ratio(self) -> float:
        """Times as many devices."""
        return self.after.question.cluster.num_devices / self.before.plan.num_ranks if self.before else 1.0


def compare(question: Question, changes: Sequence[WhatIfChange], before: ScoredPlan | None) -> ComparedPlans:
    words = ", ".join(str(change) for change in changes)
    return ComparedPlans(words=words, before=before, after=outcome(words, with_changes(question, changes)))


def usual_changes(question: Question) -> tuple[WhatIfChange, ...]:
    """What people ask first: more memory, the slowest link twice as fast, one more node."""
    cluster = question.cluster
    if cluster.others:
        return read_changes(("memory=+25%", "between=x2"))
    link = () if cluster.num_devices == 1 else ("outer=x2",) if cluster.num_nodes > 1 else ("inner=x2",)
    return read_changes(("memory=+25%", *link, "nodes=+1"))


def read_changes(texts: Sequence[str]) -> tuple[WhatIfChange, ...]:
    """Every wrong word is reported at once."""
    problems: list[Problem] = []
    changes = []
    for text in texts:
        where = f"--what-if {text}"
        name, equals, amount_text = (part.strip() for part in text.partition("="))
        if name not in CHANGES:
            what = f'nothing that can be changed is called "{name}".'
            problems.append(Problem(where=where, what=what, fix=nearest(name, CHANGES)))
            continue
        units, example, _ = CHANGES[name]
        if not equals:
            problems.append(Problem(where=where, what="has no value.", fix=f"For example {name}={example}."))
            continue
        amount = read_amount(amount_text, units, where, f"{name}={example}", problems)
        if amount is not None:
            changes.append(WhatIfChange(name=name, text=text.strip(), amount=amount))
    raise_problems(problems)
    return tuple(changes)


def with_changes(question: Question, changes: Sequence[WhatIfChange]) -> Question:
    """All of them together; those that cannot be are reported at once."""
    problems = []
    for wanted in changes:
        try:
            changed = CHANGES[wanted.name][2](question, wanted.amount)
        except MeshwrightError as error:  # no such machine can be: the cluster's own checks say why
            changed = Problem(where="", what=" ".join(map(str, error.problems)))
        if isinstance(changed, Problem):
            problems.append(replace(changed, where=f"--what-if {wanted}"))
        else:
            question = changed
    raise_problems(problems)
    return question


def change_memory(question: Question, amount: Amount) -> Question | Problem:
    # A limit that is given is what may be used, all of it; else the headroom is of the memory there is then.
    headroom = question.headroom if question.max_memory_bytes is None else 0.0
    machine = question.machine if not headroom else question.cluster
    least = min(group.device.memory_bytes for group in machine.groups)
    if problem := question.memory_problem(amount.of(least), ""):
        return problem
    cluster = with_devices(machine, lambda d: replace(d, memory_bytes=int(amount.of(d.memory_bytes))))
    return replace(question, cluster=cluster, max_memory_bytes=None, headroom=headroom)


def change_flops(question: Question, amount: Amount) -> Question:
    def faster(device: Device) -> Device:
        rates = {dtype: amount.of(rate) for dtype, rate in device.flops_per_second.items()}
        return replace(device, flops_per_second=rates)

    return replace(question, cluster=with_devices(question.cluster, faster))


def change_of_link(name: str) -> Change:
    """A change of the `inner` or `outer` link in all groups."""

    def change(question: Question, amount: Amount) -> Question:
        def faster(owner: Any) -> Any:
            return replace(owner, **{name: _faster(getattr(owner, name), amount)})

        cluster = faster(question.cluster)
        return replace(question, cluster=replace(cluster, others=tuple(map(faster, cluster.others))))

    return change


def _faster(link: Link, amount: Amount) -> Link:
    return replace(link, bytes_per_second=amount.of(link.bytes_per_second))


def change_link_between_groups(question: Question, amount: Amount) -> Question | Problem:
    cluster = question.cluster
    if not cluster.others:
        return Problem(where="", what=f"{cluster.name} has one group, so nothing lies between groups.")
    link = _faster(cluster.link_between(range(len(cluster.groups))), amount)
    return replace(question, cluster=replace(cluster, between=link))


def change_devices(question: Question, amount: Amount) -> Question | Problem:
    before, width = question.cluster, node_width(question.cluster)
    devices = amount.of(before.num_devices)
    if before.others:
        return _mixed(question)
    cluster = resized(before, int(devices)) if devices == int(devices) else None
    if cluster is None:
        fix = f"Use 1 to {width}, or a multiple of {width} up to {MOST_DEVICES - MOST_DEVICES % width}."
        return Problem(where="", what=f"{devices:g} devices are no part of a node and no whole nodes.", fix=fix)
    return replace(question, cluster=cluster)


def change_nodes(question: Question, amount: Amount) -> Question | Problem:
    nodes = amount.of(question.cluster.num_nodes)
    if question.cluster.others:
        return _mixed(question)
    if problem := _not_whole(nodes, f"{nodes:g} nodes."):
        return problem
    return replace(question, cluster=reshaped(question.cluster, question.cluster.devices_per_node, int(nodes)))


def _mixed(question: Question) -> Problem:
    what = f"the groups of {question.cluster.name} differ, so devices alone do not say whose they are."
    return Problem(where="", what=what, fix="Plan for a --cluster with the groups you mean.")


def _not_whole(value: float, what: str) -> Problem | None:
    is_whole = value >= 1 and value == int(value)
    return None if is_whole else Problem(where="", what=what, fix="Use a whole number, at least 1.")


def change_batch(question: Question, amount: Amount) -> Question | Problem:
    batch = amount.of(question.batch)
    return _not_whole(batch, f"a batch of {batch:g} samples.") or replace(question, batch=int(batch))


def change_sequence(question: Question, amount: Amount) -> Question | Problem:
    sequence = amount.of(question.sequence)
    if question.profile.counts != "tokens":
        return Problem(where="", what=f"samples of {question.profile.name} have no sequence.")
    return sequence_problem(question.profile, sequence, "") or replace(question, sequence=int(sequence))


CHANGES: dict[str, tuple[dict[str, float], str, Change]] = {
    "memory": (MEMORY, "+20GiB", change_memory),
    "inner": (RATE, "x2", change_of_link("inner")),
    "outer": (RATE, "100GB/s", change_of_link("outer")),
    "between": (RATE, "10GB/s", change_link_between_groups),
    "nodes": (COUNT, "+1", change_nodes),
    "devices": (COUNT, "16", change_devices),
    "flops": (FACTOR, "x2", change_flops),
    "batch": (COUNT, "256", change_batch),
    "seq": (COUNT, "16384", change_sequence),
}
"""Name -> units, an example, what it does."""
