"""Killed at any system call of a save, there is always a valid checkpoint, and never half a one accepted."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import holds, save, toy

from meshwright.checkpoint.save import Retention, begin, commit, space_forecast, write_rank_file, write_seconds
from meshwright.checkpoint.step_folders import leftover_folders, list_steps, newest_good, usable_folders, verify
from meshwright.core.box import Box
from meshwright.core.errors import MeshwrightError

CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")


class Killed(BaseException):
    """No `except` of ours may see a kill."""


def quiet(_: str) -> None:
    pass


class Watch:
    """Every disk call that changes something, in order; the `at`-th raises instead of happening."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        *,
        at: int = -1,
        error: BaseException | None = None,
        for_ever: bool = False,
    ):
        self.at, self.error, self.for_ever = at, error, for_ever
        self.log: list[tuple[str, str]] = []
        self.names: dict[int, str] = {}
        for name in CALLS:
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def strike(self) -> None:
        """What happens in place of the call."""
        if self.error is not None:
            raise self.error

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Any:
        def call(target: Any, *rest: Any, **options: Any) -> Any:
            if name == "open" and not rest[0] & os.O_CREAT:
                handle = real(target, *rest, **options)
                self.names[handle] = str(target)
                return handle
            shown = self.names.get(target, "?") if isinstance(target, int) else str(target)
            self.log.append((name, Path(shown).name))
            place = len(self.log) - 1
            if place == self.at or (self.for_ever and 0 <= self.at < place):
                self.strike()
            result = real(target, *rest, **options)
            if name == "open":
                self.names[result] = str(target)
            return result

        return call


def failed_save(
    root: Path, step: int, tensors: dict[str, torch.Tensor], **failing: Any
) -> Killed | MeshwrightError | None:
    """What a save ends with when the disk fails it."""
    with pytest.MonkeyPatch.context() as patch:
        Watch(patch, **failing)
        try:
            save(root, step, tensors, keep=1)
        except (Killed, MeshwrightError) as error:
            return error
    return None


def number_of_calls(root: Path, step: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch)
        save(root, step, toy(step), keep=1)
    return len(watch.log)


@pytest.mark.parametrize("step", [1, 2], ids=["replace the only one", "next step"])
def test_killed_at_every_call(tmp_path: Path, step: int) -> None:
    save(tmp_path / "start", 1, toy(1), keep=1)
    shutil.copytree(tmp_path / "start", tmp_path / "count")
    calls = number_of_calls(tmp_path / "count", step)
    assert calls > 12
    for at in range(calls):
        root = tmp_path / f"at-{at}"
        shutil.copytree(tmp_path / "start", root)
        assert isinstance(failed_save(root, step, toy(7), at=at, error=Killed()), Killed)
        found = newest_good(root, report=quiet)
        assert found is not None, f"nothing left after a kill at call {at}"
        assert holds(found, toy(1)) or holds(found, toy(7))
        assert all(verify(folder) == () for folder in usable_folders(root).values())
        # The next save heals whatever the kill left behind.
        save(root, 3, toy(3), keep=1)
        assert os.listdir(root) == ["step-00000003"]


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(("code", "for_ever"), [(errno.ENOSPC, True), (errno.EROFS, True), (errno.EIO, False)])
def test_a_disk_that_refuses_any_call(tmp_path: Path, code: int, for_ever: bool, step: int) -> None:
    save(tmp_path / "start", 1, toy(1), keep=1)
    shutil.copytree(tmp_path / "start", tmp_path / "count")
    refused = 0
    for at in range(number_of_calls(tmp_path / "count", step)):
        root = tmp_path / f"at-{at}"
        shutil.copytree(tmp_path / "start", root)
        refusal = failed_save(root, step, toy(7), at=at, error=OSError(code, os.strerror(code)), for_ever=for_ever)
        found = newest_good(root, report=quiet)
        assert found is not None
        assert holds(found, toy(1)) or holds(found, toy(7))
        assert all(verify(folder) == () for folder in usable_folders(root).values())
        if refusal is None:  # only a deletion failed: the next save tries again
            assert holds(found, toy(7))
            continue
        refused += 1
        assert isinstance(refusal, MeshwrightError)
        assert refusal.exit_code == 1
        assert os.strerror(code) in str(refusal)
        assert str(root) in str(refusal)
        if not for_ever:
            assert 1 in list_steps(root), "the one that was there has its name again"
            assert not leftover_folders(root, "tmp"), "the space is given back"
    assert refused > 10


