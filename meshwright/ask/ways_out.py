"""Where nothing fits: what would, each way a command that finds a plan.

The plan that came nearest is forecast with each change, which takes milliseconds: it needs the least memory, so that a
change with which it needs far too much is not searched. A search without stages comes first: it takes a fifth of the
time, and the plan that the command itself finds is at least as fast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.ask.question import Outcome, Question, Tell, outcome
from meshwright.ask.sizes import larger_sizes, with_count
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import EXACTNESS, Technique, technique_named, technique_names
from meshwright.core.units import pretty_bytes, pretty_count
from meshwright.models.frozen_parameters import freeze, frozen_by
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.planner.search import SearchResult
from meshwright.simulator.forecast import forecast

_MOST_DEVICES = 1 << 14
"""More are not looked at: no way out that anybody has."""
_HELPS = 0.98
"""Twice the devices that leave more than this share of the memory needed will not do it."""
_MOST_HALVED = 64
"""Devices up to which the fewest are looked for among whole nodes; above, among doublings, as searches take longer."""
_MOST_HELD = 0.9
"""Of the memory that parameters, gradients and states may take and leave enough for anything to run."""
_LIKELY = 1.25
"""Share of the memory that the plan which came nearest may need for a change to be searched: others need less then."""
_SHORTEST = 128
"""Tokens: a sequence below is no training."""
_OPTIMIZERS: tuple[dict[str, Any], ...] = ({"name": "lion"}, {"name": "adafactor"}, {"name": "sgd", "momentum": 0})
"""Those that keep less, most of it first."""
ADAPTER_WORDS = "rank=16,base=nf4"
"""As `--adapter` takes them."""
_PACKED_BYTES = 0.5
"""Of a frozen parameter with such adapters, at least."""
WISHES = ("--pin", "--ban", "--max-memory")


@dataclass(frozen=True, kw_only=True)
class WayOut:
    what: str
    """devices, sequence, batch, optimizer, freeze, adapter, numerics, wishes."""
    flags: tuple[str, ...]
    """Of `mw plan`, in place of those of the same name; none: without the wishes."""
    cost: str
    """What it costs beside seconds."""
    outcome: Outcome
    is_bound: bool = False
    """The command may find a faster plan."""

    @property
    def device_seconds(self) -> float:
        """Seconds of device time that one token takes, summed over all devices."""
        best = self.outcome.best
        return best.plan.num_ranks / best.tokens_to_target_per_second if best is not None else math.inf

    def command(self, asked: Sequence[str]) -> list[str]:
        """What to ask, given what was asked: both as words of a command line."""
        gone = WISHES if self.what == "wishes" else ()
        words, skips = [], False
        for word in asked:
            name, has_value, _ = word.partition("=")
            if not skips and name not in gone:
                words.append(word)
            skips = name in gone and not has_value and not skips
        return [*words, *self.flags]


@dataclass(frozen=True, kw_only=True)
class WaysOut:
    open: tuple[WayOut, ...]
    """The least device time for a token first."""
    closed: tuple[str, ...]
    """Those that do not lead out, in words."""
    missing_bytes: int = 0
    """By which the plan that came nearest does not fit; 0: not known."""


Changed = tuple[tuple[str, ...], str, Question]
"""Flags, what they cost, and the question with them."""


def ways_out(
    question: Question,
    result: SearchResult,
    tell: Tell,
    asked: Sequence[str] = (),
    adapted: Callable[[], Profile | None] = lambda: None,
) -> WaysOut:
    """`result`: of the search that came back empty; `asked`: the command, where there is one; `adapted`: the model with
    adapters as `ADAPTER_WORDS` has them, if it can have them."""
    ways: list[WayOut] = []
    closed: list[str] = []
    near = result.nearest_miss.plan if result.nearest_miss is not None else None
    kinds: dict[str, Callable[[Question, Plan], Iterator[Changed]]] = {
        "optimizer": _other_optimizers,
        "freeze": _less_trained,
        "sequence": _shorter,
        "batch": _fewer_samples,
    }
    for what, changes in kinds.items() if near is not None else ():
        assert near is not None
        chosen: Changed | None = None
        share = _LIKELY
        for each in changes(question, near):  # the first that surely fits, or the one that is nearest to it
            now = _share_needed(near, each[2])
            chosen, share = (each, now) if now < share else (chosen, share)
            if share < 1:
                break
        way = None if chosen is None else _searched(what, chosen, tell, is_sure=share < 1)
        ways += [] if way is None else [way]
    if (profile := adapted()) is not None and not _is_packed_too_large(question, profile):
        part, whole = pretty_count(profile.num_trained_params), pretty_count(question.profile.num_params)
        cost = f"low-rank adapters of {part} parameters on {whole} frozen ones in 4 bits"
        changed = ("--adapter", ADAPTER_WORDS), cost, replace(question, profile=profile)
        way = _searched("adapter", changed, tell)
        ways += [] if way is None else [way]
    for look in (_other_numerics, _fewer_wishes, _more_devices):
        found = look(question, result, tell, asked)
        if isinstance(found, WayOut):
            ways.append(found)
        elif found:
            closed.append(found)
    if question.cluster.device.kind == "cuda" and not question.cluster.host.memory_bytes:
        closed.append("The memory of these hosts is not known: --host-memory 128GiB, say, lets a plan use it.")
    miss = result.nearest_miss.forecast if result.nearest_miss is not None else None
    missing = max(0, miss.peak_bytes - miss.memory_bytes) if miss is not None else 0
    ranked = tuple(sorted(ways, key=lambda way: way.device_seconds))
    return WaysOut(open=ranked, closed=tuple(closed), missing_bytes=missing)


def without_tiers(
    question: Question, tell: Tell, asked: Sequence[str] = (), adapted: Callable[[], Profile | None] = lambda: None
) -> WaysOut | None:
    """What there is in place of memory beyond the device's; None where a plan fits without it, or it is pinned."""
    names = _names(lambda kind: kind.uses_tiers)
    if any(pin.partition(".")[0].partition("=")[0] in names for pin in question.pin):
        return None
    plain = replace(question, ban=(*question.ban, *(name for name in names if name not in question.ban)))
    tell("searching without host memory and disk")
    result = plain.ask(top=1, compares=False)
    return None if result.best is not None or result.is_interrupted else ways_out(plain, result, tell, asked, adapted)


