"""From files to one flat array of tokens, where documents start, and which tokens count in the loss.

Every document ends with the tokenizer's separator. A text file is one document; a JSONL file has one per
line: its prompt (weight 0: given, not to be learnt), then its text (weight 1), then the separator (weight 1:
where to stop is learnt too). Of a conversation what the assistant said has weight 1.
All files are read before any problem is reported: one run shows them all.

Parquet files and folders of the `datasets` package hold records in columns; both packages are optional.

Files are read in chunks that end at a line (or a row group), so that many processes can share one file. Where
chunks end depends on the file alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.core.errors import Problem, error_at, nearest
from meshwright.core.units import MIB
from meshwright.data.file_list import (
    DATASETS,
    SourceFile,
    collect_problems,
    dataset_place,
    optional_package,
    parquet_file,
    readable,
    readable_parquet,
    require_plausible,
)
from meshwright.data.records import Records, TextKeys, nearest_format, parse_line, read_records
from meshwright.data.tokenizer import TokenArray, Tokenizer

CHUNK_BYTES = 16 * MIB
_DATASET_CHUNK_ROWS = 20_000
_BATCH_ROWS = 1024
_NUL_SEARCH_BYTES = 64 * 1024
# Sources in other suffixes (an old .py in Latin-1) are taken byte for byte.
_UTF8_SUFFIXES = (".txt", ".md", ".jsonl")
_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FlatTokens:
    """Flat tokens, and a weight per token (0 or 1) where some do not count; None means that all count."""

    tokens: TokenArray
    weights: TokenArray | None = None
    starts: npt.NDArray[np.int64] | None = None
    """Where documents begin, ascending; None where nobody knows."""
    num_text_bytes: int = 0
    num_records: int = 0
    """Documents, those included that are empty and were left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRange:
    """From `start` to `stop`: bytes of text or JSONL, row groups of Parquet, rows of a dataset."""

    path: str
    start: int
    stop: int
    kind: str
    """text, jsonl, parquet or datasets."""
    is_last: bool


def chunks_of(file: SourceFile) -> list[FileRange]:
    """The chunks of a file in order, none empty. Raises OSError or MeshwrightError where it cannot be opened."""
    suffix = os.path.splitext(file.path)[1].lower()
    if file.path.startswith(DATASETS):
        kind, num_rows = "datasets", len(_dataset(file.path))
        cuts = [*range(0, num_rows, _DATASET_CHUNK_ROWS), num_rows]
    elif suffix == ".parquet":
        kind, cuts = "parquet", list(range(parquet_file(file.path).num_row_groups + 1))
    else:
        kind, cuts = "jsonl" if suffix == ".jsonl" else "text", [0]
        with open(file.path, "rb") as opened:  # ends of lines about `CHUNK_BYTES` apart
            while cuts[-1] + CHUNK_BYTES < file.size_bytes:
                opened.seek(cuts[-1] + CHUNK_BYTES)
                opened.readline()
                cuts.append(min(opened.tell(), file.size_bytes))
        cuts += [] if cuts[-1] == file.size_bytes else [file.size_bytes]
    return [FileRange(path=file.path, start=a, stop=b, kind=kind, is_last=b == cuts[-1]) for a, b in pairwise(cuts)]


def read_files(
    files: Iterable[SourceFile], keys: TextKeys, tokenizer: Tokenizer, problems: list[Problem]
) -> FlatTokens:
    """All files joined. Problems are appended, and the result is then meaningless."""
    corpora = []
    for file in files:
        num_known, parts = len(problems), []
        with collect_problems(problems, file.path):
            for chunk in chunks_of(file):
                parts.append(read_chunk(chunk, keys, tokenizer, problems))
                if len(problems) > num_known and chunk.kind != "jsonl":  # the other chunks would say the same
                    break
        corpora.append(join(parts, tokenizer))
        if len(problems) == num_known:
            problems.extend(emptiness(file.path, len(corpora[-1].tokens), corpora[-1].num_records))
    return join(corpora, tokenizer)


