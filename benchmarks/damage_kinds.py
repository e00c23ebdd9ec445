"""Every kind of file that `mw` reads: a small whole example, and the function that reads it, for `benchmarks.damage`.

`read` gives something that compares equal when nothing changed. Heavy packages are imported where they are used.
"""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.core.errors import MeshwrightError
from meshwright.data.data_section import DataSection

Crafted = Callable[[Path, random.Random], tuple[Path, bytes]]
SENTENCE = "the quick brown fox jumps over the lazy dog; "


@dataclass(frozen=True, kw_only=True)
class Kind:
    name: str
    make: Callable[[Path], object]
    read: Callable[[Path], Any]
    targets: tuple[str, ...] = ("*",)
    """Patterns of the files that are damaged."""
    is_ours: bool = False
    """Written by mw and not meant to be edited: damage must never pass."""
    crafted: Crafted | None = None
    """A hostile file in place of one of them."""
    share: int = 2


def samples(section: DataSection, cache: Path | None = None) -> Any:
    """Every sample of the data."""
    from meshwright.data.open_data import open_data

    data = open_data(section, cache=cache)
    if problems := data.check_vocabulary(1 << 20):
        raise MeshwrightError(problems)
    batch = data.batch(0, min(data.num_train, 512))
    inputs = batch.inputs if isinstance(batch.inputs, tuple) else (batch.inputs,)
    held = [each.targets.tobytes() for each in data.held_out_batches(64, limit=8)]
    name = data.tokenizer.name if data.tokenizer else ""
    sums = [hash(array.tobytes()) for array in (*inputs, batch.targets, batch.weights)]
    return data.num_samples, name, data.info.num_bytes_per_token, sums, hash(tuple(held)), batch.num_tokens


def of_file(name: str, **settings: Any) -> Callable[[Path], Any]:
    return lambda folder: samples(DataSection(train=str(folder / name), held_out_fraction=0.1, **settings))


# Files of the user.


def make_text(folder: Path) -> None:
    (folder / "a.txt").write_text("".join(f"{number} {SENTENCE}é\n" for number in range(80)), encoding="utf-8")


def make_lines(folder: Path) -> None:
    rows = [{"text": f"{SENTENCE * 2}{row}", "prompt": f"say {row}: " if row % 2 else None} for row in range(40)]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))


