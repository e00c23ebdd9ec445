"""Every kind of data keeps the same laws: one order for any mesh, resuming from a number, a content fingerprint.

Also the test of `labelled_samples.py` and `data_section.py`.

Tests of `data/data_section.py`, `data/labelled_samples.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from made_data import WRITERS, arrays, write_digit_folder, write_digits, write_flat, write_table

from meshwright.data.data_section import DataSection, MixturePart
from meshwright.data.dataset import Data
from meshwright.data.open_data import open_data


@pytest.fixture(scope="module", params=list(WRITERS))
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("kinds")
    return open_data(WRITERS[request.param](folder), cache=folder / "cache")


@pytest.mark.parametrize(("cursor", "batch", "num_parts"), [(0, 8, 2), (13, 12, 5), (10_000, 3, 7), (4090, 16, 1)])
def test_the_parts_joined_are_the_batch(data: Data, cursor: int, batch: int, num_parts: int) -> None:
    whole = data.batch(cursor, batch)
    parts = [data.batch(cursor, batch, part, num_parts) for part in range(num_parts)]
    for array, pieces in zip(arrays(whole), zip(*map(arrays, parts), strict=True), strict=True):
        assert np.array_equal(array, np.concatenate(pieces))
    assert {part.num_tokens for part in parts} == {whole.num_tokens} == {float(whole.weights.sum())}


def test_a_cursor_is_all_it_takes_to_resume(data: Data) -> None:
    straight = data.batch(5, 30)
    resumed = [data.batch(5, 12), data.batch(17, 18)]
    for array, pieces in zip(arrays(straight), zip(*map(arrays, resumed), strict=True), strict=True):
        assert np.array_equal(array, np.concatenate(pieces))


def test_held_out_samples_never_train(data: Data) -> None:
    assert data.num_train + data.num_held_out == data.num_samples
    held_out = set(data.stream.held_out(np.arange(data.num_held_out)).tolist())
    trained = set(data.order(0, 4 * data.num_train).tolist())
    assert held_out
    assert not held_out & trained
    batches = list(data.held_out_batches(7))
    assert len(batches) == -(-data.num_held_out // 7)
    assert all(len(batch.targets) == 7 for batch in batches)
    assert len(list(data.held_out_batches(7, limit=1))) == 1


def test_the_arrays_have_the_promised_types(data: Data) -> None:
    batch = data.batch(0, 3)
    types = [array.dtype.name for array in arrays(batch)]
    is_packed = isinstance(batch.inputs, tuple)
    expected = {
        "tokens": ["int64", *(["int32"] if is_packed else []), "int64", "float32"],
        "images": ["float32", "int64", "float32"],
        "table": ["float32", "int64", "float32", "float32"],
    }
    assert types == expected[data.kind]
    assert batch.weights.shape == batch.targets.shape
    if data.kind == "tokens":
        assert batch.targets.shape == (3, data.sequence)
        assert max(array.max() for array in arrays(batch)[:1]) < data.vocab_size
        assert data.check_vocabulary(data.vocab_size) == ()


@pytest.mark.parametrize("name", list(WRITERS))
def test_with_and_without_a_cache_and_again_it_is_the_same_data(name: str, tmp_path: Path) -> None:
    section = WRITERS[name](tmp_path)
    opened = [open_data(section, cache=cache) for cache in (None, tmp_path / "cache", tmp_path / "cache")]
    assert len({each.fingerprint for each in opened}) == 1
    for other in opened[1:]:
        assert all(map(np.array_equal, arrays(opened[0].batch(3, 9)), arrays(other.batch(3, 9))))
    assert opened[0].info.num_classes == opened[2].info.num_classes
    assert opened[0].info.shape == opened[2].info.shape


@pytest.mark.parametrize("writer", [write_flat, write_digits, write_digit_folder, write_table])
def test_changed_content_changes_the_fingerprint_and_is_named(writer, tmp_path: Path) -> None:
    section = writer(tmp_path)
    before = open_data(section, cache=tmp_path / "cache")
    states = before.file_states
    path = Path(section.patterns[0])
    path = next(path.rglob("*.png")) if path.is_dir() else path
    content = bytearray(path.read_bytes())
    if path.suffix == ".npz":
        arrays_ = dict(np.load(path))
        arrays_["images"][5, 4, 4] ^= 3
        np.savez(path, **arrays_)
    elif path.suffix == ".png":
        path.write_bytes(Path(sorted(path.parent.glob("*.png"))[1]).read_bytes())
    else:
        content[-3] ^= 1
        path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    after = open_data(section, cache=tmp_path / "cache")
    assert after.fingerprint != before.fingerprint
    assert after.changed_files(states) == (os.path.basename(section.patterns[0]),)
    assert before.changed_files(states) == ()


def test_digits_as_arrays_and_as_a_folder_are_the_same_images(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    truth = load_digits()
    for section, count in ((write_digits(tmp_path), 1797), (write_digit_folder(tmp_path), 200)):
        data = open_data(section, cache=None)
        assert (data.kind, data.num_samples, data.info.shape, data.info.num_classes) == ("images", count, (1, 8, 8), 10)
        batch = data.batch(0, data.num_train)
        pixels = {image.tobytes(): label for image, label in zip(batch.inputs, batch.targets, strict=True)}
        known = np.divide((truth.images * 15).astype(np.uint8), np.float32(255), dtype=np.float32)[:count, None]
        seen = sum(
            pixels.get(image.tobytes()) == label for image, label in zip(known, truth.target[:count], strict=True)
        )
        assert seen >= data.num_train
    assert data.info.classes == tuple(f"digit {number}" for number in range(10))


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "float"])
def test_image_arrays_in_other_layouts(tmp_path: Path, layout: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (20, 6, 5, 3)).astype(np.uint8)
    given = {"NHWC": images, "NCHW": images.transpose(0, 3, 1, 2), "float": images.astype(np.float64) - 100}[layout]
    np.savez(tmp_path / "a.npz", images=given, labels=np.arange(20) % 4)
    data = open_data(DataSection(train=str(tmp_path / "a.npz"), held_out_fraction=0), cache=None)
    expected = images.transpose(0, 3, 1, 2).astype(np.float32)
    expected = expected - 100 if layout == "float" else expected / np.float32(255)
    samples = data.order(0, 20)
    assert np.array_equal(data.batch(0, 20).inputs, expected[samples])
    assert np.array_equal(data.batch(0, 20).targets, (np.arange(20) % 4)[samples])


def test_a_table_is_dense_numbers_ids_and_labels_in_every_format(tmp_path: Path) -> None:
    import pyarrow.csv
    import pyarrow.parquet

    write_table(tmp_path)
    table = pyarrow.csv.read_csv(tmp_path / "table.csv")
    pyarrow.parquet.write_table(table, tmp_path / "table.parquet", row_group_size=40)
    columns = {name: table.column(name).to_numpy() for name in table.column_names}
    dense = np.stack([columns["price"], columns["change"]], axis=1)
    ids = np.stack([columns["cat_shop"], columns["hour"]], axis=1)
    np.savez(tmp_path / "table.npz", dense=dense, ids=ids, labels=columns["label"])
    for suffix in ("csv", "parquet", "npz"):
        data = open_data(DataSection(train=str(tmp_path / f"table.{suffix}")), cache=tmp_path / "cache")
        assert data.info.shape == (2, 2, 5, 10)
        batch, samples = data.batch(0, 50), data.order(0, 50)
        assert np.array_equal(batch.inputs[0], dense[samples].astype(np.float32))
        assert np.array_equal(batch.inputs[1], ids[samples])
        assert np.array_equal(batch.targets, columns["label"][samples])


def test_a_mixture_has_its_proportions_at_any_place(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(str(number) * 4000)
    weights = (0.7, 0.2, 0.1)
    parts = tuple(MixturePart(train=str(tmp_path / f"{n}.txt"), weight=w * 5) for n, w in enumerate(weights))
    opened = [
        open_data(DataSection(mixture=parts, sequence=8, held_out_fraction=0.1, seed=seed), cache=None)
        for seed in (0, 0, 1)
    ]
    first, again, other = opened
    for cursor in (0, 65_536 - 500, 10**12):
        values = first.batch(cursor, 1000).inputs[:, 0] - ord("0")
        shares = np.bincount(values, minlength=3) / 1000
        assert np.allclose(shares, weights, atol=0.004), "a low discrepancy, not a coin"
        assert np.array_equal(first.order(cursor, 1000), again.order(cursor, 1000))
        assert not np.array_equal(first.order(cursor, 1000), other.order(cursor, 1000))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    # Each part goes through all of its own samples before it repeats one.
    part = first.stream.parts[1]
    samples = first.order(0, 5 * part.num_train + 50)
    sizes = [each.num_samples for each in first.stream.parts]
    mine = samples[(samples >= sizes[0]) & (samples < sizes[0] + sizes[1])][: part.num_train]
    assert len(set(mine.tolist())) == part.num_train
    held_out = np.concatenate([batch.inputs[:, 0] for batch in first.held_out_batches(10, limit=10)]) - ord("0")
    assert np.allclose(np.bincount(held_out, minlength=3) / 100, weights, atol=0.02)


def test_opening_and_preparing_import_no_torch() -> None:
    code = "import sys, meshwright.data.open_data, meshwright.data.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
