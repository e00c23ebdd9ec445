"""Bad data through `mw`: exit 2, one line for each problem with file and place, nothing outside the run folder.

Tests of `cli/data.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command import write_plan

from meshwright.cli.main import main
from meshwright.data.token_files import write_index

RUN = """\
[model]
name = "{model}"
[data]
train = "{train}"
{more}
[train]
batch = 4
steps = 2
[run]
folder = "{folder}/run"
cluster = "laptop"
ranks = 1
"""
MODELS = {"tokens": "byte-tiny", "images": "vit-digits", "table": "dlrm-tiny"}
SENTENCE = "the quick brown fox jumps over the lazy dog; "


def everything_in(folder: Path) -> dict[str, int]:
    """Every path but the run folder's, with its time."""
    found = {}
    for place, folders, files in os.walk(folder):  # passes over folders that may not be read
        folders[:] = [name for name in folders if Path(place, name) != folder / "run"]
        found |= {str(path): path.lstat().st_mtime_ns for path in (Path(place, name) for name in (*folders, *files))}
    return found


class Told:
    """What `mw train` said of data: its lines, without the folder's path."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        self.folder, self.capsys = folder, capsys

    def __call__(self, train: str, kind: str = "tokens", more: str = "") -> list[str]:
        more += "\nsequence = 32" if kind == "tokens" else ""
        text = RUN.format(model=MODELS[kind], train=self.folder / train, more=more, folder=self.folder)
        (self.folder / "run.toml").write_text(text)
        before = everything_in(self.folder)
        code = main(["train", str(self.folder / "run.toml")])
        captured = self.capsys.readouterr()
        assert code == 2, captured.err
        assert captured.out == ""
        assert everything_in(self.folder) == before
        lines = captured.err.splitlines()
        assert lines
        assert all(line.startswith("mw train: ") for line in lines), captured.err
        return [line.removeprefix("mw train: ").replace(f"{self.folder}/", "") for line in lines]


@pytest.fixture
def told(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Told:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return Told(tmp_path, capsys)


def write_pair(stem: Path, tokens: np.ndarray) -> None:
    """A Megatron pair of one document."""
    stem.with_suffix(".bin").write_bytes(tokens.tobytes())
    with open(stem.with_suffix(".idx"), "wb") as file:
        write_index(file, tokens.dtype, [np.asarray([len(tokens)], dtype=np.int32)])


def write_parquet(path: Path, **columns: list[object]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def write_images(folder: Path, size: int = 8) -> Path:
    from PIL import Image

    for name in ("cat", "dog"):
        (folder / "pets" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (size, size), number).save(folder / "pets" / name / f"{number}.png")
    return folder / "pets" / "dog" / "3.png"


def test_documents_that_are_empty_or_ragged(told: Told, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 3)
    (tmp_path / "blank.jsonl").write_text("\n \n")
    (tmp_path / "nothing.txt").touch()
    (tmp_path / "short.txt").write_text("too short")
    assert told("empty.jsonl") == ["empty.jsonl: all of its 3 documents are empty. Remove it or fill it."]
    assert told("blank.jsonl") == ["blank.jsonl: holds no record, only blank lines. Remove it or fill it."]
    assert told("nothing.txt") == ["nothing.txt: is empty (0 bytes). Remove it or fill it."]
    assert told("short.txt")[0].startswith("data: the corpus has 10 tokens; ")
    ragged = [{"text": SENTENCE}, {"text": [SENTENCE, SENTENCE]}, {"text": {"a": 1}}, {"text": None}]
    (tmp_path / "ragged.jsonl").write_text("\n".join(map(json.dumps, ragged)))
    assert told("ragged.jsonl") == [
        'ragged.jsonl:2: "text" is a list, not text.',
        'ragged.jsonl:3: "text" is a dict, not text.',
        'ragged.jsonl:4: "text" is a NoneType, not text.',
    ]


@pytest.mark.parametrize("form", ["flat.bin", "flat.npy", "pair.bin", "pair.idx"])
def test_tokens_beyond_the_vocabulary(told: Told, tmp_path: Path, form: str) -> None:
    tokens = (np.arange(4096) % 256).astype(np.uint16)
    tokens[1000] = 40_000
    tokens.tofile(tmp_path / "flat.bin")
    np.save(tmp_path / "flat.npy", tokens)
    write_pair(tmp_path / "pair", tokens)
    (line,) = told(form)
    assert line.startswith(f"{form.replace('idx', 'bin')}: token 40000 at position 1,000 is outside the vocabulary of ")
    negative = tokens.astype(np.int32) % 256
    negative[7] = -1
    write_pair(tmp_path / "pair", negative)
    assert told("pair.bin")[0].startswith("pair.bin: token -1 at position 7 is outside the vocabulary")


def test_token_files_that_changed_after_they_were_prepared(
    told: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus.txt").write_text(SENTENCE * 100)
    assert main(["data", "prepare", str(tmp_path / "corpus.txt"), "-o", str(tmp_path / "made"), "--workers", "1"]) == 0
    capsys.readouterr()
    whole = (tmp_path / "made.bin").read_bytes()
    (tmp_path / "made.bin").write_bytes(whole[:-100])
    size = len(whole)
    assert told("made.bin")[0].startswith(f"made.idx: promises {size:,} bytes, made.bin has {size - 100:,}.")
    (tmp_path / "made.bin").write_bytes(whole)
    index = (tmp_path / "made.idx").read_bytes()
    (tmp_path / "made.idx").write_bytes(index[:40])
    assert told("made.bin")[0].startswith("made.idx: is cut off: ")
    (tmp_path / "made.idx").write_bytes(b"not an index at all, though long enough to be one")
    assert told("made.idx")[0].startswith("made.idx: is not an index of Megatron")
    (tmp_path / "made.idx").write_bytes(index)
    (tmp_path / "made.bin").unlink()
    assert told("made.idx")[0].startswith("made.bin: no such file.")


def test_text_that_changed_while_a_run_had_its_tokens(told: Told, tmp_path: Path) -> None:
    """Tokens kept in the run folder do not hide that the file is bad now."""
    (tmp_path / "corpus.txt").write_text(SENTENCE)  # one sequence: enough to be kept, too little to train
    assert told("corpus.txt")[0].startswith("data: the corpus has 46 tokens; ")
    assert list((tmp_path / "run" / "data").glob("*.npy"))
    (tmp_path / "corpus.txt").write_bytes(b"caf\xe9 " * 100)
    assert told("corpus.txt")[0].startswith("corpus.txt: is not UTF-8: byte 0xe9 at offset 3.")


def test_text_that_is_none(told: Told, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
    (tmp_path / "binary.txt").write_bytes(b"abc\0def" * 100)
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"text": "cut of\n{"text": "fine"}\n')
    assert told("latin.txt")[0].startswith("latin.txt: is not UTF-8: byte 0xe9 at offset 3.")
    assert told("latin.jsonl")[0].startswith("latin.jsonl: is not UTF-8: byte 0xe9 at offset 30.")
    assert told("binary.txt")[0].startswith("binary.txt: is not a text file: a NUL byte at offset 3.")
    (line,) = told("broken.jsonl")
    assert line.startswith("broken.jsonl:2: is not valid JSON: ")


def test_parquet_that_is_cut_off_or_has_other_columns(told: Told, tmp_path: Path) -> None:
    write_parquet(tmp_path / "whole.parquet", text=[SENTENCE * 20] * 50)
    content = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[: len(content) // 2])
    (tmp_path / "noise.parquet").write_bytes(b"PAR1" + b"noise" * 100)
    hurt = bytearray(content)
    hurt[8:60] = bytes(52)  # the footer is whole, the rows are not
    (tmp_path / "hurt.parquet").write_bytes(hurt)
    write_parquet(tmp_path / "other.parquet", txt=["a"] * 10)
    for name in ("cut", "noise"):
        assert told(f"{name}.parquet")[0].startswith(f"{name}.parquet: is not readable Parquet: ")
    assert told("hurt.parquet")[0].startswith("hurt.parquet: row group 0: is not readable Parquet: ")
    assert told("other.parquet")[0].startswith('other.parquet: has neither a column "text" (text) nor "label"')
    named = told("other.parquet", more='kind = "tokens"')
    assert named[0].startswith('other.parquet: has no column "text". Did you mean "txt"? Set data.text_key')


def test_places_that_hold_no_file(told: Told, tmp_path: Path) -> None:
    (tmp_path / "hollow").mkdir()
    (tmp_path / "corpus.txt").mkdir()
    (tmp_path / "digits.npz").mkdir()
    assert told("hollow")[0].startswith("hollow: the folder holds no .txt, ")
    assert told("corpus.txt")[0].startswith("corpus.txt: the folder holds no .txt, ")
    assert told("digits.npz", "images")[0].startswith("digits.npz: the folder holds no .txt, ")
    (tmp_path / "pair.idx").write_bytes(b"x")
    (tmp_path / "pair.bin").mkdir()
    assert "pair.bin" in told("pair.idx")[0]
    assert told("nowhere.txt")[0].startswith("nowhere.txt: no such file.")


def test_images_of_the_wrong_size_or_unreadable(told: Told, tmp_path: Path) -> None:
    from PIL import Image

    odd = write_images(tmp_path)
    whole = odd.read_bytes()
    Image.new("L", (9, 8)).save(odd)
    assert told("pets", "images")[0].startswith("pets/dog/3.png: is 9 x 8 pixels, ")
    odd.write_bytes(b"\x89PNG no")
    assert told("pets", "images")[0].startswith("pets/dog/3.png: is not a readable image: ")
    odd.write_bytes(whole[:45])  # in its header, which Pillow reads, there is no mistake
    assert told("pets", "images")[0].startswith("pets/dog/3.png: is not a readable image: ")
    odd.unlink()
    odd.mkdir()
    assert told("pets", "images")[0].startswith("pets/dog/3.png: is not a readable image: ")


def test_images_that_the_model_does_not_take(told: Told, tmp_path: Path) -> None:
    write_images(tmp_path, size=10)
    (line,) = told("pets", "images")
    assert "images are 1 x 10 x 10; vit-digits takes 1 x 8 x 8 (channels, height, width)." in line
    assert line.startswith("pets: ")


def test_labels_out_of_range(told: Told, tmp_path: Path) -> None:
    images = np.zeros((40, 8, 8), np.uint8)
    np.savez(tmp_path / "many.npz", images=images, labels=np.arange(40))
    assert "the data has 40 classes, vit-digits 10." in told("many.npz", "images")[0]
    np.savez(tmp_path / "minus.npz", images=images, labels=np.arange(40) - 1)
    assert told("minus.npz", "images")[0].startswith("minus.npz: labels: -1 at index 0 is negative.")
    lines = ["label,a,b,c,d,e,cat_a,cat_b,cat_c,cat_d"]
    lines += [f"{2 if row == 3 else row % 2},.5,.5,.5,.5,.5,1,1,1,1" for row in range(20)]
    (tmp_path / "clicks.csv").write_text("\n".join(lines))
    assert told("clicks.csv", "table") == ['clicks.csv:5, column "label": is 2. Labels are 0 or 1.']


def test_tables_with_holes_words_and_other_columns(told: Told, tmp_path: Path) -> None:
    head, row = "label,a,b,c,d,e,cat_a,cat_b,cat_c,cat_d", "1,.5,.5,.5,.5,.5,1,1,1,1"

    def write(*rows: str, head: str = head) -> None:
        (tmp_path / "clicks.csv").write_text("\n".join([head, *rows, *[row] * 10]))

    write(row, row.replace("1,.5,", "1,nan,", 1))
    assert told("clicks.csv", "table")[0].startswith('clicks.csv:3, column "a": is nan.')
    write(row, row.replace("1,.5,", "1,,", 1))
    assert told("clicks.csv", "table")[0].startswith('clicks.csv:3, column "a": is empty.')
    write(row, row.replace("1,.5,", "1,half,", 1))
    assert told("clicks.csv", "table")[0].startswith("clicks.csv:3, column \"a\": is 'half', not a number.")
    write(row, f"{row},7")
    assert told("clicks.csv", "table")[0].startswith("clicks.csv: is not readable CSV: ")
    write(row, head=head.replace("label", "lable"))
    assert told("clicks.csv", "table")[0].startswith('clicks.csv: has no column "label". Did you mean "lable"?')
    write(row, row.replace(",1,1,1,1", ",64,1,1,1"))
    assert "id column 0 has ids up to 64; its table has 64 rows." in told("clicks.csv", "table")[0]
    holed = np.ones((20, 5))
    holed[4, 2] = np.nan
    np.savez(tmp_path / "clicks.npz", dense=holed, ids=np.ones((20, 4), np.int64), labels=np.arange(20) % 2)
    assert told("clicks.npz", "table")[0].startswith('clicks.npz: row 4, column "dense[2]": is nan.')


class _Capabilities(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


@contextlib.contextmanager
def as_one_of_many() -> Iterator[None]:
    """Without root's right to read everything, where tests run as root."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    before = (_Capabilities * 2)()
    assert libc.capget(header, before) == 0
    after = (_Capabilities * 2)()
    ctypes.memmove(after, before, ctypes.sizeof(before))
    after[0].effective &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    assert libc.capset(header, after) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


