"""Problems are data; an error is a list of them.

A check never raises: it returns problems, so that a border (a file, a command line, a plan) can report
everything that is wrong at once and exit with one code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One problem: where it is, what is wrong (with numbers), and how to fix it."""

    where: str
    what: str
    fix: str = ""

    def within(self, outer: str) -> Problem:
        """The same, its place seen from outside."""
        return replace(self, where=".".join(filter(None, (outer, self.where))))

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text} {self.fix}".rstrip()


Problems = tuple[Problem, ...]


class MeshwrightError(Exception):
    """An error that the user can fix. The command line prints the problems and exits with `exit_code`."""

    def __init__(self, problems: Iterable[Problem] | str, exit_code: int = 2, *, is_everywhere: bool = False):
        """`is_everywhere`: every rank raises it, so one of them saying it is enough."""
        if isinstance(problems, str):
            problems = (Problem(where="", what=problems),)
        self.problems: Problems = tuple(problems)
        self.exit_code = exit_code
        self.is_everywhere = is_everywhere
        self.facts: Mapping[str, Any] = {}
        """What a program may want to know of it, as JSON."""
        super().__init__("\n".join(str(problem) for problem in self.problems))


def error_at(where: object, what: str, fix: str = "", exit_code: int = 2) -> MeshwrightError:
    """An error of one problem, to be raised."""
    return MeshwrightError([Problem(where=str(where), what=what, fix=fix)], exit_code)


MOST_PROBLEMS = 20


def raise_problems(problems: Iterable[Problem], exit_code: int = 2) -> None:
    """Raise the first problems and the count of the others; nothing where there are none.

    A broken file may be wrong in a million places; people read the first few.
    """
    problems = tuple(problems)
    if left := len(problems[MOST_PROBLEMS:]):
        more = Problem(where="", what=f"and {left} more problems like these.")
        problems = (*problems[:MOST_PROBLEMS], more)
    if problems:
        raise MeshwrightError(problems, exit_code)


def read_or_note(problems: list[Problem], read: Callable[[], T]) -> T | None:
    """What `read` returns; None where it raises, after noting what is wrong."""
    try:
        return read()
    except MeshwrightError as error:
        problems.extend(error.problems)
        return None


RANGES: Mapping[str, Callable[[float], bool]] = {"above zero": lambda x: x > 0, "zero or more": lambda x: x >= 0}


def wrong_numbers(
    values: Mapping[str, float], wanted: str, is_right: Callable[[float], bool] | None = None
) -> Iterator[Problem]:
    """A problem for each value that is not as `wanted`; a NaN never is."""
    is_right = is_right or RANGES[wanted]
    for where, value in values.items():
        if not is_right(value):
            yield Problem(where=where, what=f"is {value}; it must be {wanted}.")


def nearest(word: str, choices: Iterable[str]) -> str:
    """`Did you mean "batch"?`, or the list of choices when nothing is close."""
    import difflib

    names = sorted(choices)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.55)
    if close:
        return f'Did you mean "{close[0]}"?'
    return f"Known: {', '.join(names)}." if names else ""


def first_line(error: BaseException) -> str:
    """The first line of what an error of somebody else's says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:200]


def last_line(error: BaseException) -> str:
    """What was raised, and where in the user's own code."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    others = ("site-packages", f"{os.sep}meshwright{os.sep}", "<")
    own = [frame for frame in frames if not any(other in frame.filename for other in others)]
    place = f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""
    if isinstance(error, SyntaxError):  # says itself where it is
        place = ""
    return f"{type(error).__name__}: {str(error).strip().rstrip('.') or 'no message'}{place}."


class OldNotation(DeprecationWarning):
    """A setting written as an earlier release wrote it; the next one does not read it. `mw` shows it on stderr."""
