"""A pickle as inert values: its instructions are walked, and nothing that it names is imported or called.

A pickle is a small program. Where it would look up a class we note the name, where it would call one we note the
arguments; names that are not expected are refused, all of them at once. What comes out is lists, dicts, text, numbers
and notes of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pickletools import genops
from typing import Any

from meshwright.core.errors import MeshwrightError, Problem

MOST_INSTRUCTIONS = 40_000_000


@dataclass(frozen=True, slots=True)
class Named:
    """Where the pickle names a class or a function: `torch.Size`."""

    name: str


class Made:
    """Where it would call one: the name, the arguments, and the state it would set."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]):
        self.name, self.arguments = name, arguments
        self.state: Any = None


@dataclass(frozen=True, slots=True)
class Outside:
    """Where it refers to something that is stored beside it."""

    key: Any


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
    "SHORT_BINBYTES",
    "BINBYTES",
}
_SILENT = {"PROTO", "FRAME", "STOP"}


class _Walk:
    def __init__(self, allowed: Collection[str]):
        self.allowed = allowed
        self.refused: list[str] = []
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            self.stack.append(argument)
        elif name not in _SILENT:
            act = _ACTIONS.get(name)
            if act is None:
                raise ValueError(f"the instruction {name} has no place here")
            act(self, argument)

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def last(self, count: int) -> tuple[Any, ...]:
        if count > len(self.stack):
            raise ValueError("it takes more than there is")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        return items

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("it names something without text")
        full = f"{module}.{name}"
        if full not in self.allowed and full not in self.refused:
            self.refused.append(full)
        self.stack.append(Named(full))

    def call(self, _: Any) -> None:
        made, arguments = self.last(2)
        if not isinstance(made, Named) or not isinstance(arguments, tuple):
            raise ValueError("it calls what is not a name")
        is_dict = made.name == "collections.OrderedDict" and not arguments
        self.stack.append({} if is_dict else Made(made.name, arguments))

    def build(self, _: Any) -> None:
        (state,) = self.last(1)
        if not isinstance(self.stack[-1], Made):
            raise ValueError("it sets the state of what it did not make")
        self.stack[-1].state = state

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("it appends to what is not a list")
        self.stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("it sets items of what is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | Made):  # hashing a tuple of tuples of ... would overflow the C stack
                raise ValueError(f"a dict has a key of type {type(key).__name__}")
            target[key] = value

    def recall(self, place: Any) -> None:
        self.stack.append(self.memo[place])

    def remember(self, place: Any) -> None:
        self.memo[len(self.memo) if place is None else place] = self.stack[-1]


_ACTIONS: dict[str, Callable[[_Walk, Any], None]] = {
    "MARK": lambda walk, _: walk.marks.append(len(walk.stack)),
    "EMPTY_LIST": lambda walk, _: walk.stack.append([]),
    "EMPTY_DICT": lambda walk, _: walk.stack.append({}),
    "TUPLE": lambda walk, _: walk.stack.append(tuple(walk.since_mark())),
    "TUPLE1": lambda walk, _: walk.stack.append(walk.last(1)),
    "TUPLE2": lambda walk, _: walk.stack.append(walk.last(2)),
    "TUPLE3": lambda walk, _: walk.stack.append(walk.last(3)),
    "APPEND": lambda walk, _: walk.extend(list(walk.last(1))),
    "APPENDS": lambda walk, _: walk.extend(walk.since_mark()),
    "SETITEM": lambda walk, _: walk.set_items(list(walk.last(2))),
    "SETITEMS": lambda walk, _: walk.set_items(walk.since_mark()),
    "BINGET": _Walk.recall,
    "LONG_BINGET": _Walk.recall,
    "BINPUT": _Walk.remember,
    "LONG_BINPUT": _Walk.remember,
    "MEMOIZE": _Walk.remember,
    "GLOBAL": lambda walk, argument: walk.name(*argument.split(" ", 1)),
    "STACK_GLOBAL": lambda walk, _: walk.name(*walk.last(2)),
    "REDUCE": _Walk.call,
    "NEWOBJ": _Walk.call,
    "BUILD": _Walk.build,
    "BINPERSID": lambda walk, _: walk.stack.append(Outside(walk.last(1)[0])),
}


def inert(data: bytes, allowed: Collection[str], where: str) -> Any:
    """What the pickle would have become. `allowed`: every name that it may mention."""
    walk, damage = _Walk(allowed), ""
    try:
        for count, (code, argument, _) in enumerate(genops(data)):
            if count > MOST_INSTRUCTIONS:
                raise ValueError(f"it has more than {MOST_INSTRUCTIONS} instructions")
            walk.step(code.name, argument)
        (result,) = walk.last(1)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        damage, result = str(error)[:200], None
    if walk.refused:
        fix = "Nothing of it was run. Save the weights again, as plain tensors."
        raise MeshwrightError(
            Problem(where=where, what=f"names {name[:120]!r}, which has no place in it.", fix=fix)
            for name in walk.refused[:20]
        )
    if damage:
        raise MeshwrightError([Problem(where=where, what=f"cannot be read as plain values: {damage}.")])
    return result
