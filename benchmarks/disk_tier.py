"""States on disk: their rate beside the disk's own, and runs that are killed at random instants.

    python -m benchmarks.disk_tier rate [FOLDER]    both rates in turn: same bytes, blocks, threads and access
    python -m benchmarks.disk_tier kills [COUNT]    kill -9 at random instants; the end is that of a run left alone

rate: layers pass through buffers as in training, each updated by AdamW. The disk's own rate is that of blocks which are
read and written at once without anything else; the layers' is the bytes they move one way, against the slower way.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from meshwright.checkpoint.step_folders import newest_good, read_manifest
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.core.units import MIB
from meshwright.data.open_data import open_text
from meshwright.machine.measure_host import both_ways
from meshwright.models.presets import DecoderConfig
from meshwright.ops.device_mesh import Mesh
from meshwright.ops.disk_memory import DiskFile, LayerOnDisk, nameless_file
from meshwright.run.model import open_config
from meshwright.run.run_file import OptimizerConfig, TrainSection
from meshwright.runtime.trainer import Trainer

LAYERS, ELEMENTS, ROUNDS, SECONDS = 12, 4 * MIB, 3, 4.0
MODEL = DecoderConfig(
    num_layers=5, hidden_size=64, num_heads=4, num_kv_heads=4, ffn_size=256, vocab_size=256, max_sequence=64
)
STEPS, SAVE_EVERY = 24, 3


def layers_rate(folder: Path) -> float:
    """Bytes a second that go one way, while as many go the other."""
    file = DiskFile(folder, 3)
    layers = []
    for _ in range(LAYERS):
        tensors = [torch.rand(ELEMENTS) for _ in range(3)]
        layer = LayerOnDisk(file)
        layer.add(tensors)
        layers.append((layer, tensors))
    gradient, moved, start = torch.rand(ELEMENTS), 0, 0.0
    for turn in range(1 << 20):
        if turn == 1:  # the first turn also finds the memory
            start, moved = time.perf_counter(), 0
        if turn > 1 and time.perf_counter() - start > SECONDS:
            break
        for at, (layer, (weight, mean, square)) in enumerate(layers):
            for other, _ in (layers[at:] + layers[:at])[:3]:
                other.prefetch()
            with layer.in_memory():
                steps = [torch.ones(())]
                given: tuple[list[torch.Tensor], ...] = ([weight], [gradient], [mean], [square], [], steps)
                rates = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
                torch._fused_adamw_(*given, **rates, amsgrad=False, maximize=False)
            moved += layer.tensor_bytes
    for layer, _ in layers:
        layer.settle()
    return moved / (time.perf_counter() - start)


def rate(folder: Path) -> None:
    ratios = []
    for _ in range(ROUNDS):
        file = nameless_file(folder)
        read, write = both_ways(file, LAYERS * ELEMENTS * 12, SECONDS)
        mine = layers_rate(folder)
        ratios.append(mine / min(read, write))
        print(f"disk {read / 1e9:.2f} GB/s in, {write / 1e9:.2f} out at once; layers {mine / 1e9:.2f} each way")
    print(f"share of the disk's rate: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def train(folder: Path) -> None:
    """A run that goes on from its last checkpoint, in this process."""
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400, encoding="utf-8")
    data = open_text(str(text), sequence=64, held_out_fraction=0.1, seed=0, cache=folder / "cache")
    plan = Plan(techniques=(technique_named("offload_states")(disk_share=1.0),), batch=4, microbatch=4)
    settings = TrainSection(batch=4, steps=STEPS, optimizer=OptimizerConfig(lr=1e-2), save_every=SAVE_EVERY)
    newest = newest_good(folder / "checkpoints", report=print)
    mesh, opened = Mesh.make(plan.mesh, torch.device("cpu")), open_config(MODEL, "kills", 0)
    trainer = Trainer(plan, opened, data, settings, mesh, checkpoint=newest, disk=folder)
    print("ready", flush=True)
    for step in trainer.steps():
        if trainer.step % SAVE_EVERY == 0 and (why := trainer.save(folder / "checkpoints")):
            raise SystemExit(f"step {step.step}: {why}")
        time.sleep(0.02)


def digest(folder: Path) -> str:
    newest = newest_good(folder / "checkpoints", report=print)
    assert newest is not None
    assert read_manifest(newest).step == STEPS
    return json.dumps({p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in newest.glob("*.safetensors")})


def kills(count: int) -> int:
    generator, survived, killed, left = random.Random(0), 0, 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        alone = Path(scratch) / "alone"
        alone.mkdir()
        start = time.perf_counter()
        command = [sys.executable, "-m", "benchmarks.disk_tier", "train"]
        subprocess.run([*command, str(alone)], check=True, stdout=subprocess.DEVNULL)
        whole, wanted, number = time.perf_counter() - start, digest(alone), 0
        while killed < count:
            folder = Path(scratch) / str(number)
            folder.mkdir()
            number += 1
            while True:
                child = subprocess.Popen([*command, str(folder)], stdout=subprocess.PIPE)
                assert child.stdout is not None
                child.stdout.readline()
                if killed < count:
                    try:
                        child.wait(generator.uniform(0, whole / 6))
                    except subprocess.TimeoutExpired:
                        child.send_signal(signal.SIGKILL)
                        killed += 1
                if child.wait() == 0:
                    break
                assert child.returncode == -signal.SIGKILL, child.returncode
                left += any(p.name.startswith(".meshwright-") for p in folder.iterdir())
            same = digest(folder) == wanted
            survived += same
            print(f"run {number}: {killed} kills so far, {'the same bits' if same else 'OTHER BITS'}", flush=True)
    print(f"{killed} kills in {number} runs: {survived} ended with the same bits; {left} left a file")
    return 0 if survived == number and not left else 1


if __name__ == "__main__":
    what, *more = sys.argv[1:] or ["rate"]
    if what == "train":
        train(Path(more[0]))
    elif what == "kills":
        raise SystemExit(kills(int(more[0]) if more else 30))
    else:
        rate(Path(more[0] if more else "."))
