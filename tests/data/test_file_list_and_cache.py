"""Finding (`file_list.py`), checking and caching files (`cache.py`): all that is wrong is said at once; nothing is
read twice.

Tests of `data/cache.py`.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from meshwright.core.errors import MOST_PROBLEMS, MeshwrightError, Problem
from meshwright.data import cache
from meshwright.data import cache as hashed
from meshwright.data import open_data as source
from meshwright.data import token_reader as read
from meshwright.data.open_data import Data, open_text

TEXT = "to be, or not to be\n" * 4


def opened(*patterns: object, **settings: object) -> Data:
    chosen = {"sequence": 8, "held_out_fraction": 0.2, "seed": 0, **settings}
    return open_text(tuple(map(str, patterns)), **chosen)  # type: ignore[arg-type]


def problems_of(*patterns: object, **settings: object) -> tuple[Problem, ...]:
    with pytest.raises(MeshwrightError) as error:
        opened(*patterns, **settings)
    assert error.value.exit_code == 2
    return error.value.problems


def names(data: Data) -> list[str]:
    return [os.path.basename(file.path) for file in data.files]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "a.md", "deep/c.py", "deep/er/d.txt"):
        (tmp_path / name).write_text(TEXT)
    (tmp_path / "deep" / "e.jsonl").write_text(json.dumps({"text": TEXT}))
    (tmp_path / "image.bin").write_bytes(b"\0")
    (tmp_path / "deep" / "__init__.py").touch()
    return tmp_path


def test_patterns_folders_and_their_order(folder: Path) -> None:
    assert names(opened(folder)) == ["a.md", "b.txt", "c.py", "e.jsonl", "d.txt"]
    assert names(opened(folder / "**" / "*.txt")) == ["b.txt", "d.txt"]
    assert names(opened(folder / "deep/er/*", folder / "*.md")) == ["d.txt", "a.md"]


def test_a_file_reached_twice_is_read_once(folder: Path) -> None:
    (folder / "deep" / "loop").symlink_to(folder)
    (folder / "z.txt").symlink_to(folder / "b.txt")
    assert names(opened(folder, folder / "b.txt")) == ["a.md", "b.txt", "c.py", "e.jsonl", "d.txt"]


def test_a_name_with_pattern_characters_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "part[1].txt").write_text(TEXT)
    assert names(opened(tmp_path / "part[1].txt")) == ["part[1].txt"]


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(TEXT)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"abc\0def")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folders" / "only").mkdir(parents=True)
    patterns = ("*.txt", "*.jsonl", "corpsu.txt", "no/where.txt", "folders/*", "folders")
    found = problems_of(*(tmp_path / p for p in patterns), sequence=0, held_out_fraction=1.5)
    text = "\n".join(map(str, found)).replace(f"{tmp_path}/", "")
    for expected in (
        "data.sequence: 0 is not positive.",
        "data.held_out_fraction: 1.5 is not a fraction in [0, 1).",
        "empty.txt: is empty (0 bytes).",
        "binary.txt: is not a text file: a NUL byte at offset 3.",
        "latin.txt: is not UTF-8: byte 0xe9 at offset 3.",
        "broken.txt: cannot be read: a broken link.",
        "pipe.txt: is not a regular file.",
        "*.jsonl: no file matches.",
        'corpsu.txt: no such file. Did you mean "corpus.txt"?',
        "no/where.txt: no such file. There is no folder",
        "folders/*: matches folders (1) and no file.",
        "folders: the folder holds no .txt, .md, .py, .jsonl, .parquet, .idx, .npy, .npz, .csv file.",
    ):
        assert expected in text
    assert len(found) == 12


def test_bad_lines_are_named_by_file_and_number(tmp_path: Path) -> None:
    lines = [
        '{"text": "fine"}',
        '{"text": ',
        '{"texts": "x"}',
        "[1]",
        '{"text": 3}',
        '{"text": "a", "prompt": []}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text('\ufeff{"text": "\\ud800"}\n' + "[" * 100_000)
    (tmp_path / "c.jsonl").write_text("\n \n")
    found = problems_of(tmp_path / "*.jsonl")
    text = [str(problem).replace(f"{tmp_path}/", "") for problem in found]
    assert text[0].startswith("a.jsonl:2: is not valid JSON: Expecting value (column")
    assert text[1] == 'a.jsonl:3: has no "text" key. Its keys: "texts".'
    assert text[2] == 'a.jsonl:4: holds a list, not an object. Write {"text": "..."} on each line.'
    assert text[3] == "a.jsonl: and 2 more bad lines in this file."
    assert text[4].startswith('b.jsonl:1: "text" holds half of a surrogate pair at character 0')
    assert text[5].startswith("b.jsonl:2: is not usable JSON")
    assert text[6] == "c.jsonl: holds no record, only blank lines. Remove it or fill it."
    assert len(text) == 7


def test_other_keys_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"q": "why?", "a": TEXT}))
    data = opened(tmp_path / "a.jsonl", text_key="a", prompt_key="q")
    assert data.source.corpus.tokens.tobytes() == b"why?" + TEXT.encode() + b"\0"
    assert data.source.corpus.weights is not None
    assert data.source.corpus.weights[:5].tolist() == [0, 0, 0, 0, 1]


def test_many_problems_are_counted_not_poured_out(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"{i:02}.txt").touch()
    found = problems_of(tmp_path / "*.txt")
    assert len(found) == MOST_PROBLEMS + 1
    assert "and 10 more problems" in str(found[-1])


def test_no_pattern_is_a_problem() -> None:
    assert [p.what for p in problems_of()] == ["no file is named."]
    assert [p.what for p in problems_of("")] == ["no file is named."]


def test_an_unreadable_file_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(TEXT)

    def refuse(path: str, mode: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(read, "open", refuse, raising=False)  # tests may run as root, whom chmod does not stop
    assert str(problems_of(tmp_path / "a.txt")[0]).endswith("a.txt: cannot be read: permission denied.")


@pytest.mark.parametrize(
    ("text", "fraction", "expected"),
    [
        ("abcd", 0.0, "has 5 tokens; one sequence of 8 needs 9. Add text, or use sequence = 4 or less."),
        (
            "abcdefghij",
            0.1,
            "has 11 tokens; one sequence to train on and one to hold out of 8 needs 17. "
            "Add text, or use sequence = 5 or less, or held_out_fraction = 0.",
        ),
    ],
)
def test_a_corpus_too_short_says_the_numbers(tmp_path: Path, text: str, fraction: float, expected: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert [str(p) for p in problems_of(tmp_path, held_out_fraction=fraction)] == [f"data: the corpus {expected}"]


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    reads: list[int] = []
    real = source.read_files
    monkeypatch.setattr(source, "read_files", lambda *args: reads.append(1) or real(*args))
    return reads


def test_the_cache_is_reused_and_renewed_upon_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "deep" / "p.jsonl").write_text(json.dumps({"text": TEXT, "prompt": "say: "}))
    kept = folder / "cache"
    reads = count_reads(monkeypatch)
    plain = opened(folder)
    first, again = opened(folder, cache=kept), opened(folder, cache=kept)
    assert len(reads) == 2, "the second cached opening must not read"
    assert isinstance(again.source.corpus.tokens.base, np.memmap)
    assert plain.fingerprint == first.fingerprint == again.fingerprint
    assert np.array_equal(plain.source.corpus.weights, again.source.corpus.weights)

    (folder / "b.txt").write_text(TEXT.upper())  # same size, other content
    os.utime(folder / "b.txt", ns=(1, 1))
    changed = opened(folder, cache=kept)
    assert len(reads) == 3
    assert changed.fingerprint != first.fingerprint
    assert len(list(kept.iterdir())) == 5, "the outdated copy must go: index, hashes, tokens, starts, weights"
    assert first.batch(0, 4).inputs.shape == (4, 8), "an opened corpus outlives its files on disk"
    opened(folder, cache=kept, text_key="text", prompt_key="other")
    assert len(reads) == 4, "other keys give other tokens"


@pytest.mark.parametrize("damage", ["truncate", "remove", "index"])
def test_a_damaged_cache_is_rebuilt(folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = folder / "cache"
    before = opened(folder, cache=kept)
    tokens, index = next(kept.glob("*.tokens.npy")), next(kept.glob("*.json"))
    if damage == "remove":
        tokens.unlink()
    elif damage == "truncate":
        tokens.write_bytes(tokens.read_bytes()[:100])
    else:
        index.write_text("{")
    reads = count_reads(monkeypatch)
    after = opened(folder, cache=kept)
    assert len(reads) == 1
    assert after.fingerprint == before.fingerprint


@pytest.mark.parametrize("ending", ["tokens.npy", "starts.npy", "weights.npy", "json", "xxh3"])
def test_no_damage_to_the_cache_is_used(folder: Path, ending: str) -> None:
    """Flipped bits, a page of zeros, a cut end, a file of another slot: each is found, and the cache made again."""
    (folder / "deep" / "p.jsonl").write_text(json.dumps({"text": TEXT, "prompt": "say: "}))
    (folder / "other.txt").write_text(TEXT.upper())
    kept = folder / "cache"
    other = opened(folder / "deep", folder / "other.txt", cache=kept, text_key="text")
    (stranger,) = kept.glob(f"*.{ending}")
    (folder / "other.txt").unlink()
    before = opened(folder)
    opened(folder, cache=kept)
    (path,) = (found for found in kept.glob(f"*.{ending}") if found != stranger)
    whole, taken = path.read_bytes(), stranger.read_bytes()
    random = np.random.default_rng(0)
    wrong = [whole[: len(whole) // 2], whole[:-1], taken, bytes(len(whole))]
    for place in random.integers(0, len(whole), 30).tolist():
        flipped = bytearray(whole)
        flipped[place] ^= 1 << int(random.integers(8))
        wrong.append(bytes(flipped))
    for content in wrong:
        path.write_bytes(content)
        after = opened(folder, cache=kept)
        assert after.fingerprint == before.fingerprint
        for field in ("tokens", "starts", "weights"):
            assert np.array_equal(getattr(after.source.corpus, field), getattr(before.source.corpus, field))
        assert path.read_bytes() == whole or content == whole
    assert other.batch(0, 4).inputs.shape == (4, 8)


def test_a_large_cache_is_checked_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.random.default_rng(0).integers(32, 127, 400_000, dtype=np.uint8).tobytes()
    (tmp_path / "a.txt").write_bytes(text)
    kept = tmp_path / "cache"
    before = opened(tmp_path / "a.txt", held_out_fraction=0.0)
    opened(tmp_path / "a.txt", cache=kept, held_out_fraction=0.0)
    monkeypatch.setattr(hashed, "EAGER_BYTES", 0)
    (path,) = kept.glob("*.tokens.npy")
    content = bytearray(path.read_bytes())
    content[5 * hashed.BLOCK_BYTES + 7] ^= 4
    path.write_bytes(content)
    after = opened(tmp_path / "a.txt", cache=kept, held_out_fraction=0.0)
    first, last = 5 * hashed.BLOCK_BYTES, 6 * hashed.BLOCK_BYTES  # with the header of the file: 128 bytes
    begin = 128 + 8 * np.arange(after.num_samples)
    sound = np.flatnonzero((begin + 9 <= first) | (begin >= last))
    assert len(sound) > 40_000
    assert np.array_equal(after.source.pick(sound).inputs, before.source.pick(sound).inputs)
    for sample in np.setdiff1d(np.arange(after.num_samples), sound)[[0, 100, -1]]:
        with pytest.raises(MeshwrightError, match=r"tokens.npy: is not as it was written, at offset 327,680\."):
            after.source.pick(np.array([sample]))
    assert not list(kept.glob("*.json")), "the next start makes it again"
    again = opened(tmp_path / "a.txt", cache=kept, held_out_fraction=0.0)
    assert np.array_equal(again.batch(0, 50_000).inputs, before.batch(0, 50_000).inputs)


def test_many_may_build_the_cache_at_once(folder: Path) -> None:
    prints: list[str] = []
    openers = [
        threading.Thread(target=lambda: prints.append(opened(folder, cache=folder / "cache").fingerprint))
        for _ in range(6)
    ]
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join()
    assert prints == [opened(folder).fingerprint] * 6
    assert len(list((folder / "cache").iterdir())) == 4, "no draft may stay behind"


def test_a_cache_that_cannot_be_written_is_a_problem(folder: Path) -> None:
    found = problems_of(folder, cache=folder / "b.txt")
    assert len(found) == 1
    assert found[0].where == str(folder / "b.txt")
    assert found[0].what.startswith("the cache cannot be written: ")


def test_a_failed_write_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.np, "save", full)
    assert "no space left on device" in problems_of(folder, cache=folder / "cache")[0].what
    assert not list((folder / "cache").iterdir())
