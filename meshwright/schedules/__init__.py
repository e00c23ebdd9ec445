"""Pure generators of who does what when, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from meshwright.schedules import gpipe, one_f_one_b
from meshwright.schedules.actions import Action, Actions

__all__ = ["SCHEDULES", "Action", "Actions", "Schedule"]


class Schedule(NamedTuple):
    actions: Callable[[int, int, int], Actions]
    """(stage, num_stages, num_microbatches) -> what the stage does, in order."""
    in_flight: Callable[[Any, Any, Any], Any]
    """The most microbatches a stage holds at once; numbers or arrays."""


SCHEDULES = {
    "gpipe": Schedule(gpipe.gpipe, gpipe.in_flight),
    "1f1b": Schedule(one_f_one_b.one_f_one_b, one_f_one_b.in_flight),
    "forward": Schedule(gpipe.forward_only, lambda stage, num_stages, num_microbatches: 1),
}
