"""Faults put into the package one at a time: does `mw check` notice each of them?

Run: python -m benchmarks.mutants            all, about five minutes on two idle cores (`make mutants`)
     python -m benchmarks.mutants NAME ...   some
     python -m benchmarks.mutants --write    and put the table into docs/check.md

A mutant replaces a function or a value of the package in every rank, and on the one device too, as a change of the
source would. It is killed if the check of its case fails, and survives if the check passes; a case must pass without a
mutant first. The reference (`verify/reference.py`) is not mutated: it is what the others are measured by.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from meshwright.core.codec import decode
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.launch.rank_pool import RankPool
from meshwright.run.run_file import RunConfig
from meshwright.verify import check as checking

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "check.md"
CHOSEN = "MW_MUTANT_FILE"
"""Names the file that holds the name of the mutant that ranks are to be."""
TIMEOUT_SECONDS = 120

Swap = Callable[[str, str, Callable[[Any], Any]], None]
"""(module or module:class, attribute, old value -> new value)."""
MUTANTS: dict[str, tuple[str, Callable[[Swap], None]]] = {}
"""Name -> the case that must kill it, and what it changes."""


def mutant(case: str) -> Callable[[Callable[[Swap], None]], Callable[[Swap], None]]:
    def add(change: Callable[[Swap], None]) -> Callable[[Swap], None]:
        MUTANTS[change.__name__.replace("_", " ")] = (case, change)
        return change

    return add


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """The package with one fault; without any, for an empty name."""
    undo: list[tuple[Any, str, Any]] = []

    def swap(place: str, attribute: str, change: Callable[[Any], Any]) -> None:
        module, _, kind = place.partition(":")
        owner = importlib.import_module(f"meshwright.{module}")
        owner = getattr(owner, kind) if kind else owner
        old = owner[attribute] if isinstance(owner, dict) else vars(owner)[attribute]
        undo.append((owner, attribute, old))
        is_static = isinstance(old, staticmethod)
        new = change(old.__func__ if is_static else old)
        put(owner, attribute, staticmethod(new) if is_static else new)

    def put(owner: Any, attribute: str, value: Any) -> None:
        if isinstance(owner, dict):
            owner[attribute] = value
        else:
            setattr(owner, attribute, value)

    try:
        if name:
            MUTANTS[name][1](swap)
        yield
    finally:
        for each in reversed(undo):
            put(*each)


# Jobs of `verify/check_ranks.py`, each under the mutant of the moment.


def reference_job(**arguments: Any) -> Any:
    return _under_the_mutant("reference_job", arguments)


def parity_job(**arguments: Any) -> Any:
    return _under_the_mutant("parity_job", arguments)


def _under_the_mutant(job: str, arguments: dict[str, Any]) -> Any:
    with mutated(Path(os.environ[CHOSEN]).read_text(encoding="utf-8")):
        return getattr(importlib.import_module("meshwright.verify.check_ranks"), job)(**arguments)


# The loop and the loss


@mutant("replicate")
def microbatches_after_the_second_dropped(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def split(self: Any, size: int) -> Any:
            parts = old(self, size)
            return [(i, t, w if at < 2 else w * 0) for at, (i, t, w) in enumerate(parts)]

        return split

    swap("runtime.loop:Samples", "split", change)


@mutant("replicate")
def loss_divisor_doubled(swap: Swap) -> None:
    def change(old: Any) -> Any:
        return lambda self, s, lr, **more: old(self, replace(s, num_tokens=2 * s.num_tokens), lr, **more)

    swap("runtime.loop:Loop", "step", change)


@mutant("replicate")
def gradients_kept_from_the_step_before(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def begin_step(self: Any) -> None:
            kept = [bucket.flat.clone() for bucket in self.buckets]
            old(self)
            for bucket, gradients in zip(self.buckets, kept, strict=True):
                bucket.flat.copy_(gradients)

        return begin_step

    swap("ops.gradient_exchange:Buckets", "begin_step", change)


@mutant("documents")
def weights_of_targets_ignored(swap: Swap) -> None:
    def change(old: Any) -> Any:
        return lambda head, x, targets, weights: old(head, x, targets, weights * 0 + 1)

    swap("zoo.decoder", "score", change)


@mutant("replicate")
def gradient_of_the_loss_one_percent_off(swap: Swap) -> None:
    swap("ops.cross_entropy:HeadLoss", "backward", lambda old: lambda ctx, grad: old(ctx, grad * 1.01))


@mutant("local")
def last_chunk_of_the_loss_dropped(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def score(head: Any, x: Any, targets: Any, weights: Any) -> Any:
            kept = weights.clone()
            if head.num_chunks > 1:
                kept[:, -(weights.shape[1] // head.num_chunks) :] = 0
            return old(head, x, targets, kept)

        return score

    swap("zoo.decoder", "score", change)


@mutant("replicate")
def every_rank_gets_the_first_rows(swap: Swap) -> None:
    def change(old: Any) -> Any:
        return lambda batch, part, num_parts, shares=(): old(batch, 0, num_parts, shares)

    swap("data.dataset", "part_rows", change)


# Rates, clipping, optimizers


@mutant("replicate")
def rates_one_step_ahead(swap: Swap) -> None:
    swap("optimizers.optimizer_config:OptimizerConfig", "lr_at", lambda old: lambda self, s, n: old(self, s + 1, n))


@mutant("replicate")
def cosine_is_a_straight_line(swap: Swap) -> None:
    swap("optimizers.optimizer_config:_FALLS", "cosine", lambda old: lambda progress: 1 - progress)


@mutant("replicate")
def warm_up_ignored(swap: Swap) -> None:
    swap("optimizers.optimizer_config:OptimizerConfig", "lr_at", lambda old: lambda self, s, n: old(
        replace(self, warmup=0), s, n
    ))  # fmt: skip


@mutant("replicate")
def no_clipping(swap: Swap) -> None:
    swap("optimizers.update:Optimizer", "update", lambda old: lambda self, lr, norm: old(self, lr, 0.0))


@mutant("tensor")
def norm_counts_replicas_of_a_piece(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def squared_norm(self: Any) -> Any:
            from meshwright.optimizers.rule import squares

            return squares([p.value.grad for p in self.pieces], self.build.mesh.device).sum()

        return squared_norm

    swap("optimizers.update:Optimizer", "squared_norm", change)


@mutant("replicate")
def moments_lost_from_step_three(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def update(self: Any, *given: Any) -> None:
            if self.num_steps >= 2:
                for _, _, value, _ in self.state():
                    value.zero_()
            old(self, *given)

        return update

    swap("optimizers.update:Optimizer", "update", change)


@mutant("replicate")
def betas_swapped(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def init(self: Any, config: Any, *rest: Any) -> None:
            old(self, replace(config, beta1=config.beta2, beta2=config.beta1), *rest)

        return init

    swap("optimizers.rules.adamw:AdamW", "__init__", change)


@mutant("replicate")
def no_bias_correction(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def step(self: Any, lr: float, count: int) -> None:
            self.set_num_steps(10_000)
            old(self, lr, count)

        return step

    swap("optimizers.rules.adamw:AdamW", "step", change)


@mutant("replicate")
def norms_decay(swap: Swap) -> None:
    def change(old: Any) -> Any:
        return lambda config, build, name, value: replace(
            old(config, build, name, value), weight_decay=config.weight_decay
        )

    swap("optimizers.update", "_piece", change)


@mutant("replicate")
def groups_ignored(swap: Swap) -> None:
    def change(old: Any) -> Any:
        return lambda config, build, name, value: replace(old(config, build, name, value), lr_scale=1.0)

    swap("optimizers.update", "_piece", change)


@mutant("lamb")
def trust_of_a_piece_for_the_whole(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def call(self: Any, values: Any) -> Any:
            import torch

            old(self, values)
            return torch.cat([value.flatten().double() for value in values]).split(self.lengths)

        return call

    swap("optimizers.whole_parameters:Sums", "__call__", change)


@mutant("muon")
def one_turn_of_newton_schulz_too_few(swap: Swap) -> None:
    swap("optimizers.rules.muon", "TURNS", lambda old: 4)


# Layers


@mutant("documents")
def documents_see_each_other(swap: Swap) -> None:
    def change(old: Any) -> Any:
        return lambda sequence, window, documents, *others: old(sequence, window, None, *others)

    swap("zoo.decoder", "attention_mask", change)


@mutant("learned")
def positions_go_on_over_documents(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def places(documents: Any) -> Any:
            import torch

            return torch.arange(documents.shape[1]).expand(documents.shape)

        return places

    swap("zoo.decoder", "places_in_documents", change)


@mutant("tensor")
def rotation_not_undone_in_backward(swap: Swap) -> None:
    swap("zoo.layers:Rotate", "backward", lambda old: lambda ctx, grad: (grad, None, None))


@mutant("tensor")
def a_term_of_the_norms_backward_missing(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def backward(ctx: Any, grad: Any) -> Any:
            _, weight, inverse = ctx.saved_tensors
            return (grad * weight) * inverse, old(ctx, grad)[1], None

        return backward

    swap("zoo.layers:RMSNormFunction", "backward", change)


# Techniques


@mutant("replicate")
def a_bucket_is_not_summed(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def finish(self: Any) -> None:
            small = [bucket for bucket in self.buckets if len(bucket.parameters) < 4]
            mine = [bucket.flat.clone() for bucket in small]
            old(self)
            for bucket, gradients in zip(small, mine, strict=True):
                bucket.flat.copy_(gradients)

        return finish

    swap("ops.gradient_exchange:Buckets", "finish", change)


@mutant("shard")
def gradients_divided_by_the_shards(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def step(self: Any, samples: Any, lr: float, **more: Any) -> Any:
            self.build.loss_scale = 1.0
            return old(self, samples, lr, **more)

        return step

    swap("runtime.loop:Loop", "step", change)


@mutant("tensor")
def entries_of_regions_do_not_sum(swap: Swap) -> None:
    swap("ops.tensor_parallel:_Border", "backward", lambda old: lambda ctx, grad: (
        (old(ctx, grad)[0] if ctx.sequence or ctx.is_exit else grad), None, None, None
    ))  # fmt: skip


@mutant("sequence")
def parts_of_the_sequence_in_another_order(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def gather(x: Any, group: Any) -> Any:
            whole = old(x, group)
            return whole.roll(x.shape[1], dims=1)

        return gather

    swap("ops.tensor_parallel", "_gather", change)


@mutant("tensor")
def split_vocabulary_shifted_by_a_word(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def losses(logits: Any, targets: Any, scales: Any, words: Any) -> Any:
            return old(logits, targets, scales, words and words._replace(first=words.first + (words.first > 0)))

        return losses

    swap("ops.cross_entropy", "_losses", change)


@mutant("sequence")
def owed_sums_not_paid(swap: Swap) -> None:
    swap("ops.gradient_exchange:LateSums", "finish", lambda old: lambda self: None)


@mutant("pipeline")
def tied_embedding_not_summed(swap: Swap) -> None:
    def change(old: Any) -> Any:
        return lambda self, technique, name, group, is_copy=False: old(self, technique, name, None, is_copy=is_copy)

    swap("runtime.build:RankBuild", "sum_late", change)


@mutant("pipeline")
def gradients_to_another_microbatch(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def transfer(self: Any, batch: Any, action: Any, key: Any) -> None:
            old(self, batch, action, key)
            if action.kind == "receive_backward" and self.gradients:
                first = next(iter(self.gradients))
                self.gradients[key], self.gradients[first] = self.gradients[first], self.gradients[key].roll(1, 1)

        return transfer

    swap("runtime.loop:Interpreter", "_transfer", change)


@mutant("ring")
def pieces_of_the_ring_merged_unweighted(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def merge(out: Any, lse: Any, more: Any, more_lse: Any, *, is_first: bool) -> None:
            old(out, lse, more, more_lse if is_first else more_lse - 0.01, is_first=is_first)

        return merge

    swap("ops.context_parallel", "_merge", change)


@mutant("ring")
def the_ring_sees_the_future(swap: Swap) -> None:
    def change(old: Any) -> Any:
        return lambda index, other, chunk: old(index, other, chunk)._replace(is_causal=False)

    swap("ops.context_parallel", "piece_of", change)


@mutant("ring")
def gradients_of_keys_stay_on_the_way(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def backward(self: Any, grad: Any, query: Any, both: Any, *rest: Any) -> Any:
            into_query, into_both = old(self, grad, query, both, *rest)
            return into_query, into_both * 0.5

        return backward

    swap("ops.context_parallel:Ring", "backward", change)


@mutant("ulysses")
def heads_of_ulysses_come_back_in_another_order(swap: Swap) -> None:
    def change(old: Any) -> Any:
        return lambda self, *given: old(self, *given).flip(1)

    swap("ops.context_parallel:Ulysses", "__call__", change)


@mutant("experts")
def rows_of_experts_not_sorted(swap: Swap) -> None:
    swap("ops.routing", "_transposed", lambda old: lambda rows, lengths: rows)


@mutant("experts")
def balancing_loss_not_scaled(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def backward(ctx: Any, grad: Any) -> Any:
            import torch

            return grad, torch.ones((), dtype=ctx.dtype), None

        return backward

    swap("ops.routing:AttachLoss", "backward", change)


@mutant("batch norm")
def running_statistics_keep_too_little(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def remember(self: Any, mean: Any, variance: Any, count: int) -> None:
            self.momentum, kept = 1 - self.momentum, self.momentum
            old(self, mean, variance, count)
            self.momentum = kept

        return remember

    swap("ops.batch_norm:BatchNorm", "remember", change)


@mutant("batch norm")
def running_variance_biased(swap: Swap) -> None:
    swap("ops.batch_norm:BatchNorm", "remember", lambda old: lambda self, mean, variance, count: old(
        self, mean, variance, 10**12
    ))  # fmt: skip


@mutant("batch norm")
def statistics_of_one_rank(swap: Swap) -> None:
    swap("ops.batch_norm:Normalize", "forward", lambda old: lambda ctx, *given: old(ctx, *given[:-1], ()))


@mutant("dropout")
def recomputation_draws_other_numbers(swap: Swap) -> None:
    def change(old: Any) -> Any:
        return lambda *given, **more: old(*given, preserve_rng_state=False, **more)

    swap("ops.recompute", "checkpoint", change)


@mutant("bf16")
def gradients_in_bf16_three_percent_too_large(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def step(self: Any, samples: Any, lr: float, **more: Any) -> Any:
            import torch

            build = self.build
            kept = build.loss_scale
            build.loss_scale = kept * (1.03 if build.compute_dtype == torch.bfloat16 else 1.0)
            try:
                return old(self, samples, lr, **more)
            finally:
                build.loss_scale = kept

        return step

    swap("runtime.loop:Loop", "step", change)


@mutant("bf16")
def masters_rounded_to_bf16(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def update(self: Any, *given: Any) -> None:
            import torch

            old(self, *given)
            if self.build.compute_dtype == torch.bfloat16:
                for piece in self.pieces:
                    piece.value.copy_(piece.value.bfloat16())

        return update

    swap("optimizers.update:Optimizer", "update", change)


@mutant("replicate")
def the_price_forgets_a_message(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def price(self: Any, work: Any) -> Any:
            made = old(self, work)
            return replace(made, tasks=tuple(t for t in made.tasks if getattr(t, "origin", "") != self.name))

        return price

    swap("techniques.replicate:Replicate", "price", change)


@mutant("local")
def recomputed_blocks_hand_no_gradient_back(swap: Swap) -> None:
    def change(old: Any) -> Any:
        def recomputed(forward: Any) -> Any:
            inner = old(forward)
            return lambda x, *rest: inner(x.detach().requires_grad_(x.requires_grad), *rest)

        return recomputed

    swap("ops.recompute", "recomputed", change)


# Cases


@dataclass(frozen=True, kw_only=True)
class Case:
    techniques: tuple[dict[str, Any], ...]
    model: dict[str, Any]
    data: dict[str, Any]
    optimizer: dict[str, Any]
    microbatch: int = 1
    batch: int = 8

    def config(self, folder: Path) -> RunConfig:
        train = {"batch": self.batch, "steps": 12, "optimizer": self.optimizer}
        value = {"model": self.model, "data": self.data, "train": train, "run": {"folder": str(folder / "run")}}
        return decode(RunConfig, value, "")

    def plan(self) -> Plan:
        made = tuple(
            technique_named(each["name"])(**{k: v for k, v in each.items() if k != "name"}) for each in self.techniques
        )
        return Plan(techniques=made, batch=self.batch, microbatch=self.microbatch)


SIZES = {
    "num_layers": 2, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 24, "max_sequence": 32,
    "init_std": 0.2,
}  # fmt: skip
LEARNED = {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True, "qkv_bias": True, "num_kv_heads": 4}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 12, "balance": 0.1}
ADAMW = {"lr": 1e-2, "warmup": 2, "clip": 0.5, "groups": [{"match": "head.*", "lr_scale": 0.5}]}


def cases(folder: Path) -> dict[str, Case]:
    """Small models and plans, by name; their data are written to the folder."""
    import numpy as np

    text = folder / "corpus.jsonl"  # with letters of two bytes: both halves of a vocabulary of bytes have targets
    lines = [json.dumps({"prompt": f"{i} plus {i % 7} is", "text": f" {i + i % 7}, très bien."}) for i in range(400)]
    text.write_text("\n".join(lines), encoding="utf-8")
    generator = np.random.default_rng(0)
    images = generator.integers(0, 255, (64, 16, 16), dtype=np.uint8)
    np.savez(folder / "images.npz", images=images, labels=np.arange(64) % 10)
    tokens = {"train": str(text), "sequence": 16, "held_out_fraction": 0.0}
    packed = {**tokens, "packing": "documents"}
    shown = {"train": str(folder / "images.npz"), "held_out_fraction": 0.0}

    def decoder(*techniques: dict[str, Any], data: Any = tokens, optimizer: Any = ADAMW, **change: Any) -> Case:
        model = {"name": "byte-tiny", "change": {**SIZES, **change}}
        return Case(techniques=techniques, model=model, data=data, optimizer=optimizer)

    two: dict[str, Any] = {"size": 2}
    lamb, muon = {"name": "lamb", "lr": 1e-2}, {"name": "muon", "lr": 1e-2}
    dropout = {"factory": "benchmarks.mutants:with_dropout"}
    replicated = {"name": "replicate", **two}
    return {
        "replicate": decoder(replicated),
        "documents": decoder(replicated, data=packed),
        "learned": decoder(replicated, data=packed, **LEARNED),
        "local": decoder({"name": "chunked_loss", "chunks": 4}, {"name": "recompute"}),
        "shard": decoder({"name": "shard", **two}),
        "lamb": decoder({"name": "shard", **two}, optimizer=lamb),
        "muon": decoder({"name": "shard", **two}, optimizer=muon),
        "tensor": decoder({"name": "tensor", **two}),
        "sequence": decoder({"name": "tensor", **two, "sequence": True}),
        "pipeline": decoder({"name": "pipeline", **two}, tied=True),
        "ring": decoder({"name": "context", **two, "kind": "ring"}),
        "ulysses": decoder({"name": "context", **two, "kind": "ulysses"}),
        "experts": decoder({"name": "expert", **two}, **EXPERTS),
        "bf16": decoder(replicated, {"name": "precision"}),
        "batch norm": Case(
            techniques=(replicated,), model={"name": "resnet-tiny"}, data=shown, optimizer=ADAMW | {"groups": []},
            microbatch=8, batch=16,
        ),
        "dropout": Case(
            techniques=(replicated, {"name": "recompute"}), model=dropout, data=tokens,
            optimizer=ADAMW | {"groups": []},
        ),
    }  # fmt: skip


def with_dropout() -> Any:
    """A module of somebody else's, which drops by a function."""
    import torch.nn.functional as F
    from torch import Tensor, nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            inner = F.dropout(F.gelu(self.up(self.norm(x))), 0.2, self.training)
            return x + self.down(inner)

    return nn.Sequential(nn.Embedding(256, 16), Layer(), Layer(), nn.Linear(16, 256))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    mutant: str
    case: str
    killed_by: str
    """Empty: it survived."""
    seconds: float


