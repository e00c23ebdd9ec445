"""The token stream: the same for every mesh, resumable, weighted, padded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import MeshwrightError
from meshwright.data.dataset import Batch, Data
from meshwright.data.open_data import open_text
from meshwright.data.tokenizer import ByteTokenizer

laws = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Data]:
    """One corpus without prompts and one with, both of a few hundred samples."""
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "plain.txt").write_text("".join(f"line {i} says {i * i}\n" for i in range(200)))
    records = [{"text": f"answer {i * i}", "prompt": f"question {i}?"} for i in range(200)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    names = {False: "plain.txt", True: "pairs.jsonl"}
    return {
        has_prompts: open_text(str(folder / name), sequence=16, held_out_fraction=0.1, seed=5)
        for has_prompts, name in names.items()
    }


def same(a: Batch, b: Batch) -> bool:
    arrays = ("inputs", "targets", "weights")
    return a.num_tokens == b.num_tokens and all(np.array_equal(getattr(a, x), getattr(b, x)) for x in arrays)


def joined(parts: list[Batch]) -> Batch:
    assert len({part.num_tokens for part in parts}) == 1, "all ranks must divide by the same count"
    stacked = {x: np.concatenate([getattr(p, x) for p in parts]) for x in ("inputs", "targets", "weights")}
    return Batch(**stacked, num_tokens=parts[0].num_tokens)


@laws
@given(cursor=st.integers(0, 5000), batch=st.integers(1, 40), num_parts=st.integers(1, 9), prompts=st.booleans())
def test_parts_joined_are_the_whole_batch(corpora, cursor, batch, num_parts, prompts) -> None:
    data = corpora[prompts]
    parts = [data.batch(cursor, batch, part, num_parts) for part in range(num_parts)]
    whole = data.batch(cursor, batch)
    assert same(joined(parts), whole)
    assert whole.num_tokens == whole.weights.sum()


@laws
@given(cursor=st.integers(0, 10**15), first=st.integers(1, 300), second=st.integers(1, 300))
def test_resuming_from_a_cursor_equals_reading_on(corpora, cursor, first, second) -> None:
    data = corpora[False]
    resumed = np.concatenate([data.order(cursor, first), data.order(cursor + first, second)])
    assert np.array_equal(data.order(cursor, first + second), resumed)


def test_every_epoch_is_all_train_samples_once_in_another_order(corpora) -> None:
    data = corpora[False]
    first, second = np.split(data.order(0, 2 * data.num_train), 2)
    assert len(set(first.tolist())) == data.num_train == data.num_samples - data.num_held_out
    assert set(first.tolist()) == set(second.tolist())
    assert not np.array_equal(first, second)


def test_a_batch_larger_than_an_epoch_crosses_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghi")
    data = open_text(str(tmp_path / "a.txt"), sequence=3, held_out_fraction=0, seed=0)
    assert (data.source.num_tokens, data.num_samples, data.num_held_out) == (10, 3, 0)
    rows = data.batch(1, 8).inputs.tolist()
    assert {bytes(row) for row in rows} == {b"abc", b"def", b"ghi"}
    assert not list(data.held_out_batches(4))


def test_targets_are_the_inputs_one_token_later(corpora) -> None:
    data = corpora[False]
    batch = data.batch(3, 11)
    assert (batch.inputs.dtype, batch.targets.dtype, batch.weights.dtype) == (np.int64, np.int64, np.float32)
    assert np.array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    for sample, row in zip(data.order(3, 11), batch.targets, strict=True):
        start = sample * data.sequence + 1
        assert np.array_equal(row, data.source.corpus.tokens[start : start + data.sequence])


def test_prompts_have_weight_zero(tmp_path: Path) -> None:
    lines = ['{"prompt": "ab", "text": "cde"}', "", '{"text": "f"}', '{"prompt": null, "text": "g"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("hi")
    data = open_text((str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")), sequence=12, held_out_fraction=0, seed=0)
    assert data.source.corpus.tokens.tobytes() == b"abcde\0f\0g\0hi\0"
    batch = data.batch(0, 1)
    # The weight belongs to the target: "b" (predicted from "a") does not count, "c" does.
    assert batch.weights[0].tolist() == [0] + [1] * 11
    assert batch.num_tokens == 11


@laws
@given(batch=st.integers(1, 50), num_parts=st.integers(1, 5), prompts=st.booleans())
def test_held_out_batches_cover_the_held_out_samples_once(corpora, batch, num_parts, prompts) -> None:
    data = corpora[prompts]
    wholes = list(data.held_out_batches(batch))
    parts = [list(data.held_out_batches(batch, part, num_parts)) for part in range(num_parts)]
    for whole, *ranks in zip(wholes, *parts, strict=True):
        assert whole.inputs.shape == (batch, data.sequence)
        assert same(joined(ranks), whole)
        assert whole.num_tokens == whole.weights.sum()
    real = np.concatenate([whole.inputs for whole in wholes])[: data.num_held_out]
    expected = data.stream.parts[0].held_out(np.arange(data.num_held_out))[:, None] * data.sequence
    assert np.array_equal(real, data.source.corpus.tokens[expected + np.arange(data.sequence)])
    assert not np.concatenate([whole.weights for whole in wholes])[data.num_held_out :].any()


def test_held_out_limit_counts_batches(corpora) -> None:
    data = corpora[False]
    assert len(list(data.held_out_batches(2, limit=3))) == 3
    assert len(list(data.held_out_batches(2, limit=0))) == 0
    assert sum(b.num_tokens for b in data.held_out_batches(7)) == data.num_held_out * data.sequence


def test_a_place_that_does_not_exist_is_refused_with_everything_wrong(corpora) -> None:
    with pytest.raises(MeshwrightError) as error:
        corpora[False].batch(-1, 0, part=2, num_parts=2)
    assert [p.where for p in error.value.problems] == ["data.cursor", "data.batch", "data.part"]
    with pytest.raises(MeshwrightError):
        corpora[False].held_out_batches(4, part=1, num_parts=1)


def test_the_fingerprint_tells_content_and_cut_but_not_the_folder(tmp_path: Path) -> None:
    def fingerprint(folder: str, text: str, sequence: int = 4, seed: int = 0, fraction: float = 0.2) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "a.txt").write_text(text)
        path = str(tmp_path / folder / "a.txt")
        return open_text(path, sequence=sequence, held_out_fraction=fraction, seed=seed).fingerprint

    text = "x" * 50
    base = fingerprint("here", text)
    assert base == fingerprint("there", text)
    changed = [
        fingerprint("here", text[:-1] + "y"),
        fingerprint("here", text, sequence=5),
        fingerprint("here", text, seed=1),
        fingerprint("here", text, fraction=0.3),
    ]
    assert len({base, *changed}) == 5


def test_the_standard_library_is_a_corpus_on_every_machine() -> None:
    data = open_text("stdlib", sequence=128, held_out_fraction=0.01, seed=0)
    assert 2_000_000 < data.source.num_tokens < 8_100_000
    names = [file.path for file in data.files]
    assert not [name for name in names if "/test/" in name or "site-packages" in name]
    assert "import" in data.tokenizer.decode(data.batch(0, 64).inputs)
    assert data.info.num_bytes_per_token == 1.0


@given(text=st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint8
    assert tokenizer.decode(tokens) == text
    assert np.array_equal(tokenizer.encode(text.encode()), tokens)


def test_what_is_not_text_decodes_to_a_replacement() -> None:
    assert ByteTokenizer().decode([104, 0xC3, 300, -1]) == "h\ufffd\ufffd\ufffd"
    assert (ByteTokenizer.vocab_size, ByteTokenizer.name) == (256, "byte")


def test_torch_is_not_imported() -> None:
    code = "import sys, meshwright.data.open_data; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
