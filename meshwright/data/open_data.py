"""Opening data: what the files are decides who reads them; everything wrong is raised at once.

What a file is, is told from its name, and where that is not enough from its first bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import xxhash

from meshwright.core.errors import Problem, error_at, raise_problems
from meshwright.data.cache import ArrayWriter, CacheKey, Facts, cached
from meshwright.data.data_section import DataSection, MixturePart, patterns_of
from meshwright.data.dataset import Data, Source, join_sources
from meshwright.data.file_list import DATASETS, SourceFile, collect_problems, find_files, npz_names, parquet_file
from meshwright.data.labelled_samples import is_image_folder, open_image_folder, open_npz_images, open_table
from meshwright.data.records import has_messages, nearest_format, open_words
from meshwright.data.sample_order import Stream, part_seed, split_samples
from meshwright.data.token_files import TokenSource, length_problems, open_flat, open_megatron
from meshwright.data.token_reader import FlatTokens, read_files

__all__ = ["Data", "open_data", "open_text"]

_Open = Callable[[Any, Path | None, DataSection], Source]
_FORMS: dict[str, tuple[str, _Open | None]] = {
    "text": ("tokens", None),  # all files at once
    "flat": ("tokens", open_flat),
    "megatron": ("tokens", open_megatron),
    "npz images": ("images", open_npz_images),
    "npz table": ("table", open_table),
    "csv": ("table", open_table),
    "parquet table": ("table", open_table),
}
"""What a file may be -> (kind of its samples, how each is opened)."""


def open_data(section: DataSection, *, cache: Path | None) -> Data:
    """The data of a run file's section. `cache` is where tokens and decoded images are kept and shared."""
    problems: list[Problem] = []
    if bool(section.patterns) == bool(section.mixture):
        what = "no file is named." if not section.mixture else "train and mixture are both given."
        problems.append(Problem(where="data", what=what, fix="Give data.train, or data.mixture."))
    return _open(section, cache, problems)


def open_text(
    patterns: str | tuple[str, ...],
    *,
    sequence: int,
    held_out_fraction: float,
    seed: int,
    cache: Path | None = None,
    text_key: str = "text",
    prompt_key: str = "prompt",
) -> Data:
    """Open text files as byte tokens: find, validate and tokenise them, or map them from `cache`."""
    problems = []
    if sequence < 1:
        problems.append(Problem(where="data.sequence", what=f"{sequence} is not positive.", fix="Use 1 or more."))
    if not 0 <= held_out_fraction < 1:
        what, fix = f"{held_out_fraction} is not a fraction in [0, 1).", "Use 0 to hold nothing out."
        problems.append(Problem(where="data.held_out_fraction", what=what, fix=fix))
        held_out_fraction = 0.0
    section = DataSection(
        train=patterns,
        sequence=max(1, sequence),
        held_out_fraction=held_out_fraction,
        seed=seed,
        kind="tokens",
        text_key=text_key,
        prompt_key=prompt_key,
    )
    return _open(section, cache, problems)


def _open(section: DataSection, cache: Path | None, problems: list[Problem]) -> Data:
    """`problems` are those known so far: the files are still read, to report theirs too."""
    parts = section.mixture or (MixturePart(train=section.train, weight=1.0),)
    opened = [_open_part(patterns_of(part.train), section, cache, problems) for part in parts]
    raise_problems(problems)
    sources = [source for source in opened if source is not None]
    joined = join_sources(sources, problems)
    splits = []
    num_needed = 2 if section.held_out_fraction > 0 else 1  # to train on, and to hold out where that is wanted
    for number, source in enumerate(sources):
        if isinstance(source, TokenSource):
            problems += length_problems(source.num_tokens, source.sequence, num_needed)
        elif source.num_samples < num_needed:
            purpose = "training and holding out" if num_needed > 1 else "training"
            what = f"there are {source.num_samples} samples; {purpose} needs {num_needed}."
            fix = "Add tokens, or use a shorter sequence." if source.info.kind == "tokens" else "Add samples."
            problems.append(Problem(where=source.where, what=what, fix=fix))
        split = split_samples(
            source.num_samples,
            held_out_fraction=section.held_out_fraction,
            seed=part_seed(section.seed, number) if section.mixture else section.seed,
            max_chunk_samples=source.info.max_chunk_samples,
        )
        splits.append(split)
    raise_problems(problems)
    weights = tuple(part.weight for part in section.mixture)
    stream = Stream(parts=tuple(splits), weights=weights, seed=section.seed)
    return Data(source=joined, stream=stream, held_out_fraction=section.held_out_fraction, seed=section.seed)


