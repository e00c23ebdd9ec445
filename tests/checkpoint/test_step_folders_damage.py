"""Whatever happens to bytes on disk is noticed before a tensor is read, and the checkpoint before is used."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import holds, save, toy

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.step_folders import (
    describe,
    list_steps,
    newest_good,
    read_manifest,
    step_folder,
    verify,
    verify_all,
)
from meshwright.core.errors import MeshwrightError

SHARD, OTHER = "rank-00000.safetensors", "rank-00001.safetensors"


def flip(path: Path, at: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    final = save(tmp_path, 1, {"w": torch.arange(6.0)}, counts=(2,))
    dice = random.Random(5)
    checked = 0
    for path in sorted(final.iterdir()):
        whole = path.read_bytes()
        for at in range(len(whole)):
            flip(path, at, dice.randrange(8))
            problems = verify(final)
            assert problems, f"byte {at} of {path.name}"
            assert path.name in str(problems[0])
            path.write_bytes(whole)
            checked += 1
    assert checked > 700
    assert verify(final) == ()


def truncate(folder: Path) -> None:
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 1)


def lengthen(folder: Path) -> None:
    with open(folder / SHARD, "ab") as file:
        file.write(b"\0")


def zero_page(folder: Path) -> None:
    with open(folder / SHARD, "r+b") as file:
        file.seek(4096)
        file.write(bytes(4096))


def swap(folder: Path) -> None:
    os.rename(folder / SHARD, folder / "x")
    os.rename(folder / OTHER, folder / SHARD)
    os.rename(folder / "x", folder / OTHER)


def stale(folder: Path) -> None:
    shutil.copy(step_folder(folder.parent, 1) / SHARD, folder / SHARD)


def stale_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(step_folder(folder.parent, 1), folder)


def remove(folder: Path) -> None:
    os.unlink(folder / OTHER)


def remove_manifest(folder: Path) -> None:
    os.unlink(folder / "manifest.json")


def edit_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"seed": 7', '"seed": 8'))


def empty_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"")


def fifo(folder: Path) -> None:
    os.unlink(folder / SHARD)
    os.mkfifo(folder / SHARD)


def link(folder: Path) -> None:
    os.rename(folder / SHARD, folder.parent / "elsewhere")
    os.symlink(folder.parent / "elsewhere", folder / SHARD)


WAYS = [
    (truncate, SHARD),
    (lengthen, SHARD),
    (zero_page, SHARD),
    (swap, SHARD),
    (stale, SHARD),
    (stale_folder, "of step 1, in the folder step-00000002"),
    (remove, f"{OTHER}: is missing"),
    (remove_manifest, "manifest.json: is missing"),
    (edit_manifest, "manifest.json: does not match its own digest"),
    (empty_manifest, "manifest.json"),
    (fifo, "not a plain file"),
    (link, "symbolic link"),
]


@pytest.mark.parametrize(("damage", "said"), WAYS, ids=[way.__name__ for way, _ in WAYS])
def test_damage_is_reported_and_the_one_before_is_used(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    tensors = [{"w": torch.arange(4096.0) + step} for step in (1, 2)]
    for step in (1, 2):
        save(tmp_path, step, tensors[step - 1])
    damage(step_folder(tmp_path, 2))
    lines: list[str] = []
    found = newest_good(tmp_path, report=lines.append)
    assert found == step_folder(tmp_path, 1)
    assert holds(found, tensors[0])
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert "step-00000002 is damaged" in lines[0]
    assert said in lines[0]
    assert [bool(problems) for problems in verify_all(tmp_path).values()] == [False, True]
    shutil.rmtree(step_folder(tmp_path, 1))
    with pytest.raises(MeshwrightError, match="every checkpoint here is damaged") as error:
        newest_good(tmp_path, report=lines.append)
    assert said in str(error.value)


def test_nothing_saved_is_no_error(tmp_path: Path) -> None:
    assert newest_good(tmp_path / "absent", report=pytest.fail) is None
    assert newest_good(tmp_path, report=pytest.fail) is None
    (tmp_path / "step-00000003.tmp-abc").mkdir()
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-00000004").write_text("a file")
    os.symlink(tmp_path / "step-3", tmp_path / "step-00000005")
    assert newest_good(tmp_path, report=pytest.fail) is None
    assert list_steps(tmp_path) == ()


def test_steps_of_many_digits_keep_their_order(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step, toy(1))
    assert list_steps(tmp_path) == (99_999_999, 100_000_000)


def test_a_shard_that_is_not_what_the_manifest_says_is_refused(tmp_path: Path) -> None:
    """A reader that skipped `verify` still never hands out wrong shapes or types."""
    tensors = {"weight": toy(1)["weight"]}
    final = save(tmp_path, 1, tensors, counts=(1,), num_ranks=1)
    other = save(tmp_path / "b", 1, {"weight": torch.zeros(3, dtype=torch.int8)}, counts=(1,), num_ranks=1)
    shutil.copy(other / SHARD, final / SHARD)
    with pytest.raises(MeshwrightError, match="the manifest says"):
        holds(final, tensors)
    (final / SHARD).write_bytes(b"\xff" * 64)
    with pytest.raises(MeshwrightError, match="cannot be read"):
        holds(final, tensors)
    assert Reader(final).step == 1


def test_describe(tmp_path: Path) -> None:
    plan = {"techniques": [{"name": "unheard_of", "size": 2}], "batch": 8}
    save(tmp_path, 1, toy(1), state={"plan": "one device"})
    save(tmp_path, 2, toy(2), num_ranks=3, state={"plan": plan})
    first, second = describe(tmp_path)
    assert (first.step, first.num_files, first.num_tensors) == (1, 2, 3)
    assert first.bytes == sum(f.stat().st_size for f in step_folder(tmp_path, 1).glob("*.safetensors"))
    assert (second.num_files, second.damage) == (3, "")
    assert second.when_utc == read_manifest(step_folder(tmp_path, 2)).saved_utc
    assert second.when_utc.endswith("+00:00")
    flip(step_folder(tmp_path, 2) / "manifest.json", 60, 1)
    assert "digest" in describe(tmp_path)[1].damage
    assert describe(tmp_path / "absent") == []
