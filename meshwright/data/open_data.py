"""Opening data: what the files are decides who reads them; everything wrong is raised at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.data.batch import Batch
from meshwright.data.cache import CacheKey, Draft, Facts, keep
from meshwright.data.chat import open_template
from meshwright.data.data_section import DataSection, MixturePart, patterns_of
from meshwright.data.dataset import Data, Source
from meshwright.data.file_kind import Form, form_of, kind_of
from meshwright.data.file_list import SourceFile, find_files
from meshwright.data.flat_tokens import open_flat
from meshwright.data.held_out import split_samples
from meshwright.data.image_folder import is_image_folder, open_image_folder, open_npz_images
from meshwright.data.joined_sources import join_sources
from meshwright.data.json_records import TextKeys
from meshwright.data.label_tables import open_table
from meshwright.data.megatron import open_megatron
from meshwright.data.sample_stream import MixedStream, SplitStream, Stream, part_seed
from meshwright.data.token_reader import FlatTokens, raise_all, read_files, unreadable
from meshwright.data.token_samples import TokenSource, length_problems
from meshwright.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer

__all__ = ["Batch", "Data", "open_data", "open_text"]

_Open = Callable[[Any, Path | None, DataSection], Source]


def open_data(section: DataSection, *, cache: Path | None, sequence: int | None = None) -> Data:
    """The data of a run file's section. `cache` is where tokens and decoded images are kept and shared."""
    problems: list[Problem] = []
    if sequence is not None:
        section = replace(section, sequence=sequence)
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
    """Find, check and tokenize the files by bytes (or map them from `cache`)."""
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
    opener = _Opener(section=section, cache=cache, problems=problems)
    sources = [opener.open(patterns_of(part.train)) for part in parts]
    raise_all(problems)
    whole = [source for source in sources if source is not None]
    joined = join_sources(whole, problems)
    for source in whole:
        problems.extend(_size_problems(source, section))
    raise_all(problems)
    stream = _stream(whole, section)
    return Data(source=joined, stream=stream, held_out_fraction=section.held_out_fraction, seed=section.seed)


def _stream(sources: list[Source], section: DataSection) -> Stream:
    def alone(source: Source, seed: int) -> SplitStream:
        split = split_samples(
            source.num_samples,
            held_out_fraction=section.held_out_fraction,
            seed=seed,
            max_chunk_samples=source.max_chunk_samples,
        )
        return SplitStream(split=split, seed=seed)

    if not section.mixture:
        return alone(sources[0], section.seed)
    parts = tuple(alone(source, part_seed(section.seed, number)) for number, source in enumerate(sources))
    return MixedStream(parts=parts, weights=tuple(part.weight for part in section.mixture), seed=section.seed)


def _size_problems(source: Source, section: DataSection) -> list[Problem]:
    """Something to train on, and something to hold out where that is wanted."""
    if isinstance(source, TokenSource):
        return length_problems(source.num_tokens, source.sequence, section.held_out_fraction)
    needed = 2 if section.held_out_fraction > 0 else 1
    if source.num_samples >= needed:
        return []
    what = f"there are {source.num_samples} samples; training{' and holding out' if needed > 1 else ''} needs {needed}."
    where = source.files[0].path if source.files else "data"
    fix = "Add tokens, or use a shorter sequence." if source.kind == "tokens" else "Add samples."
    return [Problem(where=where, what=what, fix=fix)]


