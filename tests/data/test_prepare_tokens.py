"""`mw data prepare`: the same files whoever makes them, also after being killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from made_data import arrays, write_tokenizer

from meshwright.cli.main import main
from meshwright.core.errors import MeshwrightError
from meshwright.data import cache as hashed
from meshwright.data import token_reader as read
from meshwright.data.data_section import DataSection
from meshwright.data.open_data import open_data
from meshwright.data.prepare import prepare

NUM_FILES = 200
ROOT = Path(__file__).parents[2]
COMMAND = "from meshwright.cli.main import main; raise SystemExit(main())"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(NUM_FILES):
        records = [{"text": f"document {number}/{i} " * (i % 7)} for i in range(50)]
        (folder / f"{number:03}.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    (folder / "long.txt").write_text("".join(f"line {i} é\n" for i in range(5000)))
    return folder


def written(stem: Path) -> dict[str, bytes]:
    return {path.name.partition(".")[2]: path.read_bytes() for path in stem.parent.glob(f"{stem.name}.*")}


def test_the_result_is_the_text_itself_and_does_not_depend_on_workers(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "CHUNK_BYTES", 20_000)  # the long text in several chunks
    one = prepare([str(corpus)], str(tmp_path / "one"), num_workers=1)
    prepare([str(corpus)], str(tmp_path / "two") + "/", num_workers=2)
    assert written(tmp_path / "one") == written(tmp_path / "two" / "tokens")
    assert set(written(tmp_path / "one")) == {"bin", "idx", "xxh3", "facts.json"}, "the parts are gone"
    for packing in ("stream", "documents"):
        made = open_data(DataSection(train=f"{tmp_path}/one.bin", sequence=16, packing=packing), cache=None)
        direct = open_data(DataSection(train=str(corpus), sequence=16, packing=packing), cache=None)
        assert np.array_equal(made.source.corpus.tokens, direct.source.corpus.tokens)
        assert np.array_equal(made.batch(7, 40).weights, direct.batch(7, 40).weights)
    assert np.array_equal(made.source.corpus.starts, direct.source.corpus.starts)
    assert (made.tokenizer.name, made.info.num_bytes_per_token) == ("byte", 1.0)
    assert one.facts.num_documents == len(direct.source.corpus.starts)
    # Asked again, nothing is done; after a change, only what changed.
    again = prepare([str(corpus)], str(tmp_path / "one"))
    assert again.num_bytes_reused == again.num_bytes == one.num_bytes


def test_a_tokenizers_file_travels_with_the_result(corpus: Path, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    prepare([str(corpus / "00*.jsonl")], str(tmp_path / "out"), tokenizer=str(folder), num_workers=2)
    made = open_data(DataSection(train=f"{tmp_path}/out.bin", sequence=16), cache=None)
    section = DataSection(train=str(corpus / "00*.jsonl"), sequence=16, tokenizer=str(folder))
    direct = open_data(section, cache=None)
    assert np.array_equal(made.source.corpus.tokens, direct.source.corpus.tokens)
    assert made.tokenizer.name == direct.tokenizer.name
    assert made.info.num_bytes_per_token == direct.info.num_bytes_per_token > 1


def test_a_killed_run_goes_on_where_it_was(corpus: Path, tmp_path: Path) -> None:
    words = ["data", "prepare", str(corpus), "-o", str(tmp_path / "killed"), "--workers", "1"]
    process = subprocess.Popen([sys.executable, "-c", COMMAND, *words], cwd=ROOT, stderr=subprocess.DEVNULL)
    parts = tmp_path / "killed.parts"
    deadline = time.monotonic() + 60
    while len(list(parts.glob("*.json"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was too fast to be killed"
    assert not (tmp_path / "killed.facts.json").exists()
    time.sleep(0.3)  # its worker notices and ends
    done = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.json")}
    assert 5 <= len(done) <= NUM_FILES
    damaged = sorted(done)[0]
    with open((parts / damaged).with_suffix(".bin"), "ab") as file:
        file.write(b"!")
    reports: list[tuple[int, int, int]] = []
    resumed = prepare([str(corpus)], str(tmp_path / "killed"), num_workers=2, report=lambda *r: reports.append(r))
    fresh = prepare([str(corpus)], str(tmp_path / "fresh"), num_workers=1)
    assert 0 < resumed.num_bytes_reused < resumed.num_bytes == fresh.num_bytes
    assert fresh.num_bytes_reused == 0
    num_made = len(reports) - 1
    assert num_made == NUM_FILES + 1 - len(done) + 1, "the parts done, but for the damaged one, are not made again"
    assert reports[-1][0] == reports[-1][1]
    assert written(tmp_path / "killed") == written(tmp_path / "fresh")


def test_everything_wrong_is_told_and_good_parts_are_kept(corpus: Path, tmp_path: Path) -> None:
    (corpus / "007.jsonl").write_text('{"text": 3}\n')
    (corpus / "008.jsonl").write_text('{"text": "a", "prompt": 4}\n')
    (corpus / "009.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(MeshwrightError) as error:
        prepare([str(corpus)], str(tmp_path / "out"), num_workers=2)
    assert error.value.exit_code == 2
    text = str(error.value).replace(f"{corpus}/", "")
    assert '007.jsonl:1: "text" is a int, not text.' in text
    assert "009.jsonl: all of its 1 documents are empty." in text
    for name in ("007", "008", "009"):
        (corpus / f"{name}.jsonl").write_text('{"text": "fine"}\n')
    mended = prepare([str(corpus)], str(tmp_path / "out"), num_workers=1)
    assert mended.num_bytes - mended.num_bytes_reused == 3 * len('{"text": "fine"}\n')


def test_damage_to_prepared_files_is_named_and_mended_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"prompt": f"what is {i}?", "text": f"{i} times {i} is {i * i} " * 40} for i in range(300)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    words = write_tokenizer(tmp_path)

    def made() -> dict[str, bytes]:
        prepare([f"{tmp_path}/pairs.jsonl"], str(tmp_path / "out"), tokenizer=str(words), num_workers=1)
        return written(tmp_path / "out")

    def read_all() -> bytes:
        section = DataSection(train=f"{tmp_path}/out.bin", sequence=64, packing="documents", held_out_fraction=0.0)
        data = open_data(section, cache=None)
        batch = data.batch(0, data.num_samples)
        return b"".join(array.tobytes() for array in arrays(batch))

    whole = made()
    assert set(whole) == {"bin", "idx", "weights", "xxh3", "tokenizer.json", "facts.json"}
    direct = open_data(
        DataSection(
            train=f"{tmp_path}/pairs.jsonl",
            sequence=64,
            tokenizer=str(words),
            packing="documents",
            held_out_fraction=0.0,
        ),
        cache=None,
    )
    expected = read_all()
    assert expected == b"".join(array.tobytes() for array in arrays(direct.batch(0, direct.num_samples)))
    random = np.random.default_rng(1)
    for ending, content in whole.items():
        path = tmp_path / f"out.{ending}"
        for turn in range(4):
            monkeypatch.setattr(hashed, "EAGER_BYTES", (1 << 28) * (turn % 2))
            hurt = bytearray(content)
            hurt[int(random.integers(len(hurt) - 1))] ^= 1 << int(random.integers(7))
            path.write_bytes(hurt)
            with pytest.raises(MeshwrightError, match=rf"out\.({ending}|idx)") as error:
                read_all()
            assert error.value.exit_code == 2
        if ending == "weights":
            assert made() == whole
        path.write_bytes(content)
    assert read_all() == expected


def test_the_command_says_how_to_use_the_result(corpus: Path, tmp_path: Path, capsys) -> None:
    words = ["data", "prepare", str(corpus / "00*.jsonl"), "-o", str(tmp_path / "out"), "--workers", "1"]
    assert main(words) == 0
    told = capsys.readouterr()
    assert told.out == f"{tmp_path}/out.bin\n"
    assert "packing" in told.err
    assert main([*words[:-1], "-1"]) == 2
    assert "--workers: is -1" in capsys.readouterr().err
    (tmp_path / "theirs.bin").write_bytes(b"precious")
    with pytest.raises(MeshwrightError, match=r"theirs\.bin: is there already"):
        prepare([str(corpus)], str(tmp_path / "theirs"), num_workers=1)
    (tmp_path / "file").touch()
    with pytest.raises(MeshwrightError, match="cannot be written"):
        prepare([str(corpus)], str(tmp_path / "file" / "out"), num_workers=1)