def emptiness(path: str, num_tokens: int, num_records: int) -> list[Problem]:
    """A file may hold empty documents, but not only such."""
    if num_tokens:
        return []
    what = f"all of its {num_records:,} documents are empty." if num_records else "holds no record, only blank lines."
    return [Problem(where=path, what=what, fix="Remove it or fill it.")]


def read_chunk(chunk: FileRange, keys: TextKeys, tokenizer: Tokenizer, problems: list[Problem]) -> FlatTokens:
    """The tokens of one chunk; those of a text that goes on in the next chunk have no separator yet."""
    if chunk.kind in ("parquet", "datasets"):
        return _encode(_read_columns(chunk, keys, problems), tokenizer)
    with open(chunk.path, "rb") as file:
        file.seek(chunk.start)
        content = file.read(chunk.stop - chunk.start)
        what = ""
        nul = content.find(0, 0, _NUL_SEARCH_BYTES) if chunk.start == 0 else -1
        if nul >= 0:
            what = f"is not a text file: a NUL byte at offset {nul}."
        elif os.path.splitext(chunk.path)[1].lower() in _UTF8_SUFFIXES:
            try:
                content.decode("utf-8")
            except UnicodeDecodeError as error:
                what = f"is not UTF-8: byte 0x{content[error.start]:02x} at offset {chunk.start + error.start}."
        if what:
            fix = "Convert it to UTF-8 text, or leave it out of the pattern."
            problems.append(Problem(where=chunk.path, what=what, fix=fix))
            return join([], tokenizer)
        if chunk.kind == "text":
            tokens, begins = tokenizer.encode(content), chunk.start == 0
            if chunk.is_last:
                tokens = np.append(tokens, np.asarray([tokenizer.separator], dtype=tokens.dtype))
            starts = np.zeros(1 if begins else 0, dtype=np.int64)
            return FlatTokens(tokens=tokens, starts=starts, num_text_bytes=len(content), num_records=int(begins))
        lines = content.removeprefix(_UTF8_MARK) if chunk.start == 0 else content

        def num_lines_before() -> int:
            file.seek(0)
            return sum(file.read(min(MIB, chunk.start - at)).count(b"\n") for at in range(0, chunk.start, MIB))

        records = read_records(
            chunk.path,
            ((number, line) for number, line in enumerate(lines.split(b"\n"), start=1) if line.strip()),
            lambda line: parse_line(line, keys),
            lambda number: f"{chunk.path}:{num_lines_before() + number}",
            keys,
            problems,
            "bad lines",
        )
    return _encode(records, tokenizer)


def _read_columns(chunk: FileRange, keys: TextKeys, problems: list[Problem]) -> Records:
    path, is_parquet = chunk.path, chunk.kind == "parquet"
    opened = parquet_file(path) if is_parquet else _dataset(path)
    names = opened.schema_arrow.names if is_parquet else opened.column_names
    wanted = keys.wanted(names)
    if not wanted:
        near = f"{nearest(keys.text, names)} Set data.text_key to the column that holds the text."
        fix = nearest_format(tuple(names)) or near.lstrip()
        problems.append(Problem(where=path, what=f'has no column "{keys.text}".', fix=fix))
        return Records()
    where = f"{path}: row group {chunk.start}" if is_parquet else f"{path}: rows from {chunk.start}"
    columns: dict[str, list[Any]] = {name: [] for name in wanted}
    num_bytes = 0
    if is_parquet:
        with readable_parquet(where):
            # Equal texts take next to nothing in the file: they are counted as they are unpacked.
            for batch in opened.iter_batches(_BATCH_ROWS, row_groups=[chunk.start], columns=wanted):
                batch.validate(full=True)
                for name in wanted:
                    values = batch.column(name)
                    values = values.dictionary_decode() if hasattr(values, "dictionary_decode") else values
                    num_bytes += values.nbytes
                    require_plausible(where, num_bytes, os.path.getsize(path))
                    columns[name] += values.to_pylist()
    else:
        with readable(path, "a readable dataset"):
            table = opened.data.table  # mapped as it is: offsets that lead outside would end the process
            (table if opened._indices else table.slice(chunk.start, chunk.stop - chunk.start)).validate(full=True)
            columns = opened.select_columns(wanted)[chunk.start : chunk.stop]

    def record_of(values: tuple[Any, ...]) -> dict[str, Any]:
        record = dict(zip(wanted, values, strict=True))
        if keys.text in record and record[keys.text] is None:
            record[keys.text] = ""
        return record

    rows = enumerate(zip(*(columns[name] for name in wanted), strict=True))
    return read_records(path, rows, record_of, lambda row: f"{where}: row {row}", keys, problems, "bad rows")


