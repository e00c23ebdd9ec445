"""A technique is one way to split, shrink, move or defer work: one file in `techniques/`, two mirrored halves.

`price` rewrites the description of the work; `apply` makes the same change to a real model. Files are found by
name, so search, simulator, runtime, command line and report know no technique by name.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np

from meshwright.core.codec import decode_fields, encode
from meshwright.core.errors import MeshwrightError, OldNotation, Problem, Problems, error_at, nearest
from meshwright.core.plugins import added
from meshwright.core.work import Circumstances, Num, Updating, Work

if TYPE_CHECKING:
    from meshwright.core.build import Build
    from meshwright.core.cluster import Cluster
    from meshwright.core.plan import Plan
    from meshwright.core.profile import Profile

Spans = tuple[tuple[int, int], ...]
"""Runs of blocks by number: (first, last + 1) each, in the order of the model."""

PHASES = ("swap", "cut", "split", "block", "compile", "wrap", "optimizer", "step")
"""The order in which techniques change a model. Order is correctness: splitting after wrapping would lose the
reduction over replicas without a sound."""

Exactness = Literal["exact", "reordered", "rounded", "lossy", "approximate"]
EXACTNESS: tuple[str, ...] = get_args(Exactness)
"""How far numbers may differ from one device's in float32, nearest first. exact: not at all (but for the gradient's
norm, which is always summed over ranks); reordered: by the order of sums; rounded: computed in 16 bits, with weights,
their gradients' sums and optimizer states in float32; lossy: in fewer bits than that; approximate: by another
algorithm, such as one with older gradients."""


def is_within(exactness: str, limit: str) -> bool:
    """Whether numbers are at least as near one device's as `limit` allows."""
    return EXACTNESS.index(exactness) <= EXACTNESS.index(limit)


class StepsFactor(NamedTuple):
    """Times the steps that training needs until a loss, beside steps that sum every gradient; and where it is from."""

    low: float = 1.0
    mid: float = 1.0
    """At least 1: what plans are ranked by."""
    high: float = 1.0
    source: str = ""

    def with_other(self, other: StepsFactor) -> StepsFactor:
        """Of both together, as if neither changed what the other costs."""
        sources = "; ".join(filter(None, (self.source, other.source)))
        return StepsFactor(self.low * other.low, self.mid * other.mid, self.high * other.high, sources)


class LayerChoice(NamedTuple):
    kind: Literal["none", "all", "first", "last", "listed"]
    number: int = 0
    """Of first and last."""
    spans: Spans = ()
    """Of listed ones: in rising order without overlap."""


_LISTED = re.compile(r"^([0-9]{1,9})(?:-([0-9]{1,9}))?$")
_ENDS = re.compile(r"^(first|last)\s+([0-9]{1,9})$")
LAYERS_FIX = 'Use "none", "all", "first 3", "last 2" or numbers in rising order: "0-3,8".'


def format_layers(blocks: Iterable[int]) -> str:
    """Blocks by their numbers: `none`, or `0-3,8,10-12`."""
    parts: list[list[int]] = []
    for block in sorted(set(blocks)):
        if parts and block == parts[-1][1] + 1:
            parts[-1][1] = block
        else:
            parts.append([block, block])
    if len(parts) == 1:  # a lone number could be taken for how many
        return f"{parts[0][0]}-{parts[0][1]}"
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts) or "none"


@lru_cache(maxsize=1024)
def parse_layers(text: str) -> LayerChoice | None:
    """`none`, `all`, `first 3`, `last 2` or `0-3,8`; None if it is not written so."""
    text = text.strip().lower()
    if text in ("none", "all"):
        return LayerChoice("none" if text == "none" else "all")
    if match := _ENDS.match(text):
        count = int(match[2])
        return LayerChoice("first" if match[1] == "first" else "last", count) if count else LayerChoice("none")
    spans: list[tuple[int, int]] = []
    for part in text.split(","):
        match = _LISTED.match(part.strip())
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or (spans and first < spans[-1][1]):
            return None
        spans.append((first, last + 1))
    return LayerChoice("listed", spans=tuple(spans))


