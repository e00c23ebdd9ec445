"""A technique is one way to split, shrink, move or defer work: one file in `techniques/`, two mirrored halves.

`price` rewrites the description of the work; `apply` makes the same change to a real model. Files are found by
name, so search, simulator, runtime, command line and report know no technique by name.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from meshwright.core.codec import decode_fields, encode
from meshwright.core.errors import MeshwrightError, Problem, Problems, nearest
from meshwright.core.work import Num, Work

if TYPE_CHECKING:
    from meshwright.core.cluster import Cluster
    from meshwright.core.plan import Plan
    from meshwright.core.profile import Profile

PHASES = ("swap", "cut", "split", "block", "compile", "wrap", "optimizer", "step")
"""The order in which techniques change a model. Order is correctness: splitting after wrapping would lose the
reduction over replicas without a sound."""

Exactness = Literal["exact", "rounded", "approximate"]
EXACTNESS = ("exact", "rounded", "approximate")
"""exact: one device's numbers up to the order of sums; rounded: the same algorithm in fewer bits; approximate:
another algorithm."""


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


@dataclass(frozen=True, slots=True)
class PerLayer:
    """How many blocks follow the policy, 0 to `most`: solved by counts, not enumerated by layer."""

    field: str
    most: int


Option = Axis | Choice | PerLayer


@dataclass(frozen=True, kw_only=True)
class Technique:
    """Base of all techniques. Subclasses are frozen dataclasses whose fields are the settings."""

    name: ClassVar[str]
    phase: ClassVar[str]
    exactness: ClassVar[Exactness] = "exact"
    """With settings as search chooses them; `exactness_with` says it of others, and an instance of its own."""
    axis: ClassVar[str] = ""
    """The mesh axis it owns (its size is the field `size`), if any."""
    closeness: ClassVar[int] = 0
    """Axes with more traffic want closer ranks: the highest is innermost."""
    splits_samples: ClassVar[bool] = False
    """Ranks along its axis see different samples, so gradients are summed over it."""
    splits_sequence: ClassVar[bool] = False
    """Ranks along its axis see different parts of every sample, so losses and gradients are summed over it."""
    sums_late: ClassVar[bool] = False
    """It sums gradients over its axis itself, once the backward passes are over, of what it does not cut."""

    @property
    def splits_backward(self) -> bool:
        """Weights' gradients are made apart from their inputs', out of autograd's sight."""
        return False

    @property
    def overlaps_steps(self) -> bool:
        """A step begins before the one before it has been taken everywhere."""
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
        """The same with exact numbers; None where nothing is left of it then."""
        return self if self.exactness == "exact" else None

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        return ()

    def check_sequence(self, sequence: int) -> Problems:
        """What is wrong for samples of this length (which a plan does not know)."""
        return ()

    def price(self, work: Work) -> Work:
        raise NotImplementedError

    def apply(self, build: Any) -> None:
        """Contribute functions to the phases of a `runtime.build.Build`."""
        raise NotImplementedError

    def blocks_of_stages(self, blocks: int) -> tuple[int, ...] | None:
        """How this technique cuts a list of blocks into stages; None if it does not."""
        return None

    def spans_of_stage(self, blocks: int, stage: int) -> tuple[tuple[int, int], ...] | None:
        """The runs of blocks, (first, last + 1) each, that the stage has; None if it does not cut."""
        return None

    def number(self, work: Work, field: str) -> Num:
        """A numeric setting: one per candidate when many are priced at once, else this technique's own."""
        return work.sizes.get(f"{self.name}.{field}", getattr(self, field))

    def problem(self, what: str, fix: str = "") -> Problem:
        return Problem(where=self.name, what=what, fix=fix)

    def encode_self(self) -> dict[str, Any]:
        return {"name": self.name} | {f.name: encode(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def decode_any(cls, value: Any, where: str, problems: list[Problem]) -> Technique | None:
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            problems.append(Problem(where=where, what='expected a table with a "name".'))
            return None
        try:
            kind = technique_named(value["name"])
        except MeshwrightError as error:
            problems.extend(Problem(where=where, what=p.what, fix=p.fix) for p in error.problems)
            return None
        return decode_fields(kind, value, where, problems, ignore="name")

    def __str__(self) -> str:
        """`tensor(size=2, sequence=True)`: settings that differ from their defaults."""
        shown = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{self.name}({', '.join(shown)})"


def axis_problems(technique: Technique) -> Problems:
    size = getattr(technique, "size", 1)
    if size < 1:
        return (technique.problem(f"size is {size}.", "An axis has at least one rank."),)
    return ()


def listed(sizes: Sequence[int]) -> str:
    """`1, 2 or 4`."""
    return " or ".join([", ".join(map(str, sizes[:-1])), str(sizes[-1])]) if len(sizes) > 1 else str(sizes[0])


def axis_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Sizes above 1 that an axis can have where all axes multiply to all devices."""
    devices = cluster.num_devices
    small = [size for size in range(1, math.isqrt(devices) + 1) if devices % size == 0]
    return tuple(sorted({*small, *(devices // size for size in small)} - {1}))


@cache
def technique_names() -> tuple[str, ...]:
    """All names, without importing a technique file."""
    package = importlib.import_module("meshwright.techniques")
    return tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__)))


@cache
def technique_named(name: str) -> type[Technique]:
    if name not in technique_names():
        raise MeshwrightError(
            [Problem(where="", what=f'no technique is called "{name}".', fix=nearest(name, technique_names()))]
        )
    module = importlib.import_module(f"meshwright.techniques.{name}")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Technique) and value.__module__ == module.__name__
    ]
    assert len(found) == 1, f"techniques/{name}.py must define exactly one technique, not {len(found)}"
    assert found[0].name == name, f"techniques/{name}.py calls its technique {found[0].name!r}"
    return found[0]
