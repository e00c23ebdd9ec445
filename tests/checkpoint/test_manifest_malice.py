"""A manifest from a stranger: nothing runs, nothing outside the folder is touched, nothing takes for ever.

Each one carries a right digest: the digest finds accidents, these checks find intent.
"""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from checkpoint_ranks import save, toy

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.manifest import MAX_CELLS, MAX_TENSORS, cover_problem
from meshwright.checkpoint.step_folders import read_manifest, verify
from meshwright.core.box import Box
from meshwright.core.errors import MOST_PROBLEMS, MeshwrightError

Json = dict[str, Any]
SHARD = "rank-00000.safetensors"


def forge(folder: Path, text: str) -> None:
    rest = text.lstrip()[1:].encode("utf-8", "surrogatepass")
    digest = xxhash.xxh3_128_hexdigest(rest).encode()
    (folder / "manifest.json").write_bytes(b'{"digest": "' + digest + b'",' + rest)


def genuine(folder: Path) -> Json:
    value: Json = json.loads((folder / "manifest.json").read_text())
    del value["digest"]
    return value


def rename_file(name: str) -> Callable[[Json], None]:
    def change(value: Json) -> None:
        value["files"][name] = value["files"].pop(SHARD)
        for piece in value["pieces"]:
            piece["file"] = name if piece["file"] == SHARD else piece["file"]

    return change


def of_weight(value: Json) -> list[Json]:
    """Its pieces: (2, 3) each, of (4, 6)."""
    return [p for p in value["pieces"] if p["tensor"] == "weight"]


def piece(**fields: Any) -> Callable[[Json], None]:
    return lambda value: of_weight(value)[0].update(fields)


def tensor(**fields: Any) -> Callable[[Json], None]:
    return lambda value: value["tensors"]["weight"].update(fields)


def top(**fields: Any) -> Callable[[Json], None]:
    return lambda value: value.update(fields)


def repeat_first_piece(value: Json) -> None:
    value["pieces"].append(of_weight(value)[0])


def drop_first_piece(value: Json) -> None:
    value["pieces"].remove(of_weight(value)[0])


def overlap_of_right_volume(value: Json) -> None:
    """One moved onto another, so only geometry shows it."""
    first, second = of_weight(value)[:2]
    first["offset"] = second["offset"]


def odd_name(value: Json) -> None:
    value["tensors"]["w\x1b[2J"] = {"dtype": "float32", "shape": [0]}


CASES: list[tuple[str, Callable[[Json], None], str]] = [
    ("parent", rename_file("../x"), "is not allowed"),
    ("deep parent", rename_file("a/../../x"), "is not allowed"),
    ("absolute", rename_file("/etc/passwd"), "is not allowed"),
    ("dots", rename_file(".."), "is not allowed"),
    ("newline", rename_file("rank\n"), "is not allowed"),
    ("nul", rename_file("a\0b"), "is not allowed"),
    ("manifest as shard", rename_file("manifest.json"), "is not allowed"),
    ("empty name", rename_file(""), "is not allowed"),
    ("unlisted file", piece(file="other.safetensors"), "not listed"),
    ("unlisted tensor", piece(tensor="other"), "not listed"),
    ("negative size", piece(size=[-2, 3]), "outside its shape"),
    ("negative offset", piece(offset=[-1, 0]), "outside its shape"),
    ("beyond", piece(offset=[3, 0]), "outside its shape"),
    ("fewer dims", piece(offset=[0]), "outside its shape"),
    ("fraction", piece(size=[2.0, 3]), "whole number"),
    ("text for numbers", piece(size="23"), "expected a list"),
    ("empty mapping for numbers", piece(size={}), "expected a list"),
    ("extra key", piece(run="rm"), "unknown key"),
    ("true", piece(size=[True, 3]), "whole number"),
    ("overlap", repeat_first_piece, "overlap"),
    ("hidden overlap", overlap_of_right_volume, "overlap"),
    ("gap", drop_first_piece, "of its 24 elements"),
    ("dtype", tensor(dtype="object"), "unknown dtype"),
    ("huge shape", tensor(shape=[1 << 60, 1]), "impossible shape"),
    ("many dims", tensor(shape=[1] * 1000), "impossible shape"),
    ("terminal codes", odd_name, "plain name"),
    ("hash", lambda v: v["files"][SHARD].update(xxh3="zz"), "hash"),
    ("too small a file", lambda v: v["files"][SHARD].update(bytes=3), "is said to hold"),
    ("negative bytes", lambda v: v["files"][SHARD].update(bytes=-3), "impossible size"),
    ("step", top(step=-1), "step is -1"),
    ("other step", top(step=2), "in the folder"),
    ("newer", top(version=2), "version 2"),
    ("older", top(version=0), "not one of its values"),
    ("unknown key", top(run="rm -rf"), "unknown key"),
    ("list", top(files=[]), "table"),
    ("null", top(tensors=None), "table"),
]


