"""Small data of every kind, written to a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.data_section import DataSection, MixturePart
from meshwright.data.token_files import write_index


def write_flat(folder: Path) -> DataSection:
    tokens = np.random.default_rng(1).integers(0, 500, 3001)
    (folder / "flat.bin").write_bytes(tokens.astype(np.uint16).tobytes())
    np.save(folder / "flat.npy", tokens.astype(np.int32))
    train = (str(folder / "flat.bin"), str(folder / "flat.npy"))
    return DataSection(train=train, sequence=16, held_out_fraction=0.1)


def write_pair(stem: Path, lengths: list[int], dtype: str = "uint16") -> np.ndarray:
    """A Megatron pair of documents with these lengths; its tokens."""
    tokens = np.random.default_rng(2).integers(0, 200, sum(lengths)).astype(dtype)
    stem.with_suffix(".bin").write_bytes(tokens.tobytes())
    with open(stem.with_suffix(".idx"), "wb") as file:
        write_index(file, np.dtype(dtype), [np.asarray(lengths, dtype=np.int32)])
    return tokens


def write_megatron(folder: Path) -> DataSection:
    lengths = np.random.default_rng(3).integers(0, 60, 120).tolist()
    write_pair(folder / "pair", lengths)
    return DataSection(train=str(folder / "pair.idx"), sequence=24, packing="documents", held_out_fraction=0.1)


def write_text(folder: Path) -> DataSection:
    records = [{"text": f"answer {i * i}", "prompt": f"question {i}?" if i % 3 else ""} for i in range(200)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    return DataSection(train=str(folder / "pairs.jsonl"), sequence=16, packing="documents", held_out_fraction=0.1)


def write_digits(folder: Path) -> DataSection:
    from sklearn.datasets import load_digits

    digits = load_digits()
    np.savez(folder / "digits.npz", images=(digits.images * 15).astype(np.uint8), labels=digits.target)
    return DataSection(train=str(folder / "digits.npz"), held_out_fraction=0.1)


def write_digit_folder(folder: Path, count: int = 200) -> DataSection:
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images[:count], digits.target[:count], strict=True)):
        inside = folder / "digits" / f"digit {label}"
        inside.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).save(inside / f"{number:04}.png")
    return DataSection(train=str(folder / "digits"), held_out_fraction=0.1)


def write_table(folder: Path) -> DataSection:
    rows = [f"{i % 2},{i / 7:.3f},{i % 5},{i * i % 11},{-i}.5" for i in range(150)]
    (folder / "table.csv").write_text("\n".join(["label,price,cat_shop,hour,change", *rows]))
    return DataSection(train=str(folder / "table.csv"), held_out_fraction=0.1)


def write_tokenizer(folder: Path) -> Path:
    """A folder as Hugging Face has them: 300 tokens, its end of a text named in the settings beside it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([f"line {i} says {i * i}" for i in range(200)], trainer)
    made.enable_truncation(4)  # must not be obeyed
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    return folder


def write_mixture(folder: Path) -> DataSection:
    flat, packed = write_flat(folder).patterns, write_megatron(folder)
    parts = (MixturePart(train=flat, weight=3), MixturePart(train=packed.train, weight=1))
    return DataSection(mixture=parts, sequence=16, held_out_fraction=0.1)


WRITERS: dict[str, Callable[[Path], DataSection]] = {
    "flat": write_flat,
    "megatron": write_megatron,
    "text": write_text,
    "digits": write_digits,
    "digit folder": write_digit_folder,
    "table": write_table,
    "mixture": write_mixture,
}


def arrays(batch: Any) -> list[np.ndarray]:
    """Every array of a batch."""
    inputs = batch.inputs if isinstance(batch.inputs, tuple) else (batch.inputs,)
    return [*inputs, batch.targets, batch.weights]
