"""Images with a class each: a folder of one sub-folder per class, or an .npz of arrays.

Decoded once, into an array (samples, channels, height, width) that is mapped from the cache afterwards.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import xxhash

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.data.arrays import first_not_finite, read_npz
from meshwright.data.batch import SampleRows
from meshwright.data.cache import CachedArrays, CacheKey, Draft, Facts, keep
from meshwright.data.data_section import DataSection
from meshwright.data.dataset import WithoutTokens
from meshwright.data.file_list import SourceFile
from meshwright.data.sample_order import Index
from meshwright.data.token_reader import raise_all

SUFFIXES = (".png", ".jpg", ".jpeg")
_GRAY_MODES = ("1", "L")
_DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L")
_CHANNELS = (1, 3, 4)
_BLOCK_BYTES = 1 << 26
# As many decoders as cores run at once, each with a few copies of its image.
_MAX_PIXELS = 1 << 24
_BY_ROWS = ("images", "labels")


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageSource(WithoutTokens):
    kept: CachedArrays
    images: npt.NDArray[Any]
    """(samples, channels, height, width): uint8, or float32 taken as it is."""
    labels: npt.NDArray[np.int64]
    num_classes: int
    classes: tuple[str, ...]
    digest: str
    files: tuple[SourceFile, ...]
    kind: ClassVar[str] = "images"

    @property
    def num_samples(self) -> int:
        return len(self.images)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return tuple(self.images.shape[1:])

    @property
    def facts(self) -> list[Any]:
        return ["images", list(self.images.shape), self.num_classes, self.digest]

    def pick(self, samples: Index) -> SampleRows:
        self.kept.check_rows(samples, samples + 1)
        chosen = self.images[samples]
        if chosen.dtype == np.uint8:
            chosen = np.divide(chosen, np.float32(255), dtype=np.float32)
        return SampleRows(chosen, self.labels[samples], np.ones(len(samples), dtype=np.float32))


def open_npz_images(file: SourceFile, cache: Path | None, section: DataSection) -> ImageSource:
    kept = keep(
        cache, CacheKey(question=("images",), files=(file,)), lambda draft: _convert(file.path, draft), _BY_ROWS
    )
    return _source(kept, file)


def open_image_folder(folder: str, cache: Path | None, section: DataSection) -> ImageSource:
    """Image files in one sub-folder per class; the classes are numbered by name."""
    listing = _list(folder)
    state = xxhash.xxh3_64_intdigest(repr([entry[1:] for entry in listing]).encode()) >> 1
    total_bytes = sum(size for _, _, size, _ in listing)
    file = SourceFile(path=os.path.abspath(folder), size_bytes=total_bytes, mtime_ns=state)
    paths = [entry[0] for entry in listing]
    kept = keep(
        cache, CacheKey(question=("image folder",), files=(file,)), lambda draft: _decode(paths, draft), _BY_ROWS
    )
    return _source(kept, file)


def _source(kept: CachedArrays, file: SourceFile) -> ImageSource:
    return ImageSource(
        kept=kept,
        images=kept.arrays["images"],
        labels=kept.arrays["labels"],
        num_classes=kept.facts["num_classes"],
        classes=tuple(kept.facts["classes"]),
        digest=kept.facts["digest"],
        files=(file,),
    )


def is_image_folder(path: str) -> bool:
    """Whether some sub-folder holds an image. What may not be read is not one, and is told by whoever reads it."""
    if not os.path.isdir(path) or not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
        return False
    folders = [entry.path for entry in os.scandir(path) if entry.is_dir()]
    readable = [folder for folder in folders if os.access(folder, os.R_OK | os.X_OK, effective_ids=True)]
    return any(entry.name.lower().endswith(SUFFIXES) for folder in readable for entry in os.scandir(folder))


def _list(folder: str) -> list[tuple[str, str, int, int]]:
    """(path, place in the folder, bytes, time) of every image, by class and name."""
    found, problems = [], []
    for name in sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."):
        inside = os.path.join(folder, name)
        images = sorted((e for e in os.scandir(inside) if e.name.lower().endswith(SUFFIXES)), key=lambda e: e.name)
        if not images:
            what = f"this class folder holds no {', '.join(SUFFIXES)} file."
            problems.append(Problem(where=inside, what=what, fix="Remove it or fill it."))
        for entry in images:
            status = entry.stat()
            found.append((entry.path, f"{name}/{entry.name}", status.st_size, status.st_mtime_ns))
    raise_all(problems)
    return found


def _decode(paths: list[str], draft: Draft) -> Facts:
    try:
        from PIL import Image
    except ImportError:
        fix = "Run: pip install meshwright[images]"
        raise MeshwrightError([Problem(where=paths[0], what="reading it needs pillow.", fix=fix)]) from None
    problems: list[Problem] = []
    mode, (width, height) = _form(paths, problems)
    raise_all(problems)
    shape = (len(paths), 1 if mode == "L" else 3, height, width)
    images = draft.array("images", shape, np.uint8)

    def decode(number: int) -> None:
        try:
            with Image.open(paths[number]) as image:
                pixels = np.asarray(image.convert(mode))
        except Exception as error:  # what a broken file raises depends on how it is broken
            problems.append(_broken(paths[number], error))
            return
        images[number] = pixels.reshape(height, width, -1).transpose(2, 0, 1)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoding runs outside Python's lock
        list(pool.map(decode, range(len(paths))))
    raise_all(sorted(problems, key=lambda problem: problem.where))
    names = [os.path.basename(os.path.dirname(path)) for path in paths]
    classes, labels = np.unique(names, return_inverse=True)
    draft.put("labels", labels.astype(np.int64))
    digest = _digest(images, labels, ",".join(classes))
    return {"num_classes": len(classes), "classes": classes.tolist(), "digest": digest}


def _form(paths: list[str], problems: list[Problem]) -> tuple[str, tuple[int, int]]:
    """Gray or colour, and the size that all have, from the files' headers."""
    from PIL import Image

    first, is_gray, others = None, True, []
    for path in paths:
        try:
            with warnings.catch_warnings(action="ignore"), Image.open(path) as image:  # too many pixels: told below
                size, mode = image.size, image.mode
        except Exception as error:
            problems.append(_broken(path, error))
            continue
        if size[0] * size[1] > _MAX_PIXELS:
            what = f"is {size[0]:,} x {size[1]:,} pixels; at most {_MAX_PIXELS:,} are read."
            problems.append(Problem(where=path, what=what, fix="Scale it down, or cut it into pieces."))
        if mode in _DEEP_MODES:
            what = f'its pixels have the mode "{mode}"; 8 bits per channel are read.'
            problems.append(Problem(where=path, what=what, fix="Save it with 8 bits, or give arrays in an .npz."))
        first, is_gray = first or (path, size), is_gray and mode in _GRAY_MODES
        if size != first[1]:
            others.append((path, size))
    if others and first:
        (path, size), more = others[0], f" {len(others) - 1:,} others differ too." if len(others) > 1 else ""
        what = f"is {size[0]} x {size[1]} pixels, {first[0]} is {first[1][0]} x {first[1][1]}.{more}"
        problems.append(Problem(where=path, what=what, fix="Bring all images to one size."))
    return "L" if is_gray else "RGB", first[1] if first else (0, 0)


