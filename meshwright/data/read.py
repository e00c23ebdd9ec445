"""From files to one flat array of tokens, and which of them count in the loss.

Every document ends with the tokenizer's separator. A text file is one document; a JSONL file has one per
line: its prompt (weight 0: given, not to be learnt), then its text (weight 1), then the separator (weight 1:
where to stop is learnt too). All files are read before any problem is reported: one run shows them all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.data.files import SourceFile
from meshwright.data.tokenizer import ByteTokenizer, TokenArray

MAX_PROBLEMS = 20
_MAX_PROBLEMS_PER_FILE = 3
_NUL_SEARCH_BYTES = 64 * 1024
# Sources in other suffixes (an old .py in Latin-1) are taken byte for byte.
_UTF8_SUFFIXES = (".txt", ".md", ".jsonl")
_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokens:
    """Flat tokens, and a weight per token (0 or 1) where some do not count; None means that all count."""

    tokens: TokenArray
    weights: TokenArray | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TextKeys:
    """The names of a JSONL record's fields."""

    text: str = "text"
    prompt: str = "prompt"


def read_files(files: Iterable[SourceFile], keys: TextKeys, problems: list[Problem]) -> Tokens:
    """All files joined. Problems are appended, and the result is then meaningless."""
    return join([_read_file(file.path, keys, problems) for file in files])


def join(parts: list[Tokens]) -> Tokens:
    tokens = [part.tokens for part in parts] or [np.empty(0, dtype=np.uint8)]
    if all(part.weights is None for part in parts):
        return Tokens(tokens=np.concatenate(tokens))
    weights = [np.ones_like(part.tokens) if part.weights is None else part.weights for part in parts]
    return Tokens(tokens=np.concatenate(tokens), weights=np.concatenate(weights))


def raise_all(problems: list[Problem]) -> None:
    """One error with the first problems, and how many more there are; nothing if there are none."""
    if len(problems) > MAX_PROBLEMS:
        more = Problem(where="data", what=f"and {len(problems) - MAX_PROBLEMS} more problems like these.")
        raise MeshwrightError([*problems[:MAX_PROBLEMS], more])
    if problems:
        raise MeshwrightError(problems)


def _read_file(path: str, keys: TextKeys, problems: list[Problem]) -> Tokens:
    nothing = Tokens(tokens=np.empty(0, dtype=np.uint8))
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        reason = (error.strerror or "unknown error").lower()
        problems.append(Problem(where=path, what=f"cannot be read: {reason}."))
        return nothing
    suffix = os.path.splitext(path)[1].lower()
    problem = _binary_problem(path, content, is_utf8=suffix in _UTF8_SUFFIXES)
    if problem:
        problems.append(problem)
        return nothing
    if suffix == ".jsonl":
        return _read_records(path, content, keys, problems)
    return _document(b"", content)


def _binary_problem(path: str, content: bytes, *, is_utf8: bool) -> Problem | None:
    fix = "Convert it to UTF-8 text, or leave it out of the pattern."
    nul = content.find(0, 0, _NUL_SEARCH_BYTES)
    if nul >= 0:
        return Problem(where=path, what=f"is not a text file: a NUL byte at offset {nul}.", fix=fix)
    if is_utf8:
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            what = f"is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}."
            return Problem(where=path, what=what, fix=fix)
    return None


def _document(prompt: bytes, text: bytes) -> Tokens:
    tokens = ByteTokenizer().encode(prompt + text + bytes((ByteTokenizer.separator,)))
    if not prompt:
        return Tokens(tokens=tokens)
    weights = np.ones_like(tokens)
    weights[: len(prompt)] = 0
    return Tokens(tokens=tokens, weights=weights)


def _read_records(path: str, content: bytes, keys: TextKeys, problems: list[Problem]) -> Tokens:
    documents: list[Tokens] = []
    num_bad = 0
    for number, line in enumerate(content.removeprefix(_UTF8_MARK).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            documents.append(_document(*_record(line, keys)))
        except _BadRecord as bad:
            num_bad += 1
            if num_bad <= _MAX_PROBLEMS_PER_FILE:
                problems.append(Problem(where=f"{path}:{number}", what=bad.what, fix=bad.fix))
    if num_bad > _MAX_PROBLEMS_PER_FILE:
        what = f"and {num_bad - _MAX_PROBLEMS_PER_FILE} more bad lines in this file."
        problems.append(Problem(where=path, what=what))
    elif not documents and not num_bad:
        what = "holds no record, only blank lines."
        problems.append(Problem(where=path, what=what, fix="Remove it or fill it."))
    return join(documents)


class _BadRecord(Exception):
    def __init__(self, what: str, fix: str = ""):
        self.what, self.fix = what, fix


def _record(line: bytes, keys: TextKeys) -> tuple[bytes, bytes]:
    """The prompt and the text of one line."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise _BadRecord(f"is not valid JSON: {error.msg} (column {error.colno}).") from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, a thousand nested lists
        raise _BadRecord(f"is not usable JSON: {error}.") from None
    if not isinstance(record, dict):
        what = f"holds a {type(record).__name__}, not an object."
        raise _BadRecord(what, f'Write {{"{keys.text}": "..."}} on each line.')
    if keys.text not in record:
        found = ", ".join(f'"{key}"' for key in list(record)[:8]) or "none"
        raise _BadRecord(f'has no "{keys.text}" key.', f"Its keys: {found}.")
    prompt = record.get(keys.prompt)
    return b"" if prompt is None else _field(prompt, keys.prompt), _field(record[keys.text], keys.text)


def _field(value: object, key: str) -> bytes:
    if not isinstance(value, str):
        raise _BadRecord(f'"{key}" is a {type(value).__name__}, not text.')
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f'"{key}" holds half of a surrogate pair at character {error.start}: not valid Unicode.'
        raise _BadRecord(what) from None
