"""`--failures mtbf=8h/node,restart=3min`: what failures of nodes cost a plan. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.ask.what_if import read_amount
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, nearest
from meshwright.core.units import counted, pretty_seconds
from meshwright.planner.search import ScoredPlan
from meshwright.simulator.failure_replay import FailureForecast, FailureModel, forecast_failures

DURATION = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_OF = ("node", "device", "run")
_KEYS = {"mtbf": "8h/node", "restart": "3min", "checkpoint": "20s", "repair": "4h", "interval": "10min", "spares": "2"}
_DISK_BYTES_PER_SECOND = 1e9
"""Of a device's checkpoint, where nobody knows how fast its state is copied away."""


@dataclass(frozen=True, kw_only=True)
class FailureRequest:
    """Seconds by key, as they were given; `of`: whose time between failures it is."""

    seconds: dict[str, float]
    of: str = "node"
    spares: int = -1


def read_failures(text: str, problems: list[Problem], flag: str = "--failures") -> FailureRequest:
    seconds, of, spares = dict[str, float](), "node", -1
    given = dict[str, str]()
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in _KEYS or not equals or key in given:
            what = (
                "is given twice." if key in given else f'"{part}" is not of the form key=value. {nearest(key, _KEYS)}'
            )
            problems.append(Problem(where=f"{flag} {key}" if key in given else flag, what=what))
            continue
        given[key] = value
        if key == "spares":
            if value.isdecimal() and len(value) < 6:
                spares = int(value)
            else:
                problems.append(Problem(where=f"{flag} spares", what=f'"{value}" is no number of nodes.'))
            continue
        if key == "mtbf" and "/" in value:
            value, _, of = (word.strip() for word in value.partition("/"))
            if of not in _OF:
                fix = f"Use {', '.join(f'/{each}' for each in _OF)}."
                problems.append(Problem(where=f"{flag} mtbf", what=f'"/{of}" is none of them.', fix=fix))
        amount = read_amount(value, DURATION, f"{flag} {key}", _KEYS[key], problems)
        if amount is not None and amount.how:
            what = f"{value} changes a time instead of giving one."
            problems.append(Problem(where=f"{flag} {key}", what=what, fix=f"For example {_KEYS[key]}."))
        elif amount is not None:
            seconds[key] = amount.value
    for key in ("mtbf", "restart"):
        if key not in given:
            problems.append(Problem(where=flag, what=f"{key} is missing.", fix=f"For example {key}={_KEYS[key]}."))
    return FailureRequest(seconds=seconds, of=of, spares=spares)


def checkpoint_seconds(best: ScoredPlan, cluster: Cluster) -> float:
    """What a step waits while its device's state is copied to host memory; it is written from there meanwhile."""
    state = sum(best.forecast.peak_bytes_by_category.get(name, 0) for name in ("parameters", "optimizer"))
    return state / (cluster.tiers["host"].out_bytes_per_second or _DISK_BYTES_PER_SECOND)


def answer_failures(request: FailureRequest, best: ScoredPlan, cluster: Cluster) -> tuple[FailureForecast, list[str]]:
    """The forecast, and in words."""
    given, num_nodes = request.seconds, max(1, best.plan.num_ranks // cluster.devices_per_node)
    nodes_each = {"node": 1.0, "device": 1 / min(best.plan.num_ranks, cluster.devices_per_node), "run": num_nodes}
    saving = given.get("checkpoint") or checkpoint_seconds(best, cluster)
    repair: dict[str, Any] = {"repair_seconds": given["repair"]} if "repair" in given else {}
    model = FailureModel(
        mtbf_seconds=given["mtbf"] * nodes_each[request.of],
        restart_seconds=given["restart"],
        checkpoint_seconds=saving,
        **repair,
    )
    step = best.forecast.step_seconds
    about: dict[str, Any] = {"interval": given.get("interval", 0.0), "spares": request.spares, "step": step}
    failures = forecast_failures(model, num_nodes, **about)
    steps, goodput = max(1, round(failures.interval_seconds / step)), failures.ledger.goodput
    known = "" if "checkpoint" in given else " (estimated: its state copied to the host)"
    chosen = f"the best; Young's first guess {pretty_seconds(failures.young_seconds)}"
    if failures.interval_seconds == step:
        chosen = "the least there can be"
    elif "interval" in given:
        chosen = "as given"
    took = f"a step takes {pretty_seconds(step / goodput)} of wall time" if goodput else "no step outlasts a failure"
    by_spares = [f"{share:.1%} with {count}" for count, share in failures.goodput_by_spares.items()]
    lines = [
        f"failures of {counted(num_nodes, 'node')}, one every {pretty_seconds(model.mtbf_seconds / num_nodes)}: "
        f"goodput {goodput:.1%} with {counted(failures.spares, 'spare node')} ({failures.ledger.losses}); {took}",
        f"a checkpoint every {pretty_seconds(failures.interval_seconds)} ({counted(steps, 'step')}; {chosen}); "
        f"one costs {pretty_seconds(saving)}{known}",
        f"{counted(failures.best_spares, 'spare node')} {'pays' if failures.best_spares == 1 else 'pay'} best; "
        f"goodput {', '.join(by_spares)} (each is "
        f"{1 / num_nodes:.1%} of the nodes; a failed node is back after {pretty_seconds(model.repair_seconds)})",
    ]
    return failures, lines
