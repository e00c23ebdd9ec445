"""Parquet, datasets, images and tables that are not what they should be: file and place, exit 2."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_data import write_digit_folder, write_digits, write_flat, write_table

from meshwright.core.errors import MeshwrightError
from meshwright.data.data_section import DataSection, MixturePart
from meshwright.data.open_data import open_data


def told(section: DataSection, folder: Path) -> str:
    with pytest.raises(MeshwrightError) as error:
        open_data(section, cache=folder / "cache")
    assert error.value.exit_code == 2
    assert not list((folder / "cache").glob(".*")), "no draft may stay behind"
    return str(error.value).replace(f"{folder}/", "")


def test_text_in_parquet_and_datasets_equals_the_same_text_in_lines(tmp_path: Path) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [f"document {i} " * (i % 5) for i in range(90)]  # some are empty
    columns = {"body": texts, "ask": [None if i % 2 else f"q{i}" for i in range(90)]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=25)
    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns)}).save_to_disk(tmp_path / "saved")
    streams = []
    for train in (tmp_path / "a.parquet", f"datasets:{tmp_path / 'saved'}", f"datasets:{tmp_path / 'saved'}:train"):
        section = DataSection(train=str(train), sequence=16, text_key="body", prompt_key="ask")
        data = open_data(section, cache=tmp_path / "cache")
        streams.append((data.source.corpus.tokens.tobytes(), data.source.corpus.weights.tobytes()))
    pairs = zip(columns["ask"], texts, strict=True)
    expected = b"".join(f"{ask or ''}{text}\0".encode() for ask, text in pairs if ask or text)
    assert streams[0][0] == expected
    assert streams[0] == streams[1] == streams[2]


def test_parquet_that_cannot_be_read(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "noise.parquet").write_bytes(b"PAR1" + b"noise" * 100)
    pq.write_table(pa.table({"txt": ["a"] * 10}), tmp_path / "column.parquet")
    pq.write_table(pa.table({"text": [1, 2, 3]}), tmp_path / "numbers.parquet")
    pq.write_table(pa.table({"text": ["", None]}), tmp_path / "empty.parquet")
    pq.write_table(pa.table({"text": ["word " * 500] * 50}), tmp_path / "cut.parquet")
    content = (tmp_path / "cut.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[: len(content) // 2])
    text = told(DataSection(train=str(tmp_path / "*.parquet"), sequence=8), tmp_path)
    assert "noise.parquet: is not readable Parquet: " in text
    assert "cut.parquet: is not readable Parquet: " in text
    assert 'column.parquet: has neither a column "text" (text) nor "label" (a table). Its columns: txt.' in text
    assert 'numbers.parquet: row group 0: row 0: "text" is a int, not text.' in text
    assert "empty.parquet: all of its 2 documents are empty." in text
    text = told(DataSection(train=str(tmp_path / "column.parquet"), sequence=8, kind="tokens"), tmp_path)
    assert 'column.parquet: has no column "text". Did you mean "txt"?' in text
    assert "there is no such folder" in told(DataSection(train="datasets:nowhere", sequence=8), tmp_path)


def test_images_of_another_size_or_broken_are_named(tmp_path: Path) -> None:
    from PIL import Image

    section = write_digit_folder(tmp_path, count=30)
    odd = tmp_path / "digits" / "digit 3" / "zz.png"
    Image.new("L", (9, 8)).save(odd)
    text = told(section, tmp_path)
    assert "digits/digit 3/zz.png: is 9 x 8 pixels, " in text
    assert "is 8 x 8. Bring all images to one size." in text
    content = odd.read_bytes()
    odd.write_bytes(b"\x89PNG no")
    assert "digits/digit 3/zz.png: is not a readable image: " in told(section, tmp_path)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8), dtype=np.uint8)).save(odd)
    odd.write_bytes(odd.read_bytes()[:60])
    assert "digits/digit 3/zz.png: is not a readable image: " in told(section, tmp_path)
    odd.unlink()
    (tmp_path / "digits" / "empty").mkdir()
    assert "digits/empty: this class folder holds no .png" in told(section, tmp_path)
    assert content


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"images": np.full((4, 2, 2), 1.0) * np.array([1, 1, np.nan, 1])[:, None, None]}, "nan at index (2, 0, 0)"),
        ({"images": np.zeros((4, 2))}, "has the shape (4, 2)"),
        ({"images": np.zeros((4, 7, 7, 7), np.uint8)}, "has the shape (4, 7, 7, 7)"),
        ({"images": np.zeros((4, 2, 2), np.int64)}, "are int64"),
        ({"labels": np.array([0, 1, -2, 0])}, "labels: -2 at index 2 is negative"),
        ({"labels": np.array([0, 1])}, "has the shape (2,); there are 4 images"),
        ({"labels": np.array([0.5, 1, 1, 1])}, "are float64"),
        ({"labels": np.array([{}] * 4, dtype=object)}, "is not a readable .npz file"),
    ],
)
def test_image_arrays_that_make_no_sense(tmp_path: Path, change: dict[str, np.ndarray], word: str) -> None:
    found = {"images": np.zeros((4, 2, 2), np.uint8), "labels": np.arange(4), **change}
    np.savez(tmp_path / "a.npz", **found)
    text = told(DataSection(train=str(tmp_path / "a.npz")), tmp_path)
    assert word in text
    assert text.startswith("a.npz")


def test_cells_that_are_no_numbers_are_told_with_row_and_column(tmp_path: Path) -> None:
    rows = ["label,price,cat", *(f"{i % 2},{i}.5,{i}" for i in range(9))]
    changes = {
        "nan": ("1,nan,3", 'nan.csv:4, column "price": is nan.'),
        "empty": ("1,,3", 'empty.csv:4, column "price": is empty.'),
        "infinite": ("1,inf,3", 'infinite.csv:4, column "price": is inf.'),
        "negative": ("1,2.5,-3", 'negative.csv:4, column "cat": is -3, not an id.'),
        "word": ("1,cheap,3", "word.csv:4, column \"price\": is 'cheap', not a number."),
        "label": ("2,2.5,3", 'label.csv:4, column "label": is 2. Labels are 0 or 1.'),
    }
    for name, (row, expected) in changes.items():
        (tmp_path / f"{name}.csv").write_text("\n".join([*rows[:3], row, *rows[3:]]))
        assert expected in told(DataSection(train=str(tmp_path / f"{name}.csv")), tmp_path)
    (tmp_path / "none.csv").write_text("\n".join(rows).replace("label", "labels"))
    assert 'none.csv: has no column "label". Did you mean "labels"?' in told(
        DataSection(train=str(tmp_path / "none.csv")), tmp_path
    )
    np.savez(tmp_path / "a.npz", dense=np.array([[1.0], [np.nan]]), ids=np.array([[1], [2]]), labels=np.array([0, 1]))
    assert 'a.npz: row 1, column "dense[0]": is nan.' in told(DataSection(train=str(tmp_path / "a.npz")), tmp_path)


def test_kinds_do_not_mix(tmp_path: Path) -> None:
    flat, digits, table = (
        write_flat(tmp_path).patterns[0],
        str(write_digits(tmp_path).train),
        str(write_table(tmp_path).train),
    )
    text = told(DataSection(train=(flat, digits), sequence=8), tmp_path)
    assert "data.train: the files are of several kinds: flat (flat.bin), npz images (digits.npz)." in text
    parts = (MixturePart(train=table, weight=1), MixturePart(train=digits, weight=1))
    with pytest.raises(MeshwrightError, match=r"digits\.npz: holds images, .*table\.csv holds table"):
        open_data(DataSection(mixture=parts), cache=None)
    assert "holds images, data.kind is table." in told(DataSection(train=digits, kind="table"), tmp_path / "x")
    assert "train and mixture are both given" in told(
        DataSection(train=flat, mixture=parts, sequence=8), tmp_path / "x"
    )
    assert "data.sequence: 0 is not positive." in told(DataSection(train=flat), tmp_path / "x")
    assert "no file is named" in told(DataSection(sequence=8), tmp_path / "x")
    with pytest.raises(MeshwrightError, match=r"weight: is 0\.0"):
        MixturePart(train=flat, weight=0.0)


def test_what_a_file_claims_is_compared_with_its_size(tmp_path: Path) -> None:
    """Archives that unpack to gigabytes, headers that promise terabytes, images of too many pixels."""
    import zipfile

    from PIL import Image

    def header(shape: str, kind: str = "|u1") -> bytes:
        text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
        return b"\x93NUMPY\x01\0" + len(text).to_bytes(2, "little") + text

    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("images.npy", "w") as member:
            member.write(header("(300, 1024, 1024)"))
            for _ in range(300):
                member.write(bytes(1 << 20))
        archive.writestr("labels.npy", header("(300,)") + bytes(300))
    with zipfile.ZipFile(tmp_path / "claim.npz", "w") as archive:
        archive.writestr("images.npy", header("(9999999999, 1024)") + bytes(100))
        archive.writestr("labels.npy", header("(3,)") + bytes(3))
    (tmp_path / "claim.npy").write_bytes(header("(9999999999999,)", "<u2") + bytes(100))
    (tmp_path / "odd.npy").write_bytes(header("((((", "<u2") + bytes(100))
    (tmp_path / "odd.csv").write_bytes(b"label,\xff\xfe\n1,2\n0,3\n")
    for name in ("a", "b"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        Image.new("1", (13_000, 13_000)).save(tmp_path / "pets" / name / "large.png")
    expected = {
        "bomb.npz": "bomb.npz: images: unpacks to 300.0 MiB from ",
        "claim.npz": "claim.npz: is not a readable .npz file: an array of shape (9999999999, 1024)",
        "claim.npy": "claim.npy: is not a whole .npy file: an array of shape (9999999999999,)",
        "odd.npy": "odd.npy: is not a whole .npy file: ",
        "odd.csv": "odd.csv: is not readable CSV: ",
        "pets": "a/large.png: is 13,000 x 13,000 pixels; at most 16,777,216 are read. Scale it down",
    }
    for name, text in expected.items():
        assert text in told(DataSection(train=str(tmp_path / name), sequence=8), tmp_path)
