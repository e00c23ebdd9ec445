"""Frozen dataclasses to JSON and back, strictly.

Reading collects every problem instead of stopping at the first: unknown keys (with the nearest known one),
missing keys, wrong types, values out of a Literal, NaN, files written by a newer version. The place is a path
such as `plan.techniques[1].size`. A class that is one of several kinds decodes itself by a `decode_any` classmethod.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Union

import xxhash

from meshwright.core.errors import MeshwrightError, Problem, error_at, nearest
from meshwright.core.files import parse_json

T = TypeVar("T")
LARGEST_WHOLE_NUMBER = 2**63 - 1
"""Whole numbers become int64 when many plans are priced at once."""
_SEAL = re.compile(rb'\{"digest": "([0-9a-f]{32})",')
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def encode(value: Any) -> Any:
    """A value of ours as plain JSON types. Fields equal to their default are kept: artefacts are explicit."""
    if hasattr(value, "encode_self"):
        return value.encode_self()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def to_json(value: Any) -> str:
    """One line per field, small lists and mappings kept on one line, so that artefacts diff well."""
    return _render(encode(value), 0)


def _render(value: Any, depth: int) -> str:
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(flat) + 2 * depth <= 100 or not isinstance(value, dict | list) or not value:
        return flat
    pad, end = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict):
        rows = [f"{json.dumps(k, ensure_ascii=False)}: {_render(v, depth + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(pad + row for row in rows) + f"\n{end}}}"
    return "[\n" + ",\n".join(pad + _render(item, depth + 1) for item in value) + f"\n{end}]"


def seal(text: str) -> bytes:
    """The bytes of a file: the JSON object `text` with a first key "digest", the hash of everything after it."""
    rest = text[1:].encode("utf-8")
    return b'{"digest": "%s",' % xxhash.xxh3_128_hexdigest(rest).encode() + rest


def unseal(data: bytes) -> str:
    """The JSON object that was sealed. Raises ValueError where the bytes are not those that `seal` returned."""
    sealed = _SEAL.match(data)
    if sealed is None or xxhash.xxh3_128_hexdigest(data[sealed.end() :]).encode() != sealed[1]:
        raise ValueError("does not match its own digest: it was damaged or edited")
    return "{" + data[sealed.end() :].decode("utf-8")


def fingerprint(data: Any) -> str:
    """Fingerprint of plain JSON types, independent of the order of keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


