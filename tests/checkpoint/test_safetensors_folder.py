"""A folder of safetensors from a stranger: named file and place, exit code 2, nothing outside of it touched."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from meshwright.checkpoint.manifest import MAX_TENSORS
from meshwright.checkpoint.safetensors_folder import BUFFER_BYTES, INDEX, SMALL_RUN_BYTES, WEIGHTS, open_folder
from meshwright.core.box import Box
from meshwright.core.errors import MOST_PROBLEMS, MeshwrightError

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_raw(path: Path, header: Any, num_bytes: int) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))


def entry(start: int, end: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


HEADERS: dict[str, tuple[Any, int, str]] = {
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "'b' begins at byte 4 and overlaps"),
    "hidden overlap": ({"a": entry(0, 16), "b": entry(4, 8), "c": entry(16, 20)}, 20, "'b' begins at byte 4"),
    "hole": ({"a": entry(0, 8), "b": entry(12, 16)}, 16, "leaves a hole"),
    "beyond the file": ({"a": entry(0, 8)}, 4, "cut short"),
    "more in the file": ({"a": entry(0, 8)}, 12, "too long"),
    "size": ({"a": entry(0, 8, shape=[3])}, 8, "has 12 bytes, its data_offsets say 8"),
    "huge shape": ({"a": entry(0, 0, shape=[1 << 62, 1 << 62])}, 0, "impossible shape"),
    "zero by huge": ({"a": entry(0, 0, shape=[0, 1 << 60])}, 0, "impossible shape"),
    "negative shape": ({"a": entry(0, 8, shape=[-2, -1])}, 8, "impossible shape"),
    "true": ({"a": entry(0, 4, shape=[True])}, 4, "impossible shape"),
    "negative offset": ({"a": entry(-8, 0)}, 8, "impossible data_offsets"),
    "backwards": ({"a": entry(8, 0, shape=[2])}, 8, "impossible data_offsets"),
    "dtype": ({"a": entry(0, 8, dtype="OBJECT")}, 8, "unknown dtype 'OBJECT'"),
    "dtype of another type": ({"a": entry(0, 8, dtype=["F32"])}, 8, "unknown dtype"),
    "dtype by its torch name": ({"a": entry(0, 8, dtype="float32")}, 8, "unknown dtype 'float32'"),
    "a number for a shape": ({"a": entry(0, 8, shape=2)}, 8, "impossible shape 2"),
    "missing key": ({"a": {"dtype": "F32", "shape": [2]}}, 8, "must have dtype, shape and data_offsets"),
    "extra key": ({"a": {**entry(0, 8), "run": "rm"}}, 8, "must have"),
    "terminal codes": ({"a\x1b[2J": entry(0, 8)}, 8, "not a plain name"),
    "long name": ({"a" * 5000: entry(0, 8)}, 8, "not a plain name"),
    "list": ([1], 0, "not a JSON object"),
    "twice": (b'{"a": {}, "a": {}}', 0, "'a' is there twice"),
    "deep": (b'{"a":' * 100_000, 0, "not valid JSON"),
    "not text": (b"\xff\xfe\x00", 0, "not valid JSON"),
}


def refusal(folder: Path) -> str:
    with pytest.raises(MeshwrightError) as caught:
        open_folder(folder)
    assert caught.value.exit_code == 2
    assert len(caught.value.problems) <= MOST_PROBLEMS + 1
    assert all("\n" not in str(problem) and "\x1b" not in str(problem) for problem in caught.value.problems)
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", HEADERS)
def test_headers(tmp_path: Path, case: str) -> None:
    header, num_bytes, said = HEADERS[case]
    write_raw(tmp_path / WEIGHTS, header, num_bytes)
    assert said in refusal(tmp_path)


@pytest.mark.parametrize(
    "data", [b"", b"\x01\x00", (1 << 62).to_bytes(8, "little") + b"{}", (100).to_bytes(8, "little") + b"{"]
)
def test_truncated_headers(tmp_path: Path, data: bytes) -> None:
    (tmp_path / WEIGHTS).write_bytes(data)
    assert "cut short" in refusal(tmp_path)


def test_a_million_tensors_are_refused_quickly(tmp_path: Path) -> None:
    one = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    write_raw(tmp_path / WEIGHTS, b"{" + b",".join(one % n for n in range(10**6)) + b"}", 0)
    start = time.process_time()
    assert f"lists 1000000 tensors; the limit is {MAX_TENSORS}" in refusal(tmp_path)
    assert time.process_time() - start < 2


def two_shards(folder: Path) -> dict[str, str]:
    save_file({"a": torch.arange(6.0).reshape(2, 3)}, folder / SHARDS[0])
    save_file({"b": torch.ones(4)}, folder / SHARDS[1])
    return {"a": SHARDS[0], "b": SHARDS[1]}


def write_index(folder: Path, index: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


INDEXES: dict[str, tuple[Callable[[dict[str, str]], Any], str]] = {
    "parent": (lambda index: {**index, "a": "../x.safetensors"}, "'../x.safetensors' is not a plain file name"),
    "absolute": (lambda index: {**index, "a": "/etc/passwd"}, "'/etc/passwd' is not a plain file name"),
    "inner": (lambda index: {**index, "a": "sub/x.safetensors"}, "is not a plain file name"),
    "nul": (lambda index: {**index, "a": "x\0.safetensors"}, "is not a plain file name"),
    "number": (lambda index: {**index, "a": 3}, "3 is not a plain file name"),
    "missing shard": (lambda index: {**index, "c": "other.safetensors"}, "other.safetensors: is missing"),
    "missing tensor": (lambda index: {**index, "c": SHARDS[0]}, f"'c' is not in {SHARDS[0]}"),
    "wrong shard": (lambda index: {**index, "a": SHARDS[1]}, f"'a' is in {SHARDS[0]}, not in {SHARDS[1]}"),
    "not listed": (lambda index: {"a": SHARDS[0], "c": SHARDS[1]}, "'b' of"),
    "empty": (lambda index: {}, "names 0 shards"),
    "list": (lambda index: [index], "not a table"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_indexes(tmp_path: Path, case: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"outside")
    folder = tmp_path / "folder"
    folder.mkdir()
    index = two_shards(folder)
    write_index(folder, index)
    assert set(open_folder(folder).tensors) == {"a", "b"}
    change, said = INDEXES[case]
    write_index(folder, {**change(index), "z": index["a"]} if case == "wrong shard" else change(index))
    assert said in refusal(folder)


def test_all_problems_of_all_shards_at_once(tmp_path: Path) -> None:
    write_raw(tmp_path / SHARDS[0], {"a": entry(0, 8)}, 4)
    write_raw(tmp_path / SHARDS[1], {f"b{n}": entry(0, 8, dtype="X") for n in range(50)}, 8)
    write_index(tmp_path, {"a": SHARDS[0], "b": SHARDS[1]})
    said = refusal(tmp_path)
    assert SHARDS[0] in said
    assert SHARDS[1] in said
    assert "more problems" in said


def test_the_same_tensor_in_two_shards(tmp_path: Path) -> None:
    write_index(tmp_path, two_shards(tmp_path))
    save_file({"a": torch.ones(1), "b": torch.ones(4)}, tmp_path / SHARDS[1])
    assert f"'a' is in {SHARDS[0]} too" in refusal(tmp_path)


@pytest.mark.parametrize("place", ["file", "index", "pipe", "folder"])
def test_only_plain_files_of_the_folder_are_opened(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"a": torch.ones(4)}, tmp_path / "outside.safetensors")
    if place == "file":
        (folder / WEIGHTS).symlink_to(tmp_path / "outside.safetensors")
    elif place == "index":
        write_index(folder, {"a": "link.safetensors"})
        (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    elif place == "pipe":
        os.mkfifo(folder / WEIGHTS)
    else:
        (folder / WEIGHTS).mkdir()
    said = refusal(folder)
    assert ("symbolic link" in said and "cp -rL" in said) if place in ("file", "index") else "not a plain file" in said


@pytest.mark.parametrize("files", [[], ["pytorch_model.bin"]])
def test_folders_without_safetensors(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).touch()
    said = refusal(tmp_path)
    assert "has neither" in said
    assert ("pickled" in said) == bool(files)


def test_a_file_cut_while_it_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1000)}, tmp_path / WEIGHTS)
    held = open_folder(tmp_path)
    os.truncate(tmp_path / WEIGHTS, 1000)
    with pytest.raises(MeshwrightError, match="ends before byte"):
        held.read_into("a", Box.whole((1000,)), torch.empty(1000))


def test_any_box_of_any_layout_is_read_right(tmp_path: Path) -> None:
    """Runs shorter and longer than the limits, rows longer than the buffer, strided targets, other dtypes."""
    wide = BUFFER_BYTES // 4 + 5
    shapes = [(), (7,), (3, 5), (2, wide), (5, 3, 7), (3, 4, SMALL_RUN_BYTES // 8), (0, 4)]
    held = {str(n): torch.randn(shape).bfloat16() if n % 2 else torch.randn(shape) for n, shape in enumerate(shapes)}
    save_file(held, tmp_path / WEIGHTS)
    folder = open_folder(tmp_path)
    for name, tensor in held.items():
        shape = tuple(tensor.shape)
        boxes = [Box.whole(shape), Box(shape, tuple(n // 3 for n in shape), tuple(-(-n // 2) for n in shape))]
        boxes += [Box.whole(shape).chunk(dim, 1, 2) for dim in range(len(shape))]
        for box in boxes:
            for dtype in (tensor.dtype, torch.float64):
                plain = torch.empty(box.size, dtype=dtype)
                strided = torch.empty((*box.size, 2), dtype=dtype)[..., 1]
                for out in (plain, strided):
                    folder.read_into(name, box, out)
                    assert torch.equal(out, tensor[box.slices].to(dtype))