def _names(is_wanted: Callable[[type[Technique]], bool]) -> list[str]:
    return [name for name in technique_names() if is_wanted(technique_named(name))]


def shared_out(near: Plan) -> list[Plan]:
    """The same plan with samples and parameters shared out over all ranks, in place of its mesh."""
    kinds = _names(lambda kind: kind.splits_samples and kind.makes_whole_gradients)
    rest = tuple(each for each in near.techniques if not each.axis)
    if near.num_ranks == 1 or near.batch % near.num_ranks:
        return []
    made: Any = [technique_named(name) for name in kinds]
    return [Plan(techniques=(*rest, kind(size=near.num_ranks)), batch=near.batch, microbatch=1) for kind in made]


def _share_needed(near: Plan, changed: Question) -> float:
    """Share of a device's memory that the nearest plan needs, or the same plan sharded over all ranks if less."""
    needed = [math.inf]
    about: dict[str, Any] = {"sequence": changed.sequence, "optimizer": changed.optimizer}
    for plan in (near, *shared_out(near)):
        plan = replace(plan, batch=changed.batch)
        problems = [*plan.check(changed.profile, changed.machine), *plan.check_sequence(changed.sequence)]
        if isinstance(changed.optimizer, OptimizerConfig):
            problems += changed.optimizer.problems_with(plan)
        if not problems:
            predicted = forecast(changed.profile, plan, changed.machine, **about)
            needed.append(max(predicted.peak_bytes / predicted.memory_bytes, 0.0 if predicted.fits else 1.0))
    return min(needed)


def _searched(what: str, changed: Changed, tell: Tell, *, is_sure: bool = True) -> WayOut | None:
    flags, cost, question = changed
    words = " ".join(flags) or f"without {', '.join(WISHES)}"
    tell(f"searching {words}")
    made, is_bound = _ask(words, question, is_sure=is_sure)
    return None if made.best is None else WayOut(what=what, flags=flags, cost=cost, outcome=made, is_bound=is_bound)