class _Hurried(RankPool):
    """A mutant may hang."""

    def run(self, function: str, arguments: Any, num_ranks: int, timeout_seconds: float = 0) -> list[Any]:
        return super().run(function, arguments, num_ranks, TIMEOUT_SECONDS)


def hunt(names: list[str], report: Callable[[Outcome], None]) -> list[Outcome]:
    """Check every mutant's case, without it first."""
    outcomes = []
    jobs, checking._JOBS = checking._JOBS, "benchmarks.mutants"
    with tempfile.TemporaryDirectory(prefix="mw-mutants-") as made:
        folder = Path(made)
        os.environ[CHOSEN] = str(folder / "mutant")
        known = cases(folder)
        try:
            with _Hurried(2) as pool:
                for case in dict.fromkeys(MUTANTS[name][0] for name in names):
                    healthy = attempt("", case, known[case], folder, pool)
                    if healthy.killed_by:
                        raise SystemExit(f"{case} fails without a mutant: {healthy.killed_by}")
                for name in names:
                    outcomes.append(attempt(name, MUTANTS[name][0], known[MUTANTS[name][0]], folder, pool))
                    report(outcomes[-1])
        finally:
            checking._JOBS = jobs
    return outcomes


def attempt(name: str, case: str, given: Case, folder: Path, pool: RankPool) -> Outcome:
    Path(os.environ[CHOSEN]).write_text(name, encoding="utf-8")
    start = time.monotonic()
    try:
        checked = checking.check(given.config(folder), given.plan(), pool=pool)
    except MeshwrightError as error:
        killed_by = "stopped: " + str(error).strip().splitlines()[0][:60]
    else:
        killed_by = _first(checked)
    return Outcome(mutant=name, case=case, killed_by=killed_by, seconds=time.monotonic() - start)