def write_all_kinds(folder: Path) -> None:
    tokens = (np.arange(4096) % 256).astype(np.uint16)
    tokens.tofile(folder / "flat.bin")
    np.save(folder / "flat.npy", tokens)
    write_pair(folder / "pair", tokens)
    (folder / "corpus.txt").write_text(SENTENCE * 100)
    (folder / "rows.jsonl").write_text(json.dumps({"text": SENTENCE * 100}))
    write_parquet(folder / "rows.parquet", text=[SENTENCE * 20] * 50)
    (folder / "clicks.csv").write_text("label,a\n1,.5\n")
    np.savez(folder / "digits.npz", images=np.zeros((20, 8, 8), np.uint8), labels=np.arange(20) % 10)
    write_images(folder)
    (folder / "closed").mkdir()


@pytest.mark.parametrize(
    ("train", "closed", "kind"),
    [
        ("corpus.txt", "corpus.txt", "tokens"),
        ("rows.jsonl", "rows.jsonl", "tokens"),
        ("rows.parquet", "rows.parquet", "tokens"),
        ("flat.bin", "flat.bin", "tokens"),
        ("flat.npy", "flat.npy", "tokens"),
        ("pair.bin", "pair.bin", "tokens"),
        ("pair.bin", "pair.idx", "tokens"),
        ("closed", "closed", "tokens"),
        ("clicks.csv", "clicks.csv", "table"),
        ("digits.npz", "digits.npz", "images"),
        ("pets", "pets/dog/3.png", "images"),
        ("pets", "pets/dog", "images"),
        ("pets", "pets", "images"),
    ],
)
def test_no_permission(told: Told, tmp_path: Path, train: str, closed: str, kind: str) -> None:
    write_all_kinds(tmp_path)
    path = tmp_path / closed
    mode = stat.S_IMODE(path.stat().st_mode)
    path.chmod(0)
    with as_one_of_many():
        assert not os.access(path, os.R_OK, effective_ids=True)
        lines = told(train, kind)
    path.chmod(mode)
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"{closed}: "), lines
    assert "ermission denied" in lines[0]


def test_a_plan_that_cannot_run_is_told_before_a_bad_file_and_that_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus.txt").write_bytes(b"caf\xe9 " * 100)
    run = RUN.format(model="byte-tiny", train=tmp_path / "corpus.txt", more="sequence = 32", folder=tmp_path)
    (tmp_path / "run.toml").write_text(run)
    plan = write_plan(tmp_path, {"name": "replicate", "size": 2})
    words = ["train", str(tmp_path / "run.toml"), "--plan", plan]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "needs 2 ranks; laptop has 1" in said
    assert "corpus.txt" not in said, "reading it may take hours"
    assert main([*words, "--set", "run.ranks=2"]) == 2
    assert "corpus.txt: is not UTF-8" in capsys.readouterr().err
    assert not (tmp_path / "run" / "logs").exists()