def layers_text(value: int | str | None, end: str = "first") -> str:
    """As it is written today; what cannot be read stays as it is. `end`: where a number's layers are."""
    if isinstance(value, str) and value:
        choice = parse_layers(value)
        if choice is None:
            return value
        if choice.kind == "listed":
            return format_layers(block for first, last in choice.spans for block in range(first, last))
        return f"{choice.kind} {choice.number}" if choice.number else choice.kind
    text = "all" if value is None else f"{end} {value}" if value else "none"
    warnings.warn(f'layers are written "{text}", no longer {value!r}', OldNotation, stacklevel=2)
    return text


@lru_cache(maxsize=4096)
def _following(policies: tuple[tuple[str, str], ...], spans: Spans) -> dict[int, str]:
    """Block -> the policy that it follows, of the blocks in `spans`. Listed blocks are dealt out first, then the last
    ones of the stage, then the first ones; `all` are those that are left."""
    left = [block for first, last in spans for block in range(first, last)]
    result: dict[int, str] = {}
    choices = [(field, parse_layers(text) or LayerChoice("none")) for field, text in policies]
    for kind in ("listed", "last", "first", "all"):
        for field, choice in reversed(choices) if kind == "last" else choices:
            if choice.kind != kind:
                continue
            if kind == "listed":
                chosen = [block for block in left if any(first <= block < last for first, last in choice.spans)]
            else:
                count = len(left) if kind == "all" else min(choice.number, len(left))
                chosen = left[len(left) - count :] if kind == "last" else left[:count]
            result |= dict.fromkeys(chosen, field)
            left = [block for block in left if block not in result]
    return result