def _first(checked: Any) -> str:
    """What the check says first."""
    for part in checked.parts:
        if part.departures:
            found = part.departures[0]
            return f"{found['quantity']} of {found['layer']}, step {found['step']}: {found['error']:.0e}"
    return next((line for part in checked.parts for line in part.traffic[:1]), "")


def table(outcomes: list[Outcome]) -> str:
    lines = ["| mutant | case | killed by | seconds |", "|---|---|---|---|"]
    lines += [
        f"| {each.mutant} | {each.case} | {each.killed_by or '**survived**'} | {each.seconds:.1f} |"
        for each in outcomes
    ]
    return "\n".join(lines)


def write_page(outcomes: list[Outcome]) -> None:
    begin, end = "<!-- mutants -->\n", "<!-- end of mutants -->\n"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    killed = sum(bool(each.killed_by) for each in outcomes)
    text = f"{date.today()}: {killed} of {len(outcomes)} mutants killed.\n\n{table(outcomes)}\n"
    PAGE.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants; all, if none is given")
    parser.add_argument("--write", action="store_true", help="write the table into docs/check.md")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in MUTANTS]
    if unknown:
        parser.error(f"no mutant is called {unknown[0]!r}. There are: {', '.join(MUTANTS)}.")
    sys.path.append(str(ROOT))
    names = given.names or list(MUTANTS)
    outcomes = hunt(names, lambda each: print(
        f"{'killed  ' if each.killed_by else 'SURVIVED'} {each.seconds:5.1f} s  {each.mutant}: {each.killed_by}",
        flush=True,
    ))  # fmt: skip
    survived = [each.mutant for each in outcomes if not each.killed_by]
    print(f"{len(outcomes) - len(survived)} of {len(outcomes)} mutants killed")
    if given.write:
        write_page(outcomes)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