def _ask(words: str, question: Question, *, is_sure: bool = True) -> tuple[Outcome, bool]:
    """The outcome, without stages if something fits so or if it is not sure that anything does, and whether it is only
    a bound."""
    wishes, cuts = (*question.pin, *question.ban), _names(lambda kind: kind.phase == "cut")
    if question.cluster.num_devices > 1 and not any(name in wish for name in cuts for wish in wishes):
        made = outcome(words, replace(question, ban=(*question.ban, *cuts)))
        if made.best is not None or not is_sure:
            return replace(made, question=question), True
    return outcome(words, question), False


def _other_optimizers(question: Question, near: Plan) -> Iterator[Changed]:
    now = getattr(question.optimizer, "name", "adamw")
    names = [settings["name"] for settings in _OPTIMIZERS]
    for settings in _OPTIMIZERS[names.index(now) + 1 if now in names else 0 :]:
        words = ",".join([settings["name"], *(f"{key}={value}" for key, value in settings.items() if key != "name")])
        changed = replace(question, optimizer=OptimizerConfig(**settings))
        yield ("--optimizer", words), f"fewer states than {now}, a rate of its own", changed


def _less_trained(question: Question, near: Plan) -> Iterator[Changed]:
    """The last half of the blocks, or a quarter, an eighth, ... of them, with what comes after or without."""
    profile = question.profile
    count, last = profile.num_blocks, profile.layers[-1]
    is_whole = profile.num_trained_params == profile.num_params and not profile.group_borders
    if count < 2 or "," in profile.block_path or not is_whole:
        return
    ends = [[f"{last.name}.*"]] if any(not param.tied for param in last.params) and not last.unit else []
    counts = sorted({max(1, count >> bits) for bits in range(1, count.bit_length())}, reverse=True)
    for end, trained in itertools.product([*ends, []], counts):
        patterns = [*numbered(profile.block_path, count - trained, count), *end]
        changed = replace(question, profile=freeze(profile, frozen_by((), patterns)))
        part = pretty_count(changed.profile.num_trained_params)
        cost = f"{part} of {pretty_count(profile.num_params)} parameters are trained, the rest frozen"
        yield tuple(word for pattern in patterns for word in ("--train", pattern)), cost, changed


