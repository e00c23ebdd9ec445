"""Sums in few bits against a loop of one process that codes and decodes by itself.

Tests of `techniques/compress_gradients.py`, `ops/gradient_codecs.py`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import test_local_steps as islands
import tiny
import torch
from tiny import t
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.launch.rank_pool import RankPool
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import DecoderConfig
from meshwright.ops.gradient_codecs import decode, encode
from meshwright.simulator.pricing import price
from meshwright.techniques.compress_gradients import PASSES

Array = npt.NDArray[np.float64]
STEPS = 4
CODECS: dict[str, dict[str, Any]] = {
    "int8": {"codec": "int8"},
    "bf16": {"codec": "bf16"},
    "sign": {"codec": "sign"},
    "topk": {"codec": "topk", "keep": 0.1},
    "powersgd": {"codec": "powersgd", "rank": 2},
}


def rounded(codec: str, shard: Array) -> Array:
    """What a shard is once it was coded and decoded."""
    if codec == "bf16":
        return torch.from_numpy(shard).bfloat16().double().numpy()
    found = np.empty_like(shard)
    for start in range(0, len(shard), 256):
        block = shard[start : start + 256]
        if codec == "int8":
            scale = np.float64(np.float32(np.abs(block).max()) / np.float32(127))
            found[start : start + 256] = np.clip(np.rint(block / (scale or 1.0)), -127, 127) * scale
        else:
            found[start : start + 256] = np.where(block >= 0, 1.0, -1.0) * np.float64(np.float32(np.abs(block).mean()))
    return found


class LayerSum:
    """One layer's sum over ranks, and what each of them remembers."""

    def __init__(self, names: list[str], shapes: list[tuple[int, ...]], ways: int, settings: dict[str, Any]):
        self.shapes, self.ways, self.settings = shapes, ways, settings
        self.sizes = [int(np.prod(shape)) for shape in shapes]
        self.shard = -(-sum(self.sizes) // ways)
        self.lost = np.zeros((ways, sum(self.sizes)))
        self.lost_of_sums = np.zeros((ways, self.shard))
        self.sketches = {}
        rank = settings.get("rank", 0)
        for at, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            if len(shape) == 2 and rank and rank * sum(shape) < shape[0] * shape[1]:
                drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                self.sketches[at] = torch.randn(shape[1], rank, generator=drawn).double().numpy()

    def __call__(self, gradients: list[Array]) -> Array:
        codec, size = self.settings["codec"], sum(self.sizes)
        given = np.stack(gradients) + self.lost
        if codec == "topk":
            sent = np.zeros_like(given)
            for row, out in zip(given, sent, strict=True):
                places = np.argsort(-np.abs(row))[: int(np.ceil(self.settings["keep"] * size))]
                out[places] = row[places]
            self.lost = given - sent
            return sent.sum(0)
        if codec == "powersgd":
            return self.by_factors(given)
        padded = np.zeros((self.ways, self.ways * self.shard))
        padded[:, :size] = given
        shards = padded.reshape(self.ways, self.ways, self.shard)
        sent = np.stack([[rounded(codec, shard) for shard in row] for row in shards])
        self.lost = given - sent.reshape(self.ways, -1)[:, :size]
        sums = sent.sum(0) + self.lost_of_sums
        told = np.stack([rounded(codec, each) for each in sums])
        self.lost_of_sums = sums - told
        return told.reshape(-1)[:size]

    def by_factors(self, given: Array) -> Array:
        total, start = given.sum(0), 0
        self.lost = np.zeros_like(given)
        for at, (shape, size) in enumerate(zip(self.shapes, self.sizes, strict=True)):
            part = slice(start, start := start + size)
            if at not in self.sketches:
                continue
            matrices = given[:, part].reshape(self.ways, *shape)
            basis = np.linalg.qr(sum(matrices) @ self.sketches[at])[0]
            own = [matrix.T @ basis for matrix in matrices]
            self.sketches[at] = sum(own)
            total[part] = (basis @ self.sketches[at].T).ravel()
            for rank, (matrix, factor) in enumerate(zip(matrices, own, strict=True)):
                self.lost[rank, part] = (matrix - basis @ factor.T).ravel()
        return total


def replayed(ways: int, settings: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and the last parameters of replicas whose sums are coded."""
    oracle = islands.Oracle(1, islands.ADAMW)
    (model,), (optimizer,) = oracle.models, oracle.optimizers
    named, losses = model.parameters, []
    layers: dict[str, list[str]] = {}
    for name in named:
        layers.setdefault(oracle.layer_of(name), []).append(name)
    sums = {
        layer: LayerSum(names, [tuple(named[name].shape) for name in names], ways, settings)
        for layer, names in layers.items()
    }
    for step in range(STEPS):
        gradients, total = [], 0.0
        for rank in range(ways):
            given = oracle.samples(step, rank, ways)
            loss = (model.losses(model.forward(given.inputs), given.targets) * given.weights).sum() / given.num_tokens
            found = torch.autograd.grad(loss, list(named.values()))
            gradients.append(dict(zip(named, (each.numpy() for each in found), strict=True)))
            total += float(loss.detach())
        losses.append(total)
        for layer, names in layers.items():
            whole = sums[layer]([np.concatenate([each[name].ravel() for name in names]) for each in gradients])
            cuts = np.cumsum([named[name].numel() for name in names])[:-1]
            for name, part in zip(names, np.split(whole, cuts), strict=True):
                named[name].grad = torch.from_numpy(part.copy()).view_as(named[name])
        norm = torch.cat([value.grad.flatten() for value in named.values()]).norm()
        for value in named.values():
            value.grad *= min(1.0, oracle.clip / float(norm))
        optimizer.step()
    return losses, named


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("name", CODECS)
def test_coded_sums_are_a_plain_loops_and_send_what_is_priced(
    ways: int, name: str, pool: RankPool, tmp_path: Path
) -> None:
    techniques = (t("replicate", size=ways), t("compress_gradients", **CODECS[name]))
    question = islands.asked(tmp_path, *techniques, steps=STEPS, traffic=True)
    answers = pool.run("local_jobs:trained_job", question, num_ranks=ways)
    losses, wanted = replayed(ways, CODECS[name])
    for answer in answers:
        assert answer["losses"] == pytest.approx(losses, rel=1e-9)
        assert answer["held"] == answers[0]["held"], "replicas differ"
    assert islands.close(islands.shared_model(tmp_path, STEPS), wanted)
    promised = Counter[tuple[str, int]]()
    plan = tiny.plan_of(*techniques)
    for each in price(tiny.profile_of(islands.MODEL), plan, sequence=tiny.SEQUENCE, element_bytes=8).collectives:
        promised[each.kind, int(each.bytes)] += each.repeat * STEPS
    for answer in answers:
        assert {(kind, size): count for kind, axis, size, count in answer["traffic"]} == promised


class CodedIslands(islands.Oracle):
    """Islands whose exchange is coded, layer by layer."""

    def __init__(self, count: int, settings: dict[str, Any]):
        super().__init__(count, islands.ADAMW)
        self.layers: dict[str, list[str]] = {}
        for name in self.shared:
            self.layers.setdefault(self.layer_of(name), []).append(name)
        self.sums = {
            layer: LayerSum(names, [tuple(self.shared[name].shape) for name in names], count, settings)
            for layer, names in self.layers.items()
        }

    @torch.no_grad()
    def meet(self, count: int, settings: dict[str, Any], *, is_last: bool) -> None:
        every, fragments = settings["every"], settings["fragments"]
        for at, (layer, names) in enumerate(self.layers.items()):
            turn = (count + at % fragments * every // fragments) % every
            for name in names:
                if name in self.under_way and (turn == settings["overlap"] or is_last):
                    self.use(name, self.under_way.pop(name), settings, settings["blend"])
            if turn and not is_last:
                continue
            apart = [
                np.concatenate([(self.shared[name] - model.parameters[name]).numpy().ravel() for name in names])
                for model in self.models
            ]
            whole = self.sums[layer](apart) / self.count
            for name, part in zip(names, np.split(whole, np.cumsum(self.sums[layer].sizes)[:-1]), strict=True):
                self.under_way[name] = torch.from_numpy(part.copy()).view_as(self.shared[name])
                if is_last or not settings["overlap"]:
                    self.use(name, self.under_way.pop(name), settings, settings["blend"])


@pytest.mark.parametrize("codec", ["int8", "powersgd"])
def test_streaming_islands_in_few_bits_are_a_plain_loops_and_send_what_is_priced(codec: str, pool: RankPool) -> None:
    steps = 8  # two whole periods
    techniques = (t("local_steps", size=2, **islands.STREAMING), t("compress_gradients", **CODECS[codec]))
    question = islands.asked("", *techniques, steps=steps, traffic=True)
    answers = pool.run("local_jobs:trained_job", question, num_ranks=2)
    oracle = CodedIslands(2, CODECS[codec])
    for step in range(steps):
        loss = oracle.step(step)
        oracle.meet(step + 1, islands.STREAMING, is_last=False)
        assert [answer["losses"][step] for answer in answers] == pytest.approx([loss] * 2, rel=1e-9)
    for answer, model in zip(answers, oracle.models, strict=True):
        held = {name: torch.tensor(value, dtype=torch.float64) for name, value in answer["held"].items()}
        assert islands.close(held, {name: value.flatten() for name, value in model.parameters.items()})
    promised, plan = Counter[tuple[str, int]](), tiny.plan_of(*techniques)
    for each in price(tiny.profile_of(islands.MODEL), plan, sequence=tiny.SEQUENCE, element_bytes=8).collectives:
        promised[each.kind, int(each.bytes)] += each.repeat * steps
    for answer in answers:
        assert {(kind, size): count for kind, axis, size, count in answer["traffic"]} == promised


@pytest.mark.parametrize(
    "techniques",
    [
        (t("local_steps", size=2, **islands.STREAMING), t("compress_gradients", codec="sign")),
        (t("replicate", size=2), t("compress_gradients", codec="powersgd", rank=2)),
    ],
    ids=["islands", "replicas"],
)
def test_what_was_lost_is_in_checkpoints(techniques: Any, pool: RankPool, tmp_path: Path) -> None:
    at, end = 3, 6
    question = islands.asked(tmp_path, *techniques, save_at=at, steps=end, last=end)
    whole = pool.run("local_jobs:trained_job", question, num_ranks=2)
    rest = {"first": at, "steps": end - at, "resume": str(tmp_path), "last": end}
    again = pool.run("local_jobs:trained_job", islands.asked("", *techniques, **rest), num_ranks=2)
    assert [each["held"] for each in again] == [each["held"] for each in whole]


class BytesTouched(TorchDispatchMode):
    """Read and written by every operator that is no view."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(each.alias_info for each in func._schema.arguments):
            tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
            self.total += sum(tensor.nbytes for tensor in tensors)
        return result


@pytest.mark.parametrize("codec", ["bf16", "int8", "sign"])
def test_coding_is_priced_by_the_memory_it_touches(codec: str) -> None:
    size, ways = 1 << 16, 2
    with BytesTouched() as touched:
        rows = torch.ones(ways, size // ways)
        coded = encode(codec, rows, 256)
    encoding, touched.total = touched.total, 0
    with touched:
        decode(codec, coded, size // ways, 256, torch.float32)
    # All shards are coded, decoded for what was lost, as they arrive and as sums; the own sum is coded and decoded.
    counted = encoding + 3 * touched.total + (encoding + touched.total) / ways
    # Joining, padding, feedback, differences and copies are some further passes.
    assert counted / (4 * size) < PASSES[codec] < counted / (4 * size) + 20


@pytest.mark.parametrize("name", CODECS)
def test_with_feedback_what_was_sent_adds_up_to_what_was_given(name: str, pool: RankPool) -> None:
    question = {"settings": CODECS[name], "rounds": 20}
    for found in pool.run("local_jobs:repeated_sum_job", question, num_ranks=2):
        assert found["with"] < 0.35 * found["without"]


def test_a_streaming_meeting_in_int8_is_a_hundredth_of_an_all_reduce() -> None:
    profile = decoder_profile(DecoderConfig(**tiny.LLAMA | {"hidden_size": 256, "ffn_size": 512}), "small")

    def sent(*techniques: Any) -> float:
        tasks = price(profile, tiny.plan_of(*techniques), sequence=tiny.SEQUENCE).collectives
        # An all_reduce is a reduce_scatter and an all_gather.
        return sum(each.repeat * each.bytes * (2 if each.kind == "all_reduce" else 1) for each in tasks)

    streaming = t("local_steps", size=2, every=32, fragments=4, overlap=2, blend=0.5)
    coded = sent(streaming, t("compress_gradients", codec="int8"))
    assert 0 < coded <= sent(t("replicate", size=2)) / 100


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        ((t("compress_gradients"), tiny.TENSOR), "no replicas or islands"),
        ((t("compress_gradients"), tiny.SHARD3), "shard sums gradients by itself"),
        ((t("compress_gradients"), tiny.SHARD3, tiny.REPLICATE), "shard sums gradients by itself"),
        ((t("compress_gradients", keep=0.0), tiny.REPLICATE), "keep is 0"),
        ((t("compress_gradients", rank=0), tiny.REPLICATE), "rank is 0"),
        ((t("compress_gradients", codec="powersgd", rank=99), tiny.REPLICATE), "is larger than its factors of rank 99"),
        ((t("compress_gradients"), tiny.REPLICATE, t("precision", dtype="fp16")), "a factor that changes"),
        ((t("compress_gradients"), tiny.REPLICATE, t("pipeline", size=2, schedule="async")), "overlaps it"),
    ],
)
def test_what_cannot_be_compressed_is_refused(techniques: Any, words: str) -> None:
    problems = tiny.plan_of(*techniques).check(tiny.profile_of(islands.MODEL))
    assert [each for each in problems if words in str(each)], problems
    assert all(each.fix for each in problems)
