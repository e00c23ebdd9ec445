"""`--from-run`: a cluster as a run on such devices has shown it to be, and in words what was learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.errors import error_at
from meshwright.core.files import refuse_link
from meshwright.core.ledger import LEAST_STEPS, Entry, read
from meshwright.core.units import counted, pretty_bytes, pretty_seconds
from meshwright.machine.from_runs import LEAST_RUNS, learn, learn_one
from meshwright.machine.named_clusters import figures_of, preset_of_device
from meshwright.machine.probe import machine_name
from meshwright.run.comparison import CAUSES, COMPARISON

_FAR = 1.25
"""Times that two cards' figures may differ and still be of one kind."""


def cluster_of_run(path: str | Path) -> tuple[Cluster, str]:
    """The cluster that the run was planned for, as it was thought to be; and what --cluster takes to mean it."""
    entries, _ = _entries(Path(path))
    own, _ = _of_one_machine(entries, "")
    cluster, kept = own[-1].cluster, Path(path) / "cluster.json"
    return cluster, str(kept) if kept.exists() else cluster.name


def cluster_from_run(path: str | Path, cluster: Cluster | None = None) -> tuple[Cluster, list[str]]:
    """`path`: a run's folder, or a ledger. Without a cluster, that of the run is corrected."""
    entries, lines = _entries(Path(path))
    own, told = _of_one_machine(entries, "" if cluster is None else cluster.device.kind)
    lines += told
    whole = cluster if cluster is not None else own[-1].cluster
    alike = _groups_like(own[-1], whole, path)
    base = whole.view(alike[0])
    if len(own) >= LEAST_RUNS:
        learned = learn(own, own[-1].machine, base)
    else:
        learned = learn_one(own[0], base)
        for entry in own[1:]:
            more = learn_one(entry, learned.cluster)
            factors = {cause: factor * learned.factors.get(cause, 1.0) for cause, factor in more.factors.items()}
            learned = replace(more, factors=dict(learned.factors) | factors, num_runs=learned.num_runs + 1)
    # What was learned of one group, for all of its kind. Error bars are for all groups, and stay where others are.
    better = learned.cluster
    figures: dict[str, Any] = {"device": better.device, "inner": better.inner, "outer": better.outer}
    groups = [replace(group, **figures) if i in alike else group for i, group in enumerate(whole.groups)]
    first = {name: getattr(groups[0], name) for name in figures}
    errors = better.errors if len(alike) == len(groups) else whole.errors
    corrected = replace(whole, **first, others=tuple(groups[1:]), errors=errors, sources=better.sources)
    newest, runs = own[-1], f"{learned.num_runs} run" + ("s, the newest" if learned.num_runs > 1 else "")
    step = f"a step took {pretty_seconds(newest.measured.step_seconds)} ({newest.measured.num_steps} measured)"
    lines.append(
        f"learned from {runs} of {newest.model}, sequence {newest.sequence}, batch {newest.batch}: {step}; what is "
        "learned is the machine's, by cause, and holds for other models as far as they spend their time alike"
    )
    for cause, factor in learned.factors.items():
        bars = f"error bar {getattr(base.errors, cause):.0%} -> {getattr(better.errors, cause):.0%}"
        speed = f"{factor:.2f} x slower than thought" if factor > 1 else f"{1 / factor:.2f} x faster than thought"
        lines.append(f"{CAUSES[cause]} {'as fast as thought' if abs(factor - 1) < 0.005 else speed}; {bars}")
    before, after = base.device.reserved_bytes, better.device.reserved_bytes
    if before != after:
        lines.append(f"a process holds {pretty_bytes(after)} of its own, not {pretty_bytes(before)}")
    lines.append(f"a forecast of that step: {learned.error_before:.1%} off before, {learned.error_after:.1%} now")
    # What the run itself said of being disturbed: the machine may be faster than it looked.
    for reason in newest.comparison.get("reasons", []):
        if isinstance(reason, Mapping) and reason.get("name") in ("cores", "spread", "warm-up", "slowing", "retries"):
            lines.append(f"warning: that run was disturbed, and what was learned may be that: {reason['what']}")
    return corrected, lines


def _entries(path: Path) -> tuple[list[Entry], list[str]]:
    file = path / COMPARISON if path.is_dir() else path
    if path.is_dir():
        refuse_link(file)
        if not file.exists():
            what = f"no {COMPARISON} is there, so no run of it has been compared with its forecast."
            raise error_at(path, what, "Give the folder of a run (run.folder) that has made twenty steps, or a ledger.")
    entries, num_bad = read(file)
    if not entries:
        what = f"holds no run: {num_bad} lines are no entries." if num_bad else "is empty."
        raise error_at(file, what, "Give a run's folder, or a ledger as `mw train` writes it.")
    enough = [entry for entry in entries if entry.measured.num_steps >= LEAST_STEPS]
    if not enough:
        what = f"has {max(entry.measured.num_steps for entry in entries)} measured steps; {LEAST_STEPS} are needed."
        raise error_at(file, what, "Train on: the same command resumes.")
    lines = [f"{file}: {num_bad} lines are no entries and were skipped"] if num_bad else []
    return sorted(enough, key=lambda entry: entry.unix_seconds), lines


def _of_one_machine(entries: list[Entry], kind: str) -> tuple[list[Entry], list[str]]:
    """The runs of this machine, else of the newest run's; all on one kind of device, the one asked for if it can be."""
    here, lines, num_entries = machine_name(), [], len(entries)
    entries = [entry for entry in entries if entry.cluster.device.kind == kind] or entries
    machine = here if any(entry.machine == here for entry in entries) else entries[-1].machine
    if machine != here:
        lines.append(f"warning: that was another machine ({machine}); this is {here}")
    own = [entry for entry in entries if entry.machine == machine]
    kind = own[-1].cluster.device.kind
    own = [entry for entry in own if entry.cluster.device.kind == kind]
    if len(own) < num_entries:
        lines.append(f"{counted(num_entries - len(own), 'run')} of other machines or devices left out")
    return own, lines


def _groups_like(entry: Entry, cluster: Cluster, path: str | Path) -> list[int]:
    """Which groups have the devices that the run was on, and equal links; raises where none has."""
    known = preset_of_device(entry.device_name) if entry.device_name else None
    ran_on, name = (known or entry.cluster).device, cluster.name
    differences = []  # in words, with the numbers; empty where the devices are of one kind
    for group in cluster.groups:
        theirs, ours = figures_of(ran_on), figures_of(group.device)
        far = [each for each in ours if max(theirs[each], ours[each]) > _FAR * min(theirs[each], ours[each])]
        words = ", ".join(f"{each} {theirs[each]:.3g}, of {name} {ours[each]:.3g}" for each in far)
        if ran_on.kind != group.device.kind:
            differences.append(f"{ran_on.kind} devices, {name} has {group.device.kind}")
        elif ran_on.kind == "cpu" or not words:  # a CPU's figures are measured, and scatter
            differences.append("")
        else:
            differences.append(f"{entry.device_name or 'other devices'}: {words}")
    alike = [i for i, difference in enumerate(differences) if not difference]
    if alike:
        group = cluster.groups[alike[0]]
        return [i for i in alike if cluster.groups[i].is_like(group)]
    what = f"ran on {differences[0]}. What is slow there says nothing of these."
    fix = f"Plan for the cluster it ran on ({entry.cluster.name}), or learn from a run on such devices."
    raise error_at(path, what, fix)