@pytest.mark.parametrize(("change", "said"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_refused(tmp_path: Path, change: Callable[[Json], None], said: str) -> None:
    final = save(tmp_path, 1, toy(1))
    value = genuine(final)
    forge(final, json.dumps(value))
    assert verify(final) == (), "the forger itself must be able to write a good one"
    change(value)
    forge(final, json.dumps(value))
    problems = verify(final)
    assert said in str(problems[0])
    assert "\n" not in str(problems[0])
    with pytest.raises(MeshwrightError):
        Reader(final)


@pytest.mark.parametrize(
    "text",
    ["{" + '"a":[' * 100_000, "[" * 100_000, '{"step": ' + "9" * 9000 + "}", '{"step": NaN}', "{}", "{"],
)
def test_text_that_is_no_manifest(tmp_path: Path, text: str) -> None:
    final = save(tmp_path, 1, toy(1))
    forge(final, text)
    assert verify(final)


def test_huge_counts_are_refused_quickly(tmp_path: Path) -> None:
    final = save(tmp_path, 1, toy(1))
    value = genuine(final)
    value["tensors"] = {f"t{index}": 0 for index in range(MAX_TENSORS + 1)}
    forge(final, json.dumps(value))
    start = time.process_time()
    problems = verify(final)
    assert f"{MAX_TENSORS + 1} tensors; the limit is" in str(problems[0])
    assert time.process_time() - start < 5
    value["tensors"] = {f"t{index}": 0 for index in range(1000)}
    forge(final, json.dumps(value))
    assert len(verify(final)) <= MOST_PROBLEMS


def test_staircases_do_not_take_for_ever() -> None:
    """Pieces cut differently in each row make the square of their number in cells."""
    side = 2 * int(MAX_CELLS**0.5)
    boxes = [
        Box((side, side), (row, start), (1, length))
        for row in range(side)
        for start, length in ((0, row + 1), (row + 1, side - row - 1))
    ]
    said = cover_problem((side, side), boxes)
    assert said is not None
    assert "too irregularly" in said


def test_a_linked_manifest_is_not_followed(tmp_path: Path) -> None:
    final = save(tmp_path, 1, toy(1))
    (final / "manifest.json").rename(tmp_path / "elsewhere")
    (final / "manifest.json").symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in str(verify(final)[0])


def scrambled(value: Any, dice: random.Random) -> Any:
    """The same tree with one leaf or branch replaced by something odd."""
    odd = [None, True, -1, 1 << 70, 0.5, "", "../x", [], {}, [[]], [1 << 62], {"a": 1}]
    if not isinstance(value, dict | list) or not value or dice.random() < 0.15:
        return dice.choice(odd)
    value = copy.copy(value)
    key = dice.choice(list(value)) if isinstance(value, dict) else dice.randrange(len(value))
    value[key] = scrambled(value[key], dice)
    return value


def test_fuzzed_manifests_only_ever_give_problems(tmp_path: Path) -> None:
    final = save(tmp_path, 1, toy(1))
    value = genuine(final)
    dice = random.Random(11)
    refused = 0
    for _ in range(300):
        forge(final, json.dumps(scrambled(value, dice)))
        refused += bool(verify(final))
    assert refused > 200


def test_reading_manifests_needs_no_torch(tmp_path: Path) -> None:
    final = save(tmp_path, 1, toy(1))
    assert read_manifest(final).step == 1
    code = (
        "import sys, pathlib; from meshwright.checkpoint import step_folders; "
        "assert not step_folders.verify(pathlib.Path(sys.argv[1])); "
        "assert step_folders.describe(pathlib.Path(sys.argv[1]).parent); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(final)], check=True, timeout=60)