def test_disk_full_gives_the_space_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, toy(1), keep=1)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(MeshwrightError, match=r"rank-00000.safetensors: .*No space left.*Free space"):
        save(tmp_path, 2, toy(2), keep=1)
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_a_read_only_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(MeshwrightError, match="Read-only file system"):
        begin(tmp_path / "run" / "checkpoints", 1)


def test_the_order_a_power_cut_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents, names in the folder, then the folder's own name are durable before anything is deleted."""
    root = tmp_path / "run" / "checkpoints"
    save(root, 1, toy(1), keep=1)
    watch = Watch(monkeypatch)
    save(root, 2, toy(2), keep=1)
    tmp = next(name for call, name in watch.log if call == "mkdir")
    order = [
        ("mkdir", tmp),
        ("open", "rank-00001.safetensors"),
        ("fsync", "rank-00001.safetensors"),
        ("open", "manifest.json"),
        ("fsync", "manifest.json"),
        ("fsync", tmp),
        ("rename", tmp),
        ("fsync", "checkpoints"),
        ("rename", "step-00000001"),
    ]
    places = [watch.log.index(event) for event in order]
    assert places == sorted(places)
    removed = [index for index, (call, _) in enumerate(watch.log) if call in ("unlink", "rmdir")]
    assert removed
    assert min(removed) > places[-1]
    last_write = max(index for index, event in enumerate(watch.log) if event == ("write", "manifest.json"))
    assert last_write < watch.log.index(("fsync", "manifest.json"))


def test_retention_keeps_as_many_as_asked(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step, toy(step), keep=3)
    assert list_steps(tmp_path) == (3, 4, 5)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-00000009.tmp-dead").mkdir()
    (tmp_path / "step-backup").mkdir()
    save(tmp_path, 6, toy(6), keep=1)
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "step-00000006", "step-backup"]
    save(tmp_path, 4, toy(4), keep=1)
    assert list_steps(tmp_path) == (4, 6), "a newer step is never deleted by an older one"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1, toy(1), counts=(2, 2), num_ranks=4)
    final = save(tmp_path, 1, toy(7), counts=(1, 1), num_ranks=1)
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert holds(final, toy(7))
    assert sorted(os.listdir(final)) == ["manifest.json", "rank-00000.safetensors"]


def test_two_ranks_that_save_the_same_piece_are_refused(tmp_path: Path) -> None:
    tmp = begin(tmp_path, 1)
    weight = toy(1)["weight"]
    entries = [write_rank_file(tmp, rank, [("weight", Box.whole((4, 6)), weight)]) for rank in (0, 1)]
    with pytest.raises(MeshwrightError, match=r"'weight'.*overlap"):
        commit(tmp_path, 1, tmp, entries, {}, keep=1)
    tmp = begin(tmp_path, 1)
    half = Box((4, 6), (0, 0), (2, 6))
    entries = [write_rank_file(tmp, 0, [("weight", half, weight[:2])])]
    with pytest.raises(MeshwrightError, match="hold 12 of its 24"):
        commit(tmp_path, 1, tmp, entries, {}, keep=1)
    assert os.listdir(tmp_path) == []


def test_state_that_is_not_json_is_refused(tmp_path: Path) -> None:
    for bad in (float("nan"), object()):
        with pytest.raises(MeshwrightError, match="checkpoint state"):
            save(tmp_path, 1, toy(1), state={"loss": bad})
    assert os.listdir(tmp_path) == []


def test_multiples_of_keep_every_stay(tmp_path: Path) -> None:
    for step in range(1, 12):
        save(tmp_path, step, toy(step), keep=Retention(last=2, every=4, spared=lambda step: step == 7))
    assert list_steps(tmp_path) == (4, 7, 8, 10, 11)


def test_room_for_the_checkpoints_is_looked_at_before_training(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    assert space_forecast(tmp_path / "run", 1000, 100, keep=2) == ""
    few, many = (write_seconds(tmp_path / "run", size) for size in (1000, 1 << 40))
    assert 0 < few < 60 < many  # of which 16 MiB were written
    assert os.listdir(tmp_path / "run") == []
    told = space_forecast(tmp_path, int(free * 0.45), 100, keep=2)
    assert "2 are kept, and one is written" in told
    assert "GiB" in told
    assert "1 more" not in told
    told = space_forecast(tmp_path, int(free * 0.02), 100, keep=1, every=1)
    assert "101 are kept and one more is being written" in told
    with pytest.raises(MeshwrightError, match="not one can be written") as caught:
        space_forecast(tmp_path, 2 * free, 100, keep=2)
    assert caught.value.exit_code == 2