def make_chats(folder: Path) -> None:
    write_tokenizer(folder)
    turns = [
        ("system", "Be brief."),
        ("user", "What is it?"),
        ("assistant", SENTENCE),
        ("user", "?"),
        ("assistant", "!"),
    ]
    chat = [{"role": role, "content": content} for role, content in turns]
    (folder / "a.jsonl").write_text("\n".join([json.dumps({"messages": chat})] * 12))


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>", "<turn>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([SENTENCE], trainer)
    made.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}<end>{% endfor %}"
    template += "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
    settings = {"eos_token": {"content": "<end>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def make_tokenizer(folder: Path) -> None:
    make_text(folder)
    write_tokenizer(folder)


def read_tokenizer(folder: Path) -> Any:
    return samples(DataSection(train=str(folder / "a.txt"), sequence=16, tokenizer=str(folder), held_out_fraction=0.1))


def make_parquet(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = {"text": [f"{SENTENCE}{row}" for row in range(60)], "prompt": [f"{row}: " for row in range(60)]}
    pq.write_table(pa.table(rows), folder / "a.parquet", row_group_size=25)


def make_table(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"label": [row % 2 for row in range(80)], "price": [row / 7 for row in range(80)]}
    pq.write_table(pa.table({**columns, "cat_shop": [row % 5 for row in range(80)]}), folder / "a.parquet")


def make_dataset(folder: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    rows = {"text": [f"{SENTENCE}{row}" for row in range(60)]}
    datasets.Dataset.from_dict(rows).save_to_disk(folder / "saved")


def read_dataset(folder: Path) -> Any:
    return samples(DataSection(train=f"datasets:{folder / 'saved'}", sequence=16, held_out_fraction=0.1))


def craft_parquet(folder: Path, dice: random.Random) -> tuple[Path, bytes]:
    """Very many equal rows, which take next to nothing in the file."""
    return folder / "a.parquet", many_rows(dice.choice((0, 1, 5000, 20_000)))


@cache
def many_rows(length: int) -> bytes:
    """Very many equal texts of this length; 0: a table of as many numbers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 100_000 if length else 3 * 10**7
    columns = {"label": np.zeros(count, np.int8), "price": np.zeros(count, np.float32)}
    if length:
        column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int8)), pa.array(["y" * length]))
        columns = {"text": column}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, row_group_size=1 << 40, compression="zstd")
    return sink.getvalue()


def make_csv(folder: Path) -> None:
    rows = [f"{row % 2},{row / 7:.3f},{row % 5},{-row}.5" for row in range(60)]
    (folder / "a.csv").write_text("\n".join(["label,price,cat_shop,change", *rows]))


def make_npy(folder: Path) -> None:
    np.save(folder / "a.npy", np.arange(3000, dtype=np.uint16) % 500)


def npy_bytes(header: str) -> bytes:
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header.encode("latin1", "replace")


def craft_header(dice: random.Random) -> bytes:
    shape = dice.choice(("(9999999999999,)", "(-5,)", "(1, 1, 0)", "()", "(2**40,)", "(3000", "[3000]", "(1e3,)"))
    kind = dice.choice(("'<u2'", "'|O'", "'<f8'", "'V0'", "'<M8[s]'", "[('a', '<i4')]", "'zz'", "None", "'<U100'"))
    order = dice.choice(("False", "True", "3"))
    text = f"{{'descr': {kind}, 'fortran_order': {order}, 'shape': {shape}, }}"
    return npy_bytes(dice.choice((text, text[:-3], text + "(" * 300, "\\", "{", "'" * 3, "x" * 60_000))) + bytes(6000)


def craft_npy(folder: Path, dice: random.Random) -> tuple[Path, bytes]:
    return folder / "a.npy", craft_header(dice)


def craft_npz(folder: Path, dice: random.Random) -> tuple[Path, bytes]:
    """Zeros that unpack to gigabytes, headers that claim terabytes, methods that nobody knows."""
    act = dice.randrange(3)
    if act == 0:
        return next(folder.glob("*.npz")), many_zeros(dice.choice((30, 400)))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("images", "labels", "dense", "ids"):
            archive.writestr(f"{name}.npy", craft_header(dice))
    made = bytearray(file.getvalue())
    if act == 1:
        for at in range(len(made) - 10):
            if made[at : at + 4] == b"PK\x01\x02":
                made[at + dice.choice((8, 10, 24))] ^= 1 << dice.randrange(8)  # flags, method, size
    return next(folder.glob("*.npz")), bytes(made)


@cache
def many_zeros(num_mib: int) -> bytes:
    """Arrays of zeros, compressed."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in ("images", "labels", "dense", "ids"):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                shape = f"({num_mib << 18}, 2, 2)" if name == "images" else f"({num_mib << 18}, 4)"
                member.write(npy_bytes(f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}"))
                for _ in range(num_mib if name in ("images", "dense") else 0):
                    member.write(bytes(1 << 20))
    return file.getvalue()


def make_flat(folder: Path) -> None:
    (np.arange(3000) % 500).astype(np.uint16).tofile(folder / "a.bin")


def make_pair(folder: Path) -> None:
    from meshwright.data.token_files import write_index

    lengths = np.random.default_rng(3).integers(1, 60, 120).astype(np.int32)
    (np.arange(int(lengths.sum())) % 500).astype(np.uint16).tofile(folder / "a.bin")
    with open(folder / "a.idx", "wb") as file:
        write_index(file, np.dtype("uint16"), [lengths])


def make_npz_images(folder: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (40, 8, 8), dtype=np.uint8)
    np.savez_compressed(folder / "a.npz", images=images, labels=np.arange(40) % 10)


def make_npz_table(folder: Path) -> None:
    np.savez(folder / "a.npz", dense=np.ones((50, 3)), ids=np.ones((50, 2), np.int64), labels=np.arange(50) % 2)


def make_images(folder: Path) -> None:
    from PIL import Image

    random_pixels = np.random.default_rng(0)
    for number in range(6):
        inside = folder / "pets" / f"class{number % 2}"
        inside.mkdir(parents=True, exist_ok=True)
        pixels = random_pixels.integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(inside / f"{number}.{'png' if number % 3 else 'jpg'}")


def craft_image(folder: Path, dice: random.Random) -> tuple[Path, bytes]:
    """A small PNG of very many pixels."""
    side = dice.choice((5000, 13_000, 60_000, 2_000_000_000))

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", side, side, dice.choice((1, 8)), 0, 0, 0, 0)
    body = zlib.compress(bytes(min(side * side // 8, 1 << 20)))
    made = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    return dice.choice(sorted(folder.glob("pets/*/*"))), made


# Files that mw writes.


def cached(make: Callable[[Path], object], name: str, **settings: Any) -> tuple[Callable[[Path], None], Any]:
    """The data cache of a run: the source stays whole."""

    def read(folder: Path) -> Any:
        section = DataSection(train=str(folder / "in" / name), held_out_fraction=0.1, **settings)
        return samples(section, folder / "cache")

    def made(folder: Path) -> None:
        (folder / "in").mkdir()
        make(folder / "in")
        read(folder)

    return made, read


def make_prepared(folder: Path) -> None:
    from meshwright.data.prepare import prepare

    (folder / "in").mkdir()
    make_chats(folder / "in")
    prepare([str(folder / "in" / "a.jsonl")], str(folder / "out"), tokenizer=str(folder / "in"), num_workers=1)


def make_checkpoint(folder: Path) -> None:
    import torch

    from meshwright.checkpoint.save import begin, commit, write_rank_file
    from meshwright.core.box import Box

    for step in (1, 2):
        tensors = {"weight": torch.arange(24.0).reshape(4, 6) + step, "count": torch.tensor(step)}
        tmp = begin(folder, step)
        pieces = [(name, Box.whole(tuple(tensor.shape)), tensor) for name, tensor in tensors.items()]
        commit(folder, step, tmp, [write_rank_file(tmp, 0, pieces)], {"seed": 7, "cursor": step}, keep=2)


def read_checkpoint(folder: Path) -> Any:
    """The newest whole checkpoint: the one before it is right too."""
    import torch

    from meshwright.checkpoint.load import Reader
    from meshwright.checkpoint.step_folders import describe, newest_good
    from meshwright.core.box import Box

    describe(folder)
    found = newest_good(folder, report=lambda line: None)
    if found is None:
        raise MeshwrightError("there is no checkpoint")
    reader = Reader(found)
    weight, count = torch.empty(4, 6), torch.empty((), dtype=torch.int64)
    reader.read_into("weight", Box.whole((4, 6)), weight)
    reader.read_into("count", Box.whole(()), count)
    step = reader.step
    assert reader.state == {"seed": 7, "cursor": step}
    return (weight - step).tolist(), int(count) - step


# Folders of others.


def make_hf(folder: Path) -> None:
    from dataclasses import replace

    import torch
    from safetensors.torch import save_file

    from meshwright.hf.config_json import config_for
    from meshwright.models.presets import preset

    made = config_for(replace(preset("byte-3m"), num_layers=1))
    (folder / "config.json").write_text(json.dumps(made, indent=1))
    tensors = {f"layers.{number}.weight": torch.arange(6.0 * number).reshape(number, 6) for number in range(1, 7)}
    shards = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}, indent=1))


def read_hf(folder: Path) -> Any:
    import torch

    from meshwright.checkpoint.safetensors_folder import open_folder
    from meshwright.core.box import Box
    from meshwright.hf.config_json import read_folder

    model = read_folder(folder)
    held = open_folder(folder)
    sums = []
    try:
        for name, each in sorted(held.tensors.items()):
            out = torch.empty(each.shape, dtype=torch.float32)
            held.read_into(name, Box.whole(each.shape), out)
            sums.append((name, hash(out.numpy().tobytes())))
    finally:
        held.close()
    return repr(model.config), sums


def make_dcp(folder: Path) -> None:
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"a": torch.arange(24.0).reshape(6, 4), "b": torch.ones(5).bfloat16(), "c": torch.arange(3)}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=1), no_dist=True)


def read_dcp(folder: Path) -> Any:
    import torch

    from meshwright.checkpoint.dcp import open_dcp
    from meshwright.core.box import Box

    held = open_dcp(folder)
    sums = []
    try:
        for name, each in sorted(held.tensors.items()):
            out = torch.empty(each.shape, dtype=getattr(torch, each.dtype))
            held.read_into(name, Box.whole(each.shape), out)
            sums.append((name, out.double().tolist()))
    finally:
        held.close()
    return repr(sums)


# Artefacts and run files.


def make_run(folder: Path) -> None:
    (folder / "run.toml").write_text(
        '[model]\nname = "byte-tiny"\n[data]\ntrain = "corpus/*.txt"\nsequence = 32\nheld_out_fraction = 0.1\n'
        'packing = "stream"\n[train]\nbatch = 4\nsteps = 8\nsave_every = 4\nkeep = 4\n'
        'optimizer = { name = "adamw", lr = 1e-2, warmup = 2 }\n[plan]\npin = ["replicate=2"]\nban = ["pipeline"]\n'
        f'[run]\nfolder = "{folder}/run"\ncluster = "laptop"\nranks = 2\n'
    )


def read_run_file(folder: Path) -> Any:
    from meshwright.run.model import describe_run
    from meshwright.run.run_file import read_run

    config = read_run(folder / "run.toml")
    describe_run(config)  # what only the model can tell is wrong
    return repr(config)


def make_artefacts(folder: Path) -> None:
    from meshwright.core.plan import Plan
    from meshwright.machine.named_clusters import cluster
    from meshwright.models.presets import preset, profile_of
    from meshwright.simulator.simulate import simulate

    profile, machines, plan = profile_of(preset("byte-tiny"), "byte-tiny"), cluster("2xh100"), Plan.from_json(PLAN)
    (folder / "plan.json").write_text(plan.to_json())
    (folder / "cluster.json").write_text(machines.to_json())
    (folder / "profile.json").write_text(profile.to_json())
    (folder / "timeline.json").write_text(simulate(profile, plan, machines, sequence=32).to_json())


PLAN = json.dumps({"techniques": [{"name": "replicate", "size": 2}], "batch": 4, "microbatch": 1, "version": 1})


def read_artefacts(folder: Path) -> Any:
    from meshwright.core.cluster import Cluster
    from meshwright.core.codec import load_artefact
    from meshwright.core.plan import Plan
    from meshwright.core.profile import Profile
    from meshwright.core.timeline import Timeline
    from meshwright.simulator.forecast import forecast

    plan, machines = load_artefact(Plan, folder / "plan.json"), load_artefact(Cluster, folder / "cluster.json")
    profile, timeline = (
        load_artefact(Profile, folder / "profile.json"),
        load_artefact(Timeline, folder / "timeline.json"),
    )
    timeline.to_chrome()
    if problems := [*plan.check(profile, machines), *plan.check_sequence(32)]:
        raise MeshwrightError(problems)
    return repr(forecast(profile, plan, machines, sequence=32)), repr(timeline)


def make_metrics(folder: Path) -> None:
    rows = [{"step": step, "loss": 5.0 - step / 100, "lr": 1e-3} for step in range(1, 60)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_metrics(folder: Path) -> Any:
    """What a resumed run does with it: go on behind step 40. Nothing trains on it."""
    from meshwright.runtime.run_record import Lines

    lines = Lines(folder / "metrics.jsonl", 40, lambda text: None)
    lines.write({"step": 41, "loss": 1.0})
    lines.close()
    last = (folder / "metrics.jsonl").read_bytes().splitlines()[-1]
    return json.loads(last) if last.startswith(b"{") else last


def make_ledger(folder: Path) -> None:
    from meshwright.core.ledger import Entry, Measured, Predicted, append
    from meshwright.machine.named_clusters import cluster

    parts = {"compute": 0.1}
    predicted = Predicted(
        step_seconds=0.1,
        step_seconds_low=0.05,
        step_seconds_high=0.2,
        peak_bytes=1 << 20,
        seconds_by_origin=parts,
        seconds_by_cause=parts,
    )
    measured = Measured(step_seconds=0.12, step_seconds_p10=0.1, step_seconds_p90=0.2, num_steps=20, peak_bytes=1 << 20)
    entry = Entry(
        unix_seconds=1.8e9,
        versions={"torch": "2"},
        machine="m",
        device_name="h100",
        model="byte-tiny",
        model_fingerprint="f",
        plan=json.loads(PLAN),
        plan_fingerprint="p",
        cluster=cluster("2xh100"),
        sequence=32,
        batch=4,
        predicted=predicted,
        measured=measured,
    )
    for _ in range(3):
        append(entry, folder / "ledger.jsonl")


def read_ledger(folder: Path) -> Any:
    """The entries that are whole: each is the one that was written."""
    from meshwright.core.ledger import read

    entries, _ = read(folder / "ledger.jsonl")
    if not entries:
        raise MeshwrightError("no line is whole")
    return set(map(repr, entries))


def make_parts(folder: Path) -> None:
    make_chats(folder)
    read_parts(folder)


def read_parts(folder: Path) -> Any:
    """What an interrupted `mw data prepare` left, made again where it is not whole."""
    from meshwright.data.file_list import find_files
    from meshwright.data.prepare import PartJob, finished_part, make_part
    from meshwright.data.token_reader import chunks_of

    (file,) = find_files((str(folder / "a.jsonl"),), [])
    (folder / "parts").mkdir(exist_ok=True)
    (chunk,) = chunks_of(file)
    job = PartJob(path=str(folder / "parts" / "part"), chunk=chunk, section=DataSection(tokenizer=str(folder)))
    result = finished_part(job) or make_part(job)
    return result, [hash((folder / "parts" / f"part.{end}").read_bytes()) for end in ("bin", "lengths", "weights")]


def make_run_folder(folder: Path) -> None:
    from meshwright.run.prepare import prepare, write_prepared
    from meshwright.run.run_file import read_run

    make_run(folder)
    (folder / "run").mkdir()
    config = read_run(folder / "run.toml")
    write_prepared(config, prepare(config, "", lambda line: None))


def read_run_folder(folder: Path) -> Any:
    from meshwright.run.prepare import prepare
    from meshwright.run.run_file import read_run

    return repr(prepare(read_run(folder / "run.toml"), "", lambda line: None).plan)


RUN_FILES = ("run/plan.json", "run/wishes.json", "run/cluster.json")

# Command lines.

COMMANDS = (
    "plan --model byte-tiny --cluster 2xh100 --seq 32 --batch 4 --json",
    "plan --model byte-tiny --cluster 2xh100 --seq 32 --batch 4 --pin replicate=2 --ban pipeline --max-memory 70GiB",
    "plan --model byte-tiny --cluster 2xh100 --batch 4 --what-if memory=+20GiB --why replicate",
    "plan --model byte-tiny --cluster 2xh100 --devices 1..2 --target-tokens 1T --top 2",
    "simulate {folder}/plan.json --model byte-tiny --cluster 2xh100 --seq 32 --json",
    "profile llama3-8b",
    "techniques tensor",
    "ckpt list {folder}",
    "ckpt verify {folder} --step 3",
    "ckpt export {folder} {folder}/out --dtype float16",
    "data prepare {folder}/none.txt -o {folder}/out --workers 1",
    "train {folder}/none.toml --set train.batch=4",
    "check {folder}/none.toml --steps 3",
)
ODD_WORDS = (
    *(
        "-1",
        "0",
        "9" * 30,
        "nan",
        "1e400",
        "",
        " ",
        "\x00",
        "é",
        "--",
        "--nonsense",
        "-o",
        "../..",
        "/dev/null",
        "[",
        "*",
    ),
    *(
        "a.b=c",
        "=",
        "x" * 5000,
        "replicate=",
        "tensor.size=0",
        "memory=-1",
        "1..",
        "..",
        "0..0",
        "5..1",
        "{}",
        "--help",
    ),
)


def make_commands(folder: Path) -> None:
    (folder / "plan.json").write_text(PLAN)
    (folder / "words.json").write_text(json.dumps(COMMANDS[0].split()))


def craft_command(folder: Path, dice: random.Random) -> tuple[Path, bytes]:
    words = dice.choice(COMMANDS).format(folder=folder).split()
    for _ in range(dice.choice((1, 1, 2, 3))):
        at = dice.randrange(len(words) + 1)
        act = dice.randrange(4)
        if act == 0:
            words[at:at] = [dice.choice(ODD_WORDS)]
        elif act == 1:
            words[at : at + 1] = [dice.choice(ODD_WORDS)]
        elif act == 2:
            del words[at : at + 1]
        else:
            words[at:at] = words[dice.randrange(len(words)) :][:2] if words else []
    return folder / "words.json", json.dumps(words).encode()


def read_command(folder: Path) -> Any:
    from meshwright.cli.main import main

    try:
        words = json.loads((folder / "words.json").read_bytes())
        words = [str(word) for word in words] if isinstance(words, list) else []
    except (ValueError, RecursionError, OSError):
        words = ["plan"]
    words = [word for word in words if "\0" not in word]  # no shell can hand that over
    try:
        code = main(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    if code not in (0, 1, 2, 75):
        raise AssertionError(f"exit code {code}")
    if code:
        raise MeshwrightError(f"exit code {code}")
    return 0


def _kinds() -> dict[str, Kind]:
    packed = {"sequence": 16, "packing": "documents"}

    def chats(folder: Path) -> Any:
        section = DataSection(train=str(folder / "a.jsonl"), tokenizer=str(folder), held_out_fraction=0.1, **packed)
        return samples(section)

    def cache_of(name: str, make: Callable[[Path], object], file: str, share: int = 2, **settings: Any) -> Kind:
        made, read = cached(make, file, **settings)
        return Kind(name=name, make=made, read=read, targets=("cache/*",), is_ours=True, share=share)

    texts, table, prepared = of_file("a.parquet", **packed), of_file("a.parquet"), of_file("out.bin", **packed)
    return {
        kind.name: kind
        for kind in (
            Kind(name="text", make=make_text, read=of_file("a.txt", sequence=16)),
            Kind(name="jsonl", make=make_lines, read=of_file("a.jsonl", **packed)),
            Kind(name="chat jsonl", make=make_chats, read=chats, targets=("a.jsonl",)),
            Kind(name="chat template", make=make_chats, read=chats, targets=("tokenizer_config.json",)),
            Kind(name="tokenizer", make=make_tokenizer, read=read_tokenizer, targets=("tokenizer*.json",)),
            Kind(name="parquet text", make=make_parquet, read=texts, crafted=craft_parquet),
            Kind(name="parquet table", make=make_table, read=table, crafted=craft_parquet),
            Kind(name="dataset", make=make_dataset, read=read_dataset, targets=("saved/*",), share=1),
            Kind(name="csv", make=make_csv, read=of_file("a.csv")),
            Kind(name="npy", make=make_npy, read=of_file("a.npy", sequence=16), crafted=craft_npy),
            Kind(name="flat bin", make=make_flat, read=of_file("a.bin", sequence=16), share=1),
            Kind(name="megatron", make=make_pair, read=of_file("a.bin", **packed)),
            Kind(name="npz images", make=make_npz_images, read=of_file("a.npz"), crafted=craft_npz),
            Kind(name="npz table", make=make_npz_table, read=of_file("a.npz"), crafted=craft_npz),
            Kind(name="images", make=make_images, read=of_file("pets"), targets=("pets/*/*",), crafted=craft_image),
            cache_of("text cache", make_lines, "a.jsonl", share=4, **packed),
            cache_of("image cache", make_npz_images, "a.npz"),
            cache_of("table cache", make_csv, "a.csv"),
            cache_of("index cache", make_pair, "a.bin", **packed),
            Kind(name="prepared", make=make_prepared, read=prepared, targets=("out.*",), is_ours=True, share=4),
            Kind(
                name="checkpoint", make=make_checkpoint, read=read_checkpoint, targets=("*/*",), is_ours=True, share=4
            ),
            Kind(name="hugging face", make=make_hf, read=read_hf, share=3),
            Kind(name="dcp", make=make_dcp, read=read_dcp, targets=("*", ".metadata")),
            Kind(name="run file", make=make_run, read=read_run_file, share=3),
            Kind(name="artefacts", make=make_artefacts, read=read_artefacts, share=3),
            Kind(name="metrics", make=make_metrics, read=read_metrics, share=1),
            Kind(name="ledger", make=make_ledger, read=read_ledger, is_ours=True, share=1),
            Kind(name="parts", make=make_parts, read=read_parts, targets=("parts/*",), is_ours=True),
            Kind(name="run folder", make=make_run_folder, read=read_run_folder, targets=RUN_FILES),
            Kind(name="command", make=make_commands, read=read_command, targets=("words.json",), crafted=craft_command),
        )
    }


KINDS = _kinds()