@dataclass(frozen=True, kw_only=True)
class _Opener:
    """Opens the files of one section; problems are collected."""

    section: DataSection
    cache: Path | None
    problems: list[Problem]

    def open(self, patterns: tuple[str, ...]) -> Source | None:
        if self.section.kind in ("auto", "images") and patterns and all(map(is_image_folder, patterns)):
            return self._each(open_image_folder, patterns)
        forms: dict[Form, list[SourceFile]] = {}
        for file in find_files(patterns, self.problems):
            try:
                forms.setdefault(form_of(file, self.section), []).append(file)
            except MeshwrightError as error:
                self.problems.extend(error.problems)
        if len(forms) > 1:
            found = ", ".join(f"{form} ({members[0].path})" for form, members in forms.items())
            fix = "Name files of one kind, or make each kind a part of data.mixture."
            self.problems.append(Problem(where="data.train", what=f"the files are of several kinds: {found}.", fix=fix))
        opened = [self._open_form(form, tuple(members)) for form, members in forms.items()]
        return opened[0] if opened else None

    def _open_form(self, form: Form, files: tuple[SourceFile, ...]) -> Source | None:
        if kind_of(form) == "tokens" and self.section.sequence < 1:
            what, fix = f"{self.section.sequence} is not positive.", "Say how many tokens a sample has."
            self.problems.append(Problem(where="data.sequence", what=what, fix=fix))
            return None
        if form == "text":
            return self._text(files)
        if form == "megatron":  # each pair once, whichever of the two was named
            files = tuple({os.path.splitext(file.path)[0]: file for file in files}.values())
        openers: dict[Form, _Open] = {"flat": open_flat, "megatron": open_megatron, "npz images": open_npz_images}
        return self._each(openers.get(form, open_table), files)

    def _each(self, opener: _Open, files: Sequence[Any]) -> Source | None:
        """One source of all files, each opened by itself."""
        sources = []
        for file in files:
            try:
                sources.append(opener(file, self.cache, self.section))
            except MeshwrightError as error:
                self.problems.extend(error.problems)
            except OSError as error:
                self.problems.append(unreadable(str(error.filename or getattr(file, "path", file)), error))
        return join_sources(sources, self.problems) if sources else None

    def _text(self, files: tuple[SourceFile, ...]) -> Source | None:
        try:
            tokenizer = open_tokenizer(self.section.tokenizer)
        except MeshwrightError as error:
            self.problems.extend(error.problems)
            tokenizer = ByteTokenizer()  # what is wrong with the files is told too
        template = None
        try:
            template = open_template(self.section.chat_template, self.section.tokenizer)
        except MeshwrightError as error:
            self.problems.extend(error.problems)
        keys = TextKeys(text=self.section.text_key, prompt=self.section.prompt_key, template=template)
        if self.problems:
            read_files(files, keys, tokenizer, self.problems)
            return None
        slot = CacheKey(question=("text", tokenizer.name, *keys.facts), files=files)
        try:
            kept = keep(self.cache, slot, lambda draft: _tokenize(files, keys, tokenizer, draft), ("tokens", "weights"))
        except MeshwrightError as error:
            self.problems.extend(error.problems)
            return None
        tokens, num_text_bytes = kept.arrays["tokens"], kept.facts["num_text_bytes"]
        return TokenSource(
            corpus=FlatTokens(tokens=tokens, weights=kept.arrays.get("weights"), starts=kept.arrays["starts"]),
            digest=kept.facts["digest"],
            files=files,
            sequence=self.section.sequence,
            tokenizer=tokenizer,
            is_packed=self.section.packing == "documents",
            num_bytes_per_token=1.0 if tokenizer.name == "byte" else num_text_bytes / max(1, len(tokens)),
            check=kept.check_rows if kept.unchecked else None,
        )


def _tokenize(files: tuple[SourceFile, ...], keys: TextKeys, tokenizer: Tokenizer, draft: Draft) -> Facts:
    problems: list[Problem] = []
    corpus = read_files(files, keys, tokenizer, problems)
    if problems:
        raise MeshwrightError(problems)
    assert corpus.starts is not None
    draft.put("tokens", corpus.tokens)
    draft.put("starts", corpus.starts)
    if corpus.weights is not None:
        draft.put("weights", corpus.weights)
    return {"digest": _digest(corpus), "num_text_bytes": corpus.num_text_bytes}


def _digest(corpus: FlatTokens) -> str:
    """A hash of the content: tokens and weights."""
    state = xxhash.xxh3_64(corpus.tokens.data)
    if corpus.weights is not None:
        state.update(b"weights")
        state.update(corpus.weights.data)
    return str(state.hexdigest())
