"""Token files, Megatron pairs, tokenizers (`tokenizer.py`), packed documents.

Tests of `data/tokenizer.py`.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from made_data import write_pair, write_tokenizer

from meshwright.core.errors import MeshwrightError
from meshwright.data import token_reader as read
from meshwright.data.data_section import DataSection
from meshwright.data.dataset import Data
from meshwright.data.open_data import open_data
from meshwright.data.tokenizer import open_tokenizer


def opened(train: Path | str, cache: Path | None = None, **settings: object) -> Data:
    chosen = {"sequence": 8, "held_out_fraction": 0.0, **settings}
    return open_data(DataSection(train=str(train), **chosen), cache=cache)  # type: ignore[arg-type]


def problem_of(train: Path | str, **settings: object) -> str:
    with pytest.raises(MeshwrightError) as error:
        opened(train, **settings)
    assert error.value.exit_code == 2
    return str(error.value)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_a_flat_file_is_the_stream(tmp_path: Path, dtype: str, suffix: str) -> None:
    tokens = np.arange(90).astype(dtype)
    path = tmp_path / f"t{suffix}"
    path.write_bytes(tokens.tobytes()) if suffix == ".bin" else np.save(path, tokens)
    data = opened(path, token_dtype=dtype if suffix == ".bin" else "auto")
    batch = data.batch(0, 11)
    for sample, row, target in zip(data.order(0, 11), batch.inputs, batch.targets, strict=True):
        assert row.tolist() == list(range(sample * 8, sample * 8 + 8))
        assert target.tolist() == list(range(sample * 8 + 1, sample * 8 + 9))
    assert (data.vocab_size, data.info.num_bytes_per_token, data.tokenizer) == (90, 0.0, None)


def slow_packing(tokens: list[int], lengths: list[int], sequence: int, sample: int) -> tuple[list[int], list[int]]:
    """(document of each input, weight of each target) of a row, one token at a time."""
    document_of = [number for number, length in enumerate(lengths) for _ in range(length)]
    places = range(sample * sequence, (sample + 1) * sequence)
    seen: list[int] = []
    for place in places:
        if document_of[place] not in seen:
            seen.append(document_of[place])
    documents = [seen.index(document_of[place]) for place in places]
    return documents, [int(document_of[place] == document_of[place + 1]) for place in places]


@pytest.mark.parametrize("lengths", [[5, 0, 1, 1, 30, 0, 0, 8, 9, 7, 40, 1], [100], [1] * 60, [8] * 9])
def test_packing_equals_a_slow_loop(tmp_path: Path, lengths: list[int]) -> None:
    tokens = write_pair(tmp_path / "pair", lengths)
    data = opened(tmp_path / "pair.bin", packing="documents", cache=tmp_path / "cache")
    batch = data.batch(0, data.num_train)
    inputs, documents = batch.inputs
    for row, sample in enumerate(data.order(0, data.num_train).tolist()):
        expected, weights = slow_packing(tokens.tolist(), lengths, 8, sample)
        assert inputs[row].tolist() == tokens[sample * 8 : sample * 8 + 8].tolist()
        assert batch.targets[row].tolist() == tokens[sample * 8 + 1 : sample * 8 + 9].tolist()
        assert documents[row].tolist() == expected
        assert batch.weights[row].tolist() == weights
    parts = [data.batch(0, data.num_train, part, 3) for part in range(3)]
    assert {part.num_tokens for part in parts} == {float(batch.weights.sum())}


def test_text_is_packed_by_its_documents_and_prompts_still_do_not_count(tmp_path: Path) -> None:
    records = [{"text": "abc"}, {"text": ""}, {"prompt": "de", "text": "f"}, {"text": "ghij"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = opened(tmp_path / "a.jsonl", packing="documents", sequence=12, cache=tmp_path / "cache")
    batch = data.batch(0, 1)
    assert bytes(batch.inputs[0][0].astype(np.uint8)) == b"abc\0def\0ghij"
    assert batch.inputs[1].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]]
    # a>b b>c c>. | .>d no | d>e prompt, e>f f>. | .>g no | g>h h>i i>j j>.
    assert batch.weights.tolist() == [[1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1]]


def test_documents_of_several_sequences_and_without_a_document_list(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [4, 4, 4, 5])
    header = bytearray((tmp_path / "a.idx").read_bytes()[: 34 + 12 * 4])
    for documents, expected in (([0, 2, 4], [0] * 8 + [1] * 8), ([0], [i // 4 for i in range(16)])):
        header[26:34] = struct.pack("<Q", len(documents))
        (tmp_path / "a.idx").write_bytes(bytes(header) + np.array(documents, dtype=np.int64).tobytes())
        data = opened(tmp_path / "a.bin", packing="documents", sequence=16)
        assert data.batch(0, 1).inputs[1][0].tolist() == expected


def test_tokens_beyond_the_vocabulary_are_found_once_and_remembered(tmp_path: Path, monkeypatch) -> None:
    from meshwright.data import token_files as flat

    tokens = np.full(10_000, 7, dtype=np.uint16)
    tokens[[6789, 8000]] = 300, 400
    path, cache = tmp_path / "t.bin", tmp_path / "cache"
    path.write_bytes(tokens.tobytes())
    scans: list[int] = []
    real = flat.scan_range
    monkeypatch.setattr(flat, "scan_range", lambda found: scans.append(1) or real(found))
    for _ in range(2):
        (problem,) = opened(path, cache=cache).check_vocabulary(256)
        assert problem.where == str(path)
        assert problem.what == "token 300 at position 6,789 is outside the vocabulary of 256."
        assert "401" in problem.fix
    assert opened(path, cache=cache).check_vocabulary(401) == ()
    assert len(scans) == 1, "a terabyte is not read at every start"
    np.save(tmp_path / "n.npy", np.array([3, -1] * 20))
    assert "Negative" in str(opened(tmp_path / "n.npy").check_vocabulary(100)[0])
    (tmp_path / "a.txt").write_text("hello " * 10)
    assert "256" in str(opened(tmp_path / "a.txt").check_vocabulary(100)[0])


def truncate(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"\1" * 101)
    np.save(tmp_path / "cut.npy", np.arange(1000))
    truncate(tmp_path / "cut.npy", 5000)
    np.save(tmp_path / "float.npy", np.arange(1000.0))
    np.save(tmp_path / "objects.npy", np.array([{}] * 40, dtype=object))
    for name in ("short", "index", "magic", "pair"):
        write_pair(tmp_path / name, [20, 30])
    truncate(tmp_path / "short.bin", 90)
    truncate(tmp_path / "index.idx", 50)
    (tmp_path / "magic.idx").write_bytes(b"hello" * 20)
    write_pair(tmp_path / "order", [20, 30])
    index = bytearray((tmp_path / "order.idx").read_bytes())
    index[42:50] = struct.pack("<Q", 8)  # the first sequence no longer begins at 0
    (tmp_path / "order.idx").write_bytes(index)
    found = {name: problem_of(tmp_path / name) for name in ("odd.bin", "cut.npy", "float.npy", "objects.npy")}
    found |= {name: problem_of(tmp_path / name) for name in ("short.bin", "index.bin", "magic.bin")}
    found["order.bin"] = problem_of(tmp_path / "order.bin", packing="documents")
    found["pair.bin"] = problem_of(tmp_path / "pair.bin", token_dtype="int32")
    expected = {
        "odd.bin": "odd.bin: has 101 bytes, not a multiple of 2 (uint16).",
        "cut.npy": "cut.npy: is not a whole .npy file: an array of shape (1000,) and type int64 has 8,000 bytes",
        "float.npy": "float.npy: holds float64",
        "objects.npy": "objects.npy: is not a whole .npy file: it holds Python objects",
        "short.bin": "short.idx: promises 100 bytes",
        "index.bin": "index.idx: is cut off: 2 sequences need 82 bytes, it has 50.",
        "magic.bin": "magic.idx: is not an index of Megatron",
        "order.bin": "order.idx: its sequences do not lie one after the other",
        "pair.bin": "pair.idx: says the tokens are uint16",
    }
    assert {name for name, text in expected.items() if text not in found[name]} == set()
    assert "packing" in problem_of(tmp_path / "odd.bin", packing="documents")
    (tmp_path / "pair.bin").unlink()
    assert "pair.bin: no such file" in problem_of(tmp_path / "pair.idx")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_a_tokenizers_file_turns_text_into_tokens_and_back(tokenizer_folder: Path, tmp_path: Path) -> None:
    text = "".join(f"line {i} says {i * i} é\n" for i in range(300))
    (tmp_path / "a.txt").write_text(text)
    settings = {"tokenizer": str(tokenizer_folder), "cache": tmp_path / "cache", "sequence": 16}
    data, again = opened(tmp_path / "a.txt", **settings), opened(tmp_path / "a.txt", **settings)
    tokens = again.source.corpus.tokens
    assert tokens.dtype == np.uint16
    assert tokens[-1] == data.tokenizer.separator
    assert data.tokenizer.decode(tokens[:-1]) == text
    assert data.vocab_size == 300
    assert data.info.num_bytes_per_token == pytest.approx(len(text.encode()) / len(tokens))
    assert data.info.num_bytes_per_token > 1.5
    assert data.fingerprint == again.fingerprint != opened(tmp_path / "a.txt", sequence=16).fingerprint


def test_prompts_are_encoded_apart(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "line 3", "text": " says 9"}) * 1)
    data = opened(tmp_path / "a.jsonl", tokenizer=str(tokenizer_folder), sequence=3)
    words, corpus = data.tokenizer, data.source.corpus
    prompt, text = words.encode("line 3"), words.encode(" says 9")
    assert corpus.tokens.tolist() == [*prompt, *text, words.separator]
    assert corpus.weights.tolist() == [0] * len(prompt) + [1] * (len(text) + 1)


def test_a_tokenizer_that_is_none_is_told(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "a.txt").write_text("hello " * 10)
    (tmp_path / "unended").mkdir()
    (tmp_path / "unended" / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    for name, word in (
        ("broken.json", "is not a tokenizers file"),
        ("none.json", "cannot be read"),
        ("unended", "ends"),
    ):
        assert word in problem_of(tmp_path / "a.txt", tokenizer=str(tmp_path / name))
        with pytest.raises(MeshwrightError):
            open_tokenizer(str(tmp_path / name))


def test_chunks_change_nothing_but_where_reading_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {i} é\n" for i in range(2000)))
    records = [json.dumps({"text": f"text {i}\n", "prompt": "p" * (i % 3)}) for i in range(1000)]
    (tmp_path / "b.jsonl").write_text("\n".join(records))
    whole = opened(tmp_path, packing="documents")
    monkeypatch.setattr(read, "CHUNK_BYTES", 1000)
    pieces = opened(tmp_path, packing="documents")
    assert whole.fingerprint == pieces.fingerprint
    assert np.array_equal(whole.source.corpus.starts, pieces.source.corpus.starts)
    (tmp_path / "b.jsonl").write_text("\n".join([*records[:700], "[]"]))
    assert "b.jsonl:701: holds a list" in problem_of(tmp_path)