@cache
def field_types(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def decode(cls: type[T], value: Any, where: str) -> T:
    """`value` (plain JSON types) as a `cls`, or one MeshwrightError with everything that is wrong."""
    problems: list[Problem] = []
    result = decode_into(cls, value, where, problems)
    if problems:
        raise MeshwrightError(problems)
    return typing.cast(T, result)


def decode_into(hint: Any, value: Any, where: str, problems: list[Problem]) -> Any:
    """Decode by type hint; problems are appended and the result is then meaningless."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(args, value, where, problems)
    if origin is Literal:
        if not any(type(value) is type(each) and value == each for each in args):  # True == 1, and is not 1
            fix = nearest(str(value), map(str, args))
            problems.append(Problem(where=where, what=f"{value!r} is not one of its values.", fix=fix))
        return value
    if origin is tuple:
        return _decode_tuple(args, value, where, problems)
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(value, Mapping):
            return _wrong(where, "a table of keys and values", value, problems)
        return {k: decode_into(args[1], item, f"{where}.{k}", problems) for k, item in value.items()}
    if isinstance(hint, type) and hasattr(hint, "decode_any"):
        return hint.decode_any(value, where, problems)
    if dataclasses.is_dataclass(hint):
        return decode_fields(typing.cast(type, hint), value, where, problems)
    return _decode_scalar(hint, value, where, problems)


def _wrong(where: str, wanted: str, value: Any, problems: list[Problem]) -> None:
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    problems.append(Problem(where=where, what=f"expected {wanted}, found {shown}."))


def _decode_union(args: tuple[Any, ...], value: Any, where: str, problems: list[Problem]) -> Any:
    if value is None and type(None) in args:
        return None
    attempts: list[list[Problem]] = []
    for arg in (a for a in args if a is not type(None)):
        trial: list[Problem] = []
        result = decode_into(arg, value, where, trial)
        if not trial:
            return result
        attempts.append(trial)
    fewest = min(len(trial) for trial in attempts)
    problems.extend(next(trial for trial in attempts if len(trial) == fewest))
    return None


def _decode_tuple(args: tuple[Any, ...], value: Any, where: str, problems: list[Problem]) -> Any:
    if not isinstance(value, list | tuple):
        return _wrong(where, "a list", value, problems)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(decode_into(args[0], item, f"{where}[{i}]", problems) for i, item in enumerate(value))
    if len(value) != len(args):
        return _wrong(where, f"a list of {len(args)} entries", value, problems)
    return tuple(
        decode_into(arg, item, f"{where}[{i}]", problems) for i, (arg, item) in enumerate(zip(args, value, strict=True))
    )


def _decode_scalar(hint: Any, value: Any, where: str, problems: list[Problem]) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            return _wrong(where, "a finite number", value, problems)
    if hint not in _WORDS:
        raise TypeError(f"codec cannot read the type {hint!r} at {where}")
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        return _wrong(where, _WORDS[hint], value, problems)
    if isinstance(value, float) and not math.isfinite(value):
        return _wrong(where, "a finite number", value, problems)
    if hint is int and abs(value) > LARGEST_WHOLE_NUMBER:
        return _wrong(where, f"at most {LARGEST_WHOLE_NUMBER}", value, problems)
    return value


def decode_fields(cls: type, value: Any, where: str, problems: list[Problem], ignore: str = "") -> Any:
    """A mapping as a dataclass. `ignore` is a key the caller has already used (a tag such as `name`)."""
    if not isinstance(value, Mapping):
        return _wrong(where, "a table of keys and values", value, problems)
    hints = field_types(cls)
    before = len(problems)
    for key in value:
        if key not in hints and key != ignore:
            problems.append(Problem(where=key, what="unknown key.", fix=nearest(key, hints)).within(where))
    given = {}
    for field in dataclasses.fields(cls):
        place = f"{where}.{field.name}" if where else field.name
        if field.name in value:
            given[field.name] = decode_into(hints[field.name], value[field.name], place, problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(Problem(where=place, what="missing."))
    if len(problems) > before:
        return None
    try:
        return cls(**given)
    except MeshwrightError as error:  # a constructor that checks its own values
        problems.extend(problem.within(where) for problem in error.problems)
        return None


def read_artefact(cls: type[T], text: str, source: str) -> T:
    """An artefact file: JSON with a `version` that this program must know.

    A newer version is said first: its unknown keys would only confuse.
    """
    value = parse_json(text, source)
    version = value.get("version") if isinstance(value, Mapping) else None
    newest, oldest = getattr(cls, "VERSION", 1), getattr(cls, "OLDEST", -math.inf)
    if isinstance(version, int) and not oldest <= version <= newest:
        is_newer = version > newest
        limit = f"up to {newest}" if is_newer else f"from {oldest} on"
        fix = "Upgrade meshwright, or write the file again with this version."
        what = f"is a {cls.__name__} of version {version}; this program reads {limit}."
        raise error_at(source, what, fix if is_newer else "Write the file again with this version.")
    try:
        return decode(cls, value, source)
    except RecursionError:
        raise error_at(source, "is nested too deeply.") from None


class Artefact:
    """A dataclass that is written to a file as JSON, and read again."""

    __slots__ = ()

    def to_json(self) -> str:
        return to_json(self)

    @classmethod
    def from_json(cls, text: str, source: str = "") -> Self:
        return read_artefact(cls, text, source or cls.__name__.lower())


def load_artefact(cls: type[T], path: str | Path) -> T:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not a text file"
        raise error_at(path, f"cannot be read: {reason}.") from None
    return read_artefact(cls, text, str(path))