def _open_part(
    patterns: tuple[str, ...], section: DataSection, cache: Path | None, problems: list[Problem]
) -> Source | None:
    """One source of all files behind the patterns; None only where problems were appended."""

    def each(opener: _Open, files: Iterable[Any]) -> Source | None:
        sources = []
        for file in files:
            with collect_problems(problems, getattr(file, "path", file)):
                sources.append(opener(file, cache, section))
        return join_sources(sources, problems) if sources else None

    if section.kind in ("auto", "images") and patterns and all(map(is_image_folder, patterns)):
        return each(open_image_folder, patterns)
    forms: dict[str, list[SourceFile]] = {}
    for file in find_files(patterns, problems):
        with collect_problems(problems):
            forms.setdefault(_form_of(file, section), []).append(file)
    if len(forms) > 1:
        kinds = ", ".join(f"{form} ({members[0].path})" for form, members in forms.items())
        fix = "Name files of one kind, or make each kind a part of data.mixture."
        problems.append(Problem(where="data.train", what=f"the files are of several kinds: {kinds}.", fix=fix))
    opened = None
    for form, members in forms.items():
        kind, opener = _FORMS[form]
        if kind == "tokens" and section.sequence < 1:
            what, fix = f"{section.sequence} is not positive.", "Say how many tokens a sample has."
            problems.append(Problem(where="data.sequence", what=what, fix=fix))
        elif opener is None:
            with collect_problems(problems):
                opened = _open_texts(tuple(members), section, cache, problems)
        else:  # each pair of token files once, whichever of the two was named
            stems = {os.path.splitext(file.path)[0] if form == "megatron" else file.path: file for file in members}
            opened = each(opener, stems.values())
    return opened


def _open_texts(
    files: tuple[SourceFile, ...], section: DataSection, cache: Path | None, problems: list[Problem]
) -> Source | None:
    words, keys = open_words(section, problems)
    if problems:
        read_files(files, keys, words, problems)  # what is wrong with the files is told too
        return None

    def tokenize(writer: ArrayWriter) -> Facts:
        problems: list[Problem] = []
        corpus = read_files(files, keys, words, problems)
        raise_problems(problems)
        digest = xxhash.xxh3_64(corpus.tokens.data)
        if corpus.weights is not None:
            digest.update(b"weights")
            digest.update(corpus.weights.data)
        for name in ("tokens", "starts", "weights"):
            if (array := getattr(corpus, name)) is not None:
                writer.save(name, array)
        return {"digest": digest.hexdigest(), "num_text_bytes": corpus.num_text_bytes}

    key = CacheKey(question=("text", words.name, *keys.facts), files=files)
    kept = cached(cache, key, tokenize, by_rows=("tokens", "weights"))
    arrays = kept.arrays
    corpus = FlatTokens(tokens=arrays["tokens"], weights=arrays.get("weights"), starts=arrays["starts"])
    num_bytes_per_token = kept.facts["num_text_bytes"] / max(1, len(corpus.tokens))
    return TokenSource(
        corpus=corpus,
        digest=kept.facts["digest"],
        files=files,
        sequence=section.sequence,
        tokenizer=words,
        is_packed=section.packing == "documents",
        num_bytes_per_token=1.0 if words.name == "byte" else num_bytes_per_token,
        check=kept.check_rows if kept.unchecked else None,
    )


def _form_of(file: SourceFile, section: DataSection) -> str:
    """What a file is, by its name or its first bytes. Raises where it cannot be what the section says, or anything."""
    path, suffix, form = file.path, os.path.splitext(file.path)[1].lower(), "text"
    if suffix == ".npz":
        names = npz_names(path)
        if "images" not in names and "ids" not in names and "dense" not in names:
            what = f"holds the arrays {', '.join(names[:8]) or 'of nothing'}."
            raise error_at(path, what, "Images are arrays images and labels; a table is dense, ids and labels.")
        form = "npz images" if "images" in names else "npz table"
    elif suffix == ".csv" and section.kind != "tokens":  # a CSV can also be read as the text it is
        form = "csv"
    elif suffix == ".parquet" and not path.startswith(DATASETS):
        columns = parquet_file(path).schema_arrow.names
        is_text = section.kind == "auto" and (section.text_key in columns or has_messages(columns))
        if section.kind != "tokens" and not is_text:
            form = "parquet table"
            if section.kind != "table" and section.label not in columns:
                what = f'has neither a column "{section.text_key}" (text) nor "{section.label}" (a table).'
                fix = nearest_format(columns) or "Set data.text_key or data.label."
                raise error_at(path, what, f"Its columns: {', '.join(columns[:8])}. {fix}")
    elif suffix == ".idx" or (suffix == ".bin" and os.path.exists(f"{os.path.splitext(path)[0]}.idx")):
        form = "megatron"
    elif suffix in (".bin", ".npy"):
        form = "flat"
    kind = _FORMS[form][0]
    if section.kind not in ("auto", kind):
        what = f"holds {kind}, data.kind is {section.kind}."
        raise error_at(path, what, 'Change one of them, or use kind = "auto".')
    return form
