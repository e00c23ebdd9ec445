"""Documents as they lie in files with fields: lines of JSON, and what can be wrong with one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.core.errors import Problem

_MAX_PROBLEMS_PER_FILE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class TextKeys:
    """The names of a record's fields, or of a table's columns."""

    text: str = "text"
    prompt: str = "prompt"


@dataclass(kw_only=True, slots=True)
class Records:
    """Documents of one chunk as UTF-8: all that have something in them."""

    texts: list[bytes] = field(default_factory=list)
    prompts: list[bytes] = field(default_factory=list)
    num_records: int = 0
    """Empty ones too."""

    def add(self, prompt: bytes, text: bytes) -> None:
        self.num_records += 1
        if prompt or text:
            self.prompts.append(prompt)
            self.texts.append(text)


@dataclass(kw_only=True)
class FileProblems:
    """The first few of a file one by one, the others counted."""

    path: str
    problems: list[Problem]
    name: str = "bad lines"
    num_bad: int = 0

    def add(self, where: str, bad: BadRecord) -> None:
        self.num_bad += 1
        if self.num_bad <= _MAX_PROBLEMS_PER_FILE:
            self.problems.append(Problem(where=where, what=bad.what, fix=bad.fix))

    def close(self) -> None:
        if self.num_bad > _MAX_PROBLEMS_PER_FILE:
            what = f"and {self.num_bad - _MAX_PROBLEMS_PER_FILE} more {self.name} in this file."
            self.problems.append(Problem(where=self.path, what=what))


class BadRecord(Exception):
    def __init__(self, what: str, fix: str = ""):
        self.what, self.fix = what, fix


def parse_lines(
    path: str, content: bytes, keys: TextKeys, num_lines_before: Callable[[], int], problems: list[Problem]
) -> Records:
    """The records of whole lines. `num_lines_before` is asked only to say where a problem is."""
    records, bad_lines = Records(), FileProblems(path=path, problems=problems)
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            records.add(*_record(line, keys))
        except BadRecord as bad:
            bad_lines.add(f"{path}:{num_lines_before() + number}", bad)
    bad_lines.close()
    return records


def _record(line: bytes, keys: TextKeys) -> tuple[bytes, bytes]:
    """The prompt and the text of one line."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadRecord(f"is not valid JSON: {error.msg} (column {error.colno}).") from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, a thousand nested lists
        raise BadRecord(f"is not usable JSON: {error}.") from None
    if not isinstance(record, dict):
        what = f"holds a {type(record).__name__}, not an object."
        raise BadRecord(what, f'Write {{"{keys.text}": "..."}} on each line.')
    if keys.text not in record:
        found = ", ".join(f'"{key}"' for key in list(record)[:8]) or "none"
        raise BadRecord(f'has no "{keys.text}" key.', f"Its keys: {found}.")
    prompt = record.get(keys.prompt)
    return b"" if prompt is None else text_field(prompt, keys.prompt), text_field(record[keys.text], keys.text)


def text_field(value: object, key: str) -> bytes:
    if not isinstance(value, str):
        raise BadRecord(f'"{key}" is a {type(value).__name__}, not text.')
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f'"{key}" holds half of a surrogate pair at character {error.start}: not valid Unicode.'
        raise BadRecord(what) from None
