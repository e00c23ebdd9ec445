"""What to do after ranks have failed: the one place that decides. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.core.units import counted
from meshwright.launch.failure import cause
from meshwright.launch.local_ranks import LaunchOutcome
from meshwright.launch.rank_job import PREEMPTED_EXIT_CODE

CRASH_LOOP_EXIT_CODE = 70
_LONGEST_PAUSE_SECONDS = 30.0
_SAME_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A launch of all ranks, and what it has left."""

    outcome: LaunchOutcome
    saved_step: int
    """Of the newest checkpoint on disk; -1: there is none."""
    copied_step: int = -1
    """Of the newest copy in memory."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    action: Literal["restart", "give up"]
    why: str = ""
    """For people to read."""
    exit_code: int = 0
    """Of giving up."""
    pause_seconds: float = 0.0
    """Before a restart."""


def remedy_for(attempts: Sequence[Attempt], *, restarts: int, is_stopped: bool) -> Remedy:
    """What to do after the last of these attempts.

    A restart cures what came from outside (a killed rank, a hang, a lost peer). It does not cure what the run itself
    has raised: bad input, or a step that may not be taken; nor an exception before the first step was made.
    """
    outcome = attempts[-1].outcome
    if outcome.exit_code in (0, PREEMPTED_EXIT_CODE) or is_stopped or not outcome.failures:
        return Remedy(action="give up", exit_code=outcome.exit_code)
    first = cause(outcome.failures)
    # Where a remedy other than the same again is known, it is chosen here, before the failures are counted.
    is_same_again = any("out_of_memory" in each.facts for each in outcome.failures)  # the same plan needs as much
    is_at_start = first.kind == "exception" and not first.is_secondary and outcome.steps == 0 and len(attempts) == 1
    if first.is_ours or is_same_again or is_at_start or not restarts:
        return Remedy(action="give up", exit_code=outcome.exit_code)
    saved, copied = attempts[-1].saved_step, attempts[-1].copied_step
    in_vain = without_progress(attempts)
    text = first.sentence(outcome.num_ranks)
    where = f"the checkpoint of step {saved}" if saved >= 0 else "the beginning, as there is no checkpoint yet"
    where = f"the copy of step {copied} in memory" if copied > saved else where
    if len(in_vain) <= restarts:
        pause = min(2.0 ** (len(in_vain) - 2), _LONGEST_PAUSE_SECONDS) if len(in_vain) > 1 else 0.0
        count = f"restart {len(in_vain)} of {restarts} without a new checkpoint"
        return Remedy(action="restart", why=f"{text}. Going on from {where} ({count}).", pause_seconds=pause)
    causes = Counter(cause(each.outcome.failures).sentence(each.outcome.num_ranks) for each in in_vain)
    listed = "; ".join(f"{each} ({number} times)" if number > 1 else each for each, number in causes.most_common())
    why = f"This is a crash loop: {len(in_vain)} failures in a row without a new checkpoint "
    why += f"(run.restarts = {restarts} allows {counted(restarts, 'restart')}). They were: {listed}. "
    logs = f"{first.log.parent}/" if first.log is not None else ""
    why += f"Logs of earlier attempts are in {logs}attempt-*. When the cause is mended, the same command "
    why += f"goes on from {where}."
    return Remedy(action="give up", why=why, exit_code=CRASH_LOOP_EXIT_CODE)


def without_progress(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The last attempts, in order, none of which has brought the run forward: no new checkpoint on disk, and no copy in
    memory but of a step or two later. Crashes at the same step, or soon after each start, are a loop all the same."""
    result = [attempts[-1]]
    for each in reversed(attempts[:-1]):
        if each.saved_step != result[-1].saved_step or result[-1].copied_step > each.copied_step + _SAME_STEPS:
            break
        result.append(each)
    return result[::-1]