def _dataset(path: str) -> Any:
    """The rows of "datasets:FOLDER" or "datasets:FOLDER:SPLIT", saved by `save_to_disk` or as plain data files."""
    folder, split = dataset_place(path)
    datasets = optional_package("datasets", path, "data")
    is_saved = any(os.path.exists(os.path.join(folder, name)) for name in ("state.json", "dataset_dict.json"))
    with readable(path, "a readable dataset"):
        splits = datasets.load_from_disk(folder) if is_saved else datasets.load_dataset(folder)
    if not isinstance(splits, dict):
        return splits
    chosen = split or ("train" if "train" in splits else next(iter(splits)) if len(splits) == 1 else "")
    if chosen not in splits:
        fix = f"Name one: {', '.join(f'{DATASETS}{folder}:{name}' for name in splits)}."
        raise error_at(path, f'has no split "{chosen}".' if chosen else "has several splits.", fix)
    return splits[chosen]


def _encode(records: Records, tokenizer: Tokenizer) -> FlatTokens:
    """All records, each with its separator; conversations are encoded apart from others.

    The separator after a conversation does not count in the loss: how an answer ends is in the template.
    """
    parts, place = [], 0
    for is_chat, group in groupby(records.said, key=lambda said: said is not None):
        said = [spans or [] for spans in group]
        part = slice(place, place + len(said))
        place, texts, prompts = part.stop, records.texts[part], records.prompts[part]
        weights = None
        if is_chat:
            flat, lengths, weights = tokenizer.encode_spans(texts, said)
        elif any(prompts):  # encoded apart, so that the border lies between tokens
            flat, pairs = tokenizer.encode_all(
                [segment for pair in zip(prompts, texts, strict=True) for segment in pair]
            )
            lengths, weights = pairs.reshape(-1, 2).sum(axis=1), np.repeat(np.tile([0, 1], len(texts)), pairs)
        else:
            flat, lengths = tokenizer.encode_all(texts)
        ends = np.cumsum(lengths + 1)
        is_text = np.ones(len(flat) + len(ends), dtype=bool)
        is_text[ends - 1] = False
        tokens = np.full(len(is_text), tokenizer.separator, dtype=flat.dtype)
        tokens[is_text] = flat
        if weights is not None:
            counts = np.full(len(is_text), not is_chat, dtype=np.uint8)
            counts[is_text] = weights
            weights = counts
        num_text_bytes = sum(map(len, texts)) + sum(map(len, prompts))
        starts = np.append(0, ends[:-1]).astype(np.int64)
        parts.append(FlatTokens(tokens=tokens, weights=weights, starts=starts, num_text_bytes=num_text_bytes))
    joined = parts[0] if len(parts) == 1 else join(parts, tokenizer)
    return replace(joined, num_records=records.num_records)


def join(parts: list[FlatTokens], tokenizer: Tokenizer) -> FlatTokens:
    tokens = [part.tokens for part in parts] or [tokenizer.encode(b"")]
    offsets = np.cumsum([0, *map(len, tokens)])
    starts = [part.starts + offset for part, offset in zip(parts, offsets, strict=False) if part.starts is not None]
    weights = None
    if any(part.weights is not None for part in parts):
        filled = [np.ones(len(p.tokens), dtype=np.uint8) if p.weights is None else p.weights for p in parts]
        weights = np.concatenate(filled)
    return FlatTokens(
        tokens=np.concatenate(tokens),
        weights=weights,
        starts=np.concatenate([*starts, np.empty(0, dtype=np.int64)]),
        num_text_bytes=sum(part.num_text_bytes for part in parts),
        num_records=sum(part.num_records for part in parts),
    )