def numbered(path: str, first: int, end: int) -> Iterator[str]:
    """Patterns of names for the blocks from `first` up to `end`: blocks.2[4-9].*, blocks.3[0-1].*."""
    for ten in range(first // 10, (end - 1) // 10 + 1):
        low, high = max(first, 10 * ten) % 10, (min(end, 10 * ten + 10) - 1) % 10
        digit = str(low) if low == high else f"[{low}-{high}]"
        yield f"{path}.{ten or ''}{digit}.*".lstrip(".")


def _is_packed_too_large(question: Question, profile: Profile) -> bool:
    held = _PACKED_BYTES * profile.num_params / question.cluster.num_devices
    return held > _MOST_HELD * question.machine.device.memory_bytes


def _shorter(question: Question, near: Plan) -> Iterator[Changed]:
    lengths = [question.sequence >> bits for bits in range(1, question.sequence.bit_length())]
    for length in lengths if question.profile.counts == "tokens" else ():
        if length >= _SHORTEST:
            cost = f"samples of {length} tokens in place of {question.sequence}"
            yield ("--seq", str(length)), cost, replace(question, sequence=length)


def _fewer_samples(question: Question, near: Plan) -> Iterator[Changed]:
    """One microbatch a step: nothing is accumulated, and no stage keeps several."""
    batch = near.batch // near.num_microbatches
    if batch < question.batch:
        cost = f"{question.batch / batch:g} times as many steps for the same samples"
        yield ("--batch", str(batch)), cost, replace(question, batch=batch)


def _other_numerics(question: Question, result: SearchResult, tell: Tell, asked: Sequence[str]) -> WayOut | str:
    """The first level of exactness beyond the one allowed, stale gradients aside, with which something fits."""
    beyond = EXACTNESS[EXACTNESS.index(question.allow) + 1 : EXACTNESS.index("lossy")]
    changes: list[tuple[str, tuple[str, ...]]] = [(level, ()) for level in beyond]
    if question.allow != "approximate" and question.optimizer.has_low_bit_form:
        changes += [("lossy", (name,)) for name in _names(lambda kind: kind.exactness == "lossy" and not kind.policies)]
    for level, pins in changes:
        flags = ("--allow", level, *(word for pin in pins for word in ("--pin", pin)))
        cost = "fewer bits, of the optimizer's states too" if pins else "rounding"
        changed = replace(question, allow=level, pin=(*question.pin, *pins))
        if (way := _searched("numerics", (flags, cost, changed), tell)) is not None:
            return way
    return f"Nor does it fit with --allow {changes[-1][0]}." if changes else ""


def _fewer_wishes(question: Question, result: SearchResult, tell: Tell, asked: Sequence[str]) -> WayOut | str:
    wishes = (*question.pin, *question.ban)
    is_limited = question.max_memory_bytes is not None
    if not (wishes or is_limited) or (asked and any(all(wish not in word for word in asked) for wish in wishes)):
        return ""  # there are none, or a run file has them
    free = replace(question, pin=(), ban=(), max_memory_bytes=None)
    return _searched("wishes", ((), "what they were for", free), tell) or "Nor without pins, bans and --max-memory."


def _more_devices(question: Question, result: SearchResult, tell: Tell, asked: Sequence[str]) -> WayOut | str:
    """Doubling until it fits, then halving the last doubling as far as whole nodes go."""
    short, enough, least_bytes = question.cluster.num_devices, None, _least_bytes(result)
    for devices in larger_sizes(question.cluster):
        if not _is_too_small(question, result, devices):
            made, is_bound = _on(question, devices, tell)
            if made.best is not None:
                enough = made
                break
            now_bytes = _least_bytes(made.result)
            if devices > _MOST_DEVICES or now_bytes > _HELPS * least_bytes:
                need = f"still need {pretty_bytes(now_bytes)}" if math.isfinite(now_bytes) else "have no plan"
                return f"More such devices do not help: {devices} {need}."
            least_bytes = now_bytes
        short = devices
    if enough is None:
        return ""
    while True:  # a whole number of nodes halfway, unless there are too many to look for the fewest
        most, width = enough.question.cluster.num_devices, enough.question.cluster.devices_per_node
        middle = (short // width + most // width) // 2 * width
        if most <= width or most > _MOST_HALVED or not short < middle < most:
            break
        fewer, is_fewer_bound = (
            (None, False) if _is_too_small(question, result, middle) else _on(question, middle, tell)
        )
        if fewer is None or fewer.best is None:
            short = middle
        else:
            enough, is_bound = fewer, is_fewer_bound
    cost = f"{most / question.cluster.num_devices:g} times the devices; {short} {'is' if short == 1 else 'are'} too few"
    flags = tuple(enough.words.split())
    return WayOut(what="devices", flags=flags, cost=cost, outcome=enough, is_bound=is_bound)


def _on(question: Question, devices: int, tell: Tell) -> tuple[Outcome, bool]:
    changed = with_count(question, devices)
    tell(f"searching {changed.cluster.name}")
    made, is_bound = _ask(f"--devices {devices}", changed)
    if made.result is None or made.best or made.result.nearest_miss or changed.batch >= devices:
        return made, is_bound
    # No plan at all: so many devices cannot share the batch, and one sample each is the least that they can.
    return _ask(f"--devices {devices} --batch {devices}", replace(changed, batch=devices))


def _least_bytes(result: SearchResult | None) -> float:
    """What the smallest plan needs; infinite where there is no plan at all."""
    miss = result.nearest_miss if result is not None else None
    return math.inf if miss is None else miss.forecast.peak_bytes


def _is_too_small(question: Question, result: SearchResult, devices: int) -> bool:
    """Even if parameters, gradients and states were shared out evenly: then a search would be for nothing."""
    if result.nearest_miss is None:
        return False
    predicted, own = result.nearest_miss.forecast, question.cluster.num_devices
    held = sum(predicted.peak_bytes_by_category.get(name, 0) for name in ("parameters", "gradients", "optimizer"))
    # Of several devices some may hold the same; one alone has everything once.
    together = held if own == 1 else held * own / 2
    return together / devices > _MOST_HELD * question.machine.device.memory_bytes