@dataclass(frozen=True, slots=True)
class Axis:
    """The size of the mesh axis a technique owns."""

    field: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting that search enumerates."""

    field: str
    values: tuple[Any, ...]
    rescues: tuple[Any, ...] = ()
    """Further values, tried only where nothing fits with these. If there are no others, neither is the technique."""
    moves_base: bool = False
    """The further values move parameters or their states to another tier: they may help where these alone are too
    large."""


@dataclass(frozen=True, slots=True)
class PerLayer:
    """Settings that name blocks, each of which follows one of them or none: solved by counts, not enumerated by layer.

    Of equal blocks of a stage the first follow the first field, those after them the second, and the last ones none. A
    field is `all` for all blocks that follow no other, `first 3` or `last 3` of every stage, `none`, or says which
    (`0-3,8`). `price` finds counts, not names: `work.following`.
    """

    fields: tuple[str, ...]


Option = Axis | Choice | PerLayer


@dataclass(frozen=True, kw_only=True)
class Technique:
    """Base of all techniques. Subclasses are frozen dataclasses whose fields are the settings."""

    name: ClassVar[str]
    phase: ClassVar[str]
    exactness: ClassVar[Exactness] = "reordered"
    """With settings as search chooses them; `exactness_with` says it of others, and an instance of its own."""
    axis: ClassVar[str] = ""
    """The mesh axis it owns (its size is the field `size`), if any."""
    closeness: ClassVar[int] = 0
    """Axes with more traffic want closer ranks: the highest is innermost."""
    splits_samples: ClassVar[bool] = False
    """Ranks along its axis see different samples, so gradients are summed over it."""
    splits_sequence: ClassVar[bool] = False
    """Ranks along its axis see different parts of every sample, so losses and gradients are summed over it."""
    rests_layers: ClassVar[bool] = False
    """Some steps make no gradients of some layers."""
    shares_blocks: ClassVar[bool] = False
    """Blocks that follow its policies may follow those of other techniques too."""
    takes_shares: ClassVar[bool] = False
    """Ranks along its axis may run different numbers of microbatches: its field `shares`, empty where they do not."""
    sums_late: ClassVar[bool] = False
    """It exchanges what it does not cut over its axis itself, by late sums or an `Exchange` of its own: whoever sums
    gradients over replicas leaves this axis alone."""

    keeps_islands: ClassVar[bool] = False
    """Ranks along its axis are islands: each trains parameters of its own, which meet now and then."""
    codes_sums: ClassVar[bool] = False
    """It codes what others sum (`Build.coding`)."""
    makes_whole_gradients: ClassVar[bool] = False
    """Of a technique with an axis: gradients are summed over it inside of backward, none of them later."""
    sums_layers: ClassVar[bool] = False
    """Of a technique with an axis along which ranks hold equal parameters: it sums a layer's gradients over it as soon
    as the last backward has made them, and hands them on where they then leave the device."""
    later_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that earlier versions do not know: written to files only where they differ from their default."""

    updates_in_backward: ClassVar[bool] = False
    """Parameters are updated before the whole gradient is known, and cannot be restored."""

    uses_tiers: ClassVar[bool] = False
    """It moves tensors out of the device's memory, into the host's or onto disk."""

    @property
    def acts_alone(self) -> bool:
        """The technique has an effect even where its axis has one rank."""
        return False

    draws_alike: ClassVar[bool] = True
    """Layers draw the random numbers (of dropout) that they would draw without it, sample by sample."""

    @property
    def splits_backward(self) -> bool:
        """Weights' gradients are made apart from their inputs', out of autograd's sight."""
        return False

    @property
    def overlaps_steps(self) -> bool:
        """A step begins before the one before it has been taken everywhere."""
        return False

    @property
    def paces_apart(self) -> bool:
        """Ranks along its axis end their steps at different times, each with a loss and norm of its own."""
        return False

    @property
    def updates_each_alone(self) -> bool:
        """Parameters are updated one by one, so that an update must not look at others or at other ranks' pieces."""
        return False

    @property
    def takes_gradients(self) -> bool:
        """Gradients are gone when backward is over: no other technique may take them."""
        return False

    @property
    def codes_states(self) -> bool:
        """Optimizer states are not one number for each element."""
        return False

    @property
    def copies_weights(self) -> bool:
        """Parameters are copies, on the device, of what is updated."""
        return False

    @property
    def scales_loss(self) -> bool:
        """Gradients come multiplied by a factor, and a step in which they overflow is skipped."""
        return False

    @property
    def steps_factor(self) -> StepsFactor:
        """The statistical price of these settings, whatever the number of ranks (above 1) and the other techniques."""
        return StepsFactor()

    @property
    def replays_blocks(self) -> bool:
        """Which blocks run again is decided while backward runs."""
        return False

    @property
    def joins_gradients(self) -> bool:
        """Gradients of all layers exist at once, whatever is done with each of them."""
        return False

    @property
    def hosts_states(self) -> bool:
        """Masters and optimizer states of some layers are in host memory."""
        return False

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        """What search may try; empty if the technique makes no sense here."""
        return ()

    @classmethod
    def exactness_with(cls, settings: Mapping[str, Any]) -> Exactness:
        """How near one device's numbers these settings stay."""
        return cls.exactness

    def as_exact(self) -> Technique | None:
        """The same with one device's numbers, up to the order of sums; None where nothing is left of it then."""
        return None if self.rounds else self

    @property
    def rounds(self) -> bool:
        """Numbers differ from one device's by more than the order of sums."""
        return not is_within(self.exactness, "reordered")

    def refusals(self, given: Circumstances) -> Iterable[tuple[Num, Problem]]:
        """(where it applies, problem) for combinations that cannot run: `check` tests them for one plan, and `forbid`
        for all candidates of a search."""
        return ()

    def refused(self, plan: Plan, profile: Profile) -> Problems:
        """The refusals that apply to a plan."""
        given = Circumstances(
            size=plan.mesh.get(self.axis, 1),
            num_microbatches=plan.num_microbatches,
            num_stages=next((plan.mesh.get(each.axis, 1) for each in plan.techniques if each.timetable is not None), 1),
            num_blocks=profile.num_blocks,
            splits_backward=plan.splits_backward,
            overlaps_steps=plan.overlaps_steps,
            replays_blocks=any(technique.replays_blocks for technique in plan.techniques),
            scales_loss=any(technique.scales_loss for technique in plan.techniques),
            joins_gradients=any(technique.joins_gradients for technique in plan.techniques),
        )
        return tuple(problem for applies, problem in self.refusals(given) if applies)

    def forbid(self, work: Work) -> Work:
        """The refusals, for all candidates that `work` is about."""
        refusals = [applies for applies, _ in self.refusals(work.circumstances(self.axis)) if np.any(applies)]
        refusals += [True] if self.refused_optimizer(work.optimizer) else []
        for applies in refusals:
            work = work.forbid(applies)
        return work

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        return self.refused(plan, profile)

    @classmethod
    def check_optimizer(cls, optimizer: Updating) -> Problems:
        """Why it cannot go with an optimizer (which a plan does not know), whatever its settings."""
        return ()

    def refused_optimizer(self, optimizer: Updating) -> Problems:
        """The same with these settings."""
        return self.check_optimizer(optimizer)

    def warnings_for(self, steps: int) -> tuple[str, ...]:
        """What to know of a run of so many steps."""
        return ()

    def check_sequence(self, sequence: int) -> Problems:
        """What is wrong for samples of this length (which a plan does not know)."""
        return ()

    def price(self, work: Work) -> Work:
        raise NotImplementedError

    def apply(self, build: Build) -> None:
        """Add functions to the phases of a build."""
        raise NotImplementedError

    def blocks_of_stages(self, blocks: int) -> tuple[int, ...] | None:
        """How this technique cuts a list of blocks into stages; None if it does not."""
        return None

    def spans_of_stage(self, blocks: int, stage: int) -> tuple[tuple[int, int], ...] | None:
        """The runs of blocks, (first, last + 1) each, that the stage has; None if it does not cut."""
        return None

    @property
    def timetable(self) -> Any:
        """The `schedules.Timetable` of what cuts the model into stages; None if it does not."""
        return None

    policies: ClassVar[tuple[str, ...]] = ()
    """Fields that name blocks (see `PerLayer`)."""

    def counts_in(self, profile: Profile, spans: Spans, chunk: int | None = None) -> dict[str, int]:
        """How many blocks of each kind follow each policy in a stage of these runs of blocks, or in one of its chunks:
        what `work.following` finds."""
        if not self.policies:
            return {}
        followed = self._followed(spans)
        chosen = spans if chunk is None else (spans[chunk],)
        result: dict[str, int] = {}
        start = 0
        for layer in profile.block_layers:
            end = start + layer.repeat
            here = [followed.get(b, "") for first, last in chosen for b in range(max(first, start), min(last, end))]
            result |= {f"{self.name}.{field}.{layer.name}": here.count(field) for field in self.policies}
            start = end
        return result

    def _followed(self, spans: Spans) -> dict[int, str]:
        return _following(tuple((field, getattr(self, field)) for field in self.policies), spans)

    def policy_of(self, block: int, spans: Spans) -> str:
        """The policy that a block of a stage follows; empty: none."""
        return self._followed(spans).get(block, "")

    @classmethod
    def read_policies(cls, settings: Mapping[str, Any]) -> dict[str, str]:
        """The settings that name layers, as they are written today. A number beside `all` is of the last layers."""
        given = {f.name: settings.get(f.name, f.default) for f in fields(cls) if f.name in cls.policies}
        end = "last" if any(value in (None, "all") for value in given.values()) else "first"
        return {field: layers_text(value, end) for field, value in given.items()}

    @property
    def needs_blocks(self) -> bool:
        """It changes nothing where no block follows one of its policies."""
        return True

    def __post_init__(self) -> None:
        for field, text in self.read_policies(vars(self)).items() if self.policies else ():
            object.__setattr__(self, field, text)

    def policy_problems(self, profile: Profile) -> list[Problem]:
        """What is wrong with the blocks that policies name."""
        problems, blocks = [], profile.num_blocks
        counts: dict[str, int] = {}
        listed: set[int] = set()
        for field in self.policies:
            text = getattr(self, field)
            choice = parse_layers(text)
            if choice is None:
                problems.append(self.problem(f'{field} is "{text}".', LAYERS_FIX))
                continue
            counts |= {field: choice.number} if choice.number else {}
            if choice.number > blocks or (choice.spans and choice.spans[-1][1] > blocks):
                what = f'{field} is "{text}"; the model has {blocks} blocks, 0 to {blocks - 1}.'
                problems.append(self.problem(what, LAYERS_FIX))
                continue
            mine = {block for first, last in choice.spans for block in range(first, last)}
            if mine & listed:
                problems.append(self.problem(f'{field} "{text}" names blocks that another setting names too.'))
            listed |= mine
        if not problems and sum(counts.values()) > blocks:
            what = f"{' and '.join(counts)} are {' and '.join(str(getattr(self, field)) for field in counts)}"
            problems.append(self.problem(f"{what}; the model has {blocks} blocks.", f"Use at most {blocks} together."))
        return problems

    def problem(self, what: str, fix: str = "") -> Problem:
        return Problem(where=self.name, what=what, fix=fix)

    def encode_self(self) -> dict[str, Any]:
        written = [f for f in fields(self) if f.name not in self.later_settings or getattr(self, f.name) != f.default]
        return {"name": self.name} | {f.name: encode(getattr(self, f.name)) for f in written}

    @classmethod
    def decode_any(cls, value: Any, where: str, problems: list[Problem]) -> Technique | None:
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            problems.append(Problem(where=where, what='expected a table with a "name".'))
            return None
        try:
            kind = technique_named(value["name"])
        except MeshwrightError as error:
            problems.extend(problem.within(where) for problem in error.problems)
            return None
        return decode_fields(kind, value, where, problems, ignore="name")

    def __str__(self) -> str:
        """`tensor(size=2, sequence=True)`: settings that differ from their defaults."""
        shown = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{self.name}({', '.join(shown)})"