def _broken(path: str, error: Exception) -> Problem:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return Problem(where=path, what=f"is not a readable image: {reason}.", fix="Mend it or leave it out.")


def _convert(path: str, draft: Draft) -> Facts:
    """The arrays `images` and `labels` of an .npz, checked and laid out."""
    found = read_npz(path, ("images", "labels"))
    images, labels = found["images"], found["labels"]
    problems = [*_image_problems(path, images), *_label_problems(path, labels, len(images))]
    raise_all(problems)
    laid_out = images[:, None] if images.ndim == 3 else images
    if images.ndim == 4 and _is_channels_last(images.shape):
        laid_out = images.transpose(0, 3, 1, 2)
    dtype = np.uint8 if images.dtype == np.uint8 else np.float32
    kept = draft.array("images", laid_out.shape, dtype)
    kept[...] = laid_out
    draft.put("labels", labels.astype(np.int64))
    return {"num_classes": int(labels.max()) + 1, "classes": [], "digest": _digest(kept, labels, "")}


def _is_channels_last(shape: tuple[int, ...]) -> bool:
    return shape[3] in _CHANNELS


def _image_problems(path: str, images: npt.NDArray[Any]) -> Iterator[Problem]:
    where = f"{path}: images"
    is_known = images.ndim == 3 or (images.ndim == 4 and (images.shape[1] in _CHANNELS or images.shape[3] in _CHANNELS))
    if not is_known or not images.size:
        what = f"has the shape {images.shape}."
        fix = (
            "Use (N, height, width), (N, height, width, channels) or (N, channels, height, width); 1, 3 or 4 channels."
        )
        yield Problem(where=where, what=what, fix=fix)
    elif images.dtype != np.uint8 and images.dtype.kind != "f":
        yield Problem(
            where=where, what=f"are {images.dtype}.", fix="Use uint8 (0 to 255), or floats as the model wants."
        )
    elif images.dtype.kind == "f" and (place := first_not_finite(images)) is not None:
        value = images[place]
        yield Problem(where=where, what=f"{value} at index {tuple(map(int, place))}.", fix="Only finite numbers train.")


def _label_problems(path: str, labels: npt.NDArray[Any], num_images: int) -> Iterator[Problem]:
    where = f"{path}: labels"
    if labels.shape != (num_images,):
        what = f"has the shape {labels.shape}; there are {num_images:,} images."
        yield Problem(where=where, what=what, fix="Give one label for each image.")
    elif labels.dtype.kind not in "iu":
        yield Problem(where=where, what=f"are {labels.dtype}.", fix="Use whole numbers from 0.")
    elif len(labels) and labels.min() < 0:
        place = int(np.argmax(labels < 0))
        yield Problem(where=where, what=f"{labels[place]} at index {place} is negative.", fix="Count classes from 0.")


def _digest(images: npt.NDArray[Any], labels: npt.NDArray[Any], classes: str) -> str:
    state = xxhash.xxh3_64(classes.encode())
    state.update(np.ascontiguousarray(labels, dtype=np.int64).data)
    step = max(1, _BLOCK_BYTES // max(1, images[:1].nbytes))
    for start in range(0, len(images), step):
        state.update(np.ascontiguousarray(images[start : start + step]).data)
    return state.hexdigest()
