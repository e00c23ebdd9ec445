"""A disk that may lose whatever was not made durable: what a power cut can leave of a folder.

It is harsher than a journaling file system: names and contents that were not fsynced are each there or not, in any
combination; a file may have its length and not its bytes. A rename is atomic.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

EntryChange = tuple[str, str, "Node | None"]
"""(name that goes, name that comes, what has it)."""


class Node:
    """A file or a folder: as programs see it, and as it is on the platter."""

    def __init__(self, data: bytes | None = None, entries: dict[str, Node] | None = None):
        self.data, self.durable_data = data, data
        self.entries = dict(entries or {})
        self.durable = dict(self.entries)
        self.pending: list[EntryChange] = []

    @classmethod
    def read(cls, path: Path) -> Node:
        if path.is_file():
            return cls(path.read_bytes())
        return cls(entries={each.name: cls.read(each) for each in path.iterdir()})

    def change(self, old: str, new: str, node: Node | None) -> None:
        _apply(self.entries, (old, new, node))
        self.pending.append((old, new, node))

    def fsync(self) -> None:
        self.durable_data, self.durable, self.pending = self.data, dict(self.entries), []

    def survive(self, path: Path, dice: random.Random, share: float) -> None:
        """Write what is left after the cut; each change that is not durable has happened with a chance of `share`."""
        if self.data is not None:
            assert self.durable_data is not None
            choices = [
                self.data,
                self.durable_data,
                self.data[: dice.randint(0, len(self.data))],
                bytes(len(self.data)),
            ]
            path.write_bytes(dice.choice(choices) if self.data != self.durable_data else self.data)
            return
        left = dict(self.durable)
        for change in self.pending:
            if dice.random() < share:
                _apply(left, change)
        path.mkdir()
        for name, node in left.items():
            node.survive(path / name, dice, share)


def _apply(entries: dict[str, Node], change: EntryChange) -> None:
    old, new, node = change
    entries.pop(old, None)
    if node is not None:
        entries[new] = node


class Disk:
    """Follows every change that a program makes below a folder, and stops at the `at`-th of them."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, at: int = -1):
        self.path, self.root = root, Node.read(root)
        self.at, self.num_changes = at, 0
        self.names: dict[int, Path] = {}
        for name in ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "close"):
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def node(self, path: Path) -> Node:
        found = self.root
        for name in path.relative_to(self.path).parts:
            found = found.entries[name]
        return found

    def _wrapped(self, name: str, real: Any) -> Any:
        def call(target: Any, *rest: Any, **options: Any) -> Any:
            path = self._path(target, options.get("dir_fd"))
            result = real(target, *rest, **options)
            if path is None or not path.is_relative_to(self.path):
                return result
            if name == "open":
                self.names[result] = path
                if not rest[0] & os.O_CREAT:
                    return result
            elif name == "close":
                self.names.pop(target, None)
                return result
            if self.at < 0 or self.num_changes < self.at:  # the cut comes before the others
                self._note(name, path, rest, result)
            self.num_changes += 1
            return result

        return call

    def _path(self, target: Any, folder: int | None) -> Path | None:
        if isinstance(target, int):
            return self.names.get(target)
        return self.names[folder] / target if folder is not None and folder in self.names else Path(target)

    def _note(self, name: str, path: Path, rest: Any, result: Any) -> None:
        if name == "write":
            node = self.node(path)
            node.data = (node.data or b"") + bytes(rest[0])[:result]
        elif name == "fsync":
            self.node(path).fsync()
        elif name == "rename":
            self.node(path.parent).change(path.name, Path(rest[0]).name, self.node(path))
        elif name in ("unlink", "rmdir"):
            self.node(path.parent).change(path.name, "", None)
        else:
            made = Node(b"" if name == "open" else None)
            self.node(path.parent).change("", path.name, made)