def listed(sizes: Sequence[int]) -> str:
    """`1, 2 or 4`."""
    return " or ".join([", ".join(map(str, sizes[:-1])), str(sizes[-1])]) if len(sizes) > 1 else str(sizes[0])


def axis_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Sizes above 1 that an axis can have where all axes multiply to all devices."""
    devices = cluster.num_devices
    small = [size for size in range(1, math.isqrt(devices) + 1) if devices % size == 0]
    return tuple(sorted({*small, *(devices // size for size in small)} - {1}))


@cache
def _own_names() -> tuple[str, ...]:
    package = importlib.import_module("meshwright.techniques")
    return tuple(module.name for module in pkgutil.iter_modules(package.__path__))


def _defined_in(module: ModuleType) -> list[type[Technique]]:
    """Techniques of a module; a class without a name is a base of others."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Technique) and value.__module__ == module.__name__
        if hasattr(value, "name")
    ]


def _added() -> dict[str, type[Technique]]:
    return added("technique", _own_names(), lambda module: [(each.name, each) for each in _defined_in(module)])


def technique_names() -> tuple[str, ...]:
    """All names: one for each file of `techniques/` (which is not imported), and those of plugins."""
    return tuple(sorted((*_own_names(), *_added())))


def technique_named(name: str) -> type[Technique]:
    """The class of a technique; raises with the nearest name where there is none."""
    result = _own_technique(name) if name in _own_names() else _added().get(name)
    if result is None:
        raise error_at("", f'no technique is called "{name}".', nearest(name, technique_names()))
    return result


@cache
def _own_technique(name: str) -> type[Technique]:
    result = _defined_in(importlib.import_module(f"meshwright.techniques.{name}"))
    assert len(result) == 1, f"techniques/{name}.py must define exactly one technique, not {len(result)}"
    assert result[0].name == name, f"techniques/{name}.py calls its technique {result[0].name!r}"
    return result[0]
