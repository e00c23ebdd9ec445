"""Three at a time: rows in which every three settings of techniques, and every two with a kind of model, come together.

A row is a model and a plan on at most eight ranks that `check` accepts. A triple that no row can hold is one that
`check` refuses by itself, with a reason. The generator is greedy: a row starts from a triple that has not been seen
yet, in an order that a seed decides, and takes of every other technique the setting that adds most triples.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, product
from typing import Any

import tiny
from test_models import MODELS, foreign
from tiny import t

from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Technique
from meshwright.run.model import describe
from meshwright.run.run_file import ModelSection

BATCH = 16
STEPS = 2
MOST_RANKS = 8
SEED = 6

Setting = tuple[str, str]
"""(technique, which of its settings), or ("model", its name)."""
Row = frozenset[Setting]

KINDS: dict[str, dict[str, Any]] = {
    "qwen": tiny.QWEN,
    "gpt": tiny.GPT,
    "moe": tiny.MOE,
    "hf llama": foreign("deep_llama"),
    **{name: MODELS[name] for name in ("vit", "vgg", "resnet", "dlrm", "by_hand", "convolutions")},
}
SETTINGS: dict[str, dict[str, Technique]] = {
    "replicate": {"2": tiny.REPLICATE},
    "shard": {"1": tiny.SHARD1, "2": tiny.SHARD2, "3": tiny.SHARD3},
    "tensor": {
        "whole": tiny.TENSOR,
        "sequence": tiny.SEQUENCED,
        "overlap": t("tensor", size=2, sequence=True, overlap=2),
    },
    "pipeline": {"1f1b": tiny.PIPELINE, "interleaved": tiny.INTERLEAVED, "zbv": tiny.ZBV},
    "context": {"ring": tiny.RING, "ulysses": tiny.ULYSSES},
    "expert": {"2": tiny.EXPERT},
    "rows": {"2": tiny.ROWS},
    "recompute": {
        "full": tiny.RECOMPUTE,
        "selective": t("recompute", layers="none", selective="first 9"),
        "slots": t("recompute", slots=1),
    },
    "chunked_loss": {"4": tiny.CHUNKED},
    "compile": {"aot_eager": tiny.COMPILE},
    "precision": {"bf16": tiny.BF16},
}


@cache
def profile_of(kind: str) -> Profile:
    config = KINDS[kind]
    if "section" not in config:
        return tiny.profile_of(config)
    return describe(decode(ModelSection, config["section"], "model"), tiny.SEQUENCE).profile


def plan_of(row: Row) -> Plan:
    """With two microbatches, but for models whose batch statistics need one."""
    kind = dict(row)["model"]
    profile = profile_of(kind)
    techniques = tuple(_technique(*each, profile.num_blocks) for each in sorted(row) if each[0] != "model")
    whole = Plan(techniques=techniques, batch=BATCH, microbatch=1)
    share = max(BATCH // whole.num_replicas, 1)
    microbatch = share if "samples" in profile.uncut else max(share // 2, 1)
    return Plan(techniques=techniques, batch=BATCH, microbatch=microbatch)


def _technique(name: str, which: str, num_blocks: int) -> Technique:
    if (name, which) == ("recompute", "selective"):
        return t("recompute", layers="none", selective=num_blocks)
    return SETTINGS[name][which]


@cache
def refusals(row: Row) -> tuple[str, ...]:
    """Why a row is no plan for its model; empty where it is one."""
    plan = plan_of(row)
    profile = profile_of(dict(row)["model"])
    problems = plan.check(profile)
    if not problems and profile.counts == "tokens":
        problems = plan.check_sequence(tiny.SEQUENCE)
    if not problems and plan.num_ranks > MOST_RANKS:
        return (f"{plan.num_ranks} ranks",)
    return tuple(map(str, problems))


def all_triples() -> list[Row]:
    """Three settings of different techniques, or two and a kind of model."""
    levels: dict[str, list[Setting]] = {name: [(name, which) for which in each] for name, each in SETTINGS.items()}
    levels["model"] = [("model", kind) for kind in KINDS]
    return [frozenset(each) for names in combinations(levels, 3) for each in product(*(levels[name] for name in names))]


def triples_in(row: Row) -> Iterator[Row]:
    """Those that a row shows: in bf16 numbers are compared roughly, so only the triples that are about it."""
    about = [each for each in row if each[0] == "precision"]
    return (frozenset(each) for each in combinations(sorted(row), 3) if all(one in each for one in about))


@dataclass
class Covering:
    rows: list[Row] = field(default_factory=list)
    refused: dict[Row, tuple[str, ...]] = field(default_factory=dict)
    """Triples that `check` refuses, for every model where a triple names none."""


def covering(seed: int = SEED, most_rows: int | None = None) -> Covering:
    """The whole array, or its first rows."""
    order = all_triples()
    generator = random.Random(seed)
    generator.shuffle(order)
    left, made = dict.fromkeys(order), Covering()
    kinds = [("model", kind) for kind in KINDS]
    # Bf16 that a row takes on may leave the triple that it started from unseen: those come again, without it.
    exact = [name for name in SETTINGS if name != "precision"]
    for triple, names in [*((each, list(SETTINGS)) for each in order), *((each, exact) for each in order)]:
        if most_rows is not None and len(made.rows) >= most_rows:
            break
        if triple not in left:
            continue
        starts = [triple] if any(name == "model" for name, _ in triple) else [triple | {kind} for kind in kinds]
        accepted = [start for start in starts if not refusals(start)]
        if not accepted:
            del left[triple]
            made.refused[triple] = refusals(starts[0])
            continue
        row = _extended(max(accepted, key=lambda start: _gain(start, left)), names, left, generator)
        made.rows.append(row)
        for each in triples_in(row):
            left.pop(each, None)
    return made


def _gain(row: Row, left: dict[Row, None]) -> int:
    return sum(each in left for each in triples_in(row))


def _extended(row: Row, names: list[str], left: dict[Row, None], generator: random.Random) -> Row:
    names = [name for name in names if name not in dict(row)]
    generator.shuffle(names)
    for name in names:
        longer = [row | {(name, which)} for which in SETTINGS[name]]
        longer = [each for each in longer if _gain(each, left) > _gain(row, left) and not refusals(each)]
        row = max(longer, key=lambda each: _gain(each, left), default=row)
    return row


Job = Callable[..., Any]
"""(job, arguments, number of ranks) -> an answer of each rank."""
References = Callable[..., str]

ROUNDED = {"first loss": 2**-7, "first gradient": 2**-5, "first gradient norm": 2**-5}
"""In bf16, beside one device in bf16: other sums are rounded elsewhere. What is exact is shown without it."""


def faults(row: Row, run: Job, references: References) -> list[str]:
    """Where a row departs from one device, or sends and holds something else than its price says."""
    plan, config = plan_of(row), KINDS[dict(row)["model"]]
    like = [json.loads(tiny.plan_of(each).to_json())["techniques"][0] for each in plan.techniques if each == tiny.BF16]
    question = {"config": config, "optimizer": tiny.ADAMW, "sequence": tiny.SEQUENCE, "steps": STEPS}
    question["dtype"] = "float32" if like else "float64"
    reference = references(**question, batch=BATCH, techniques=like)
    arguments = {**question, "plan": json.loads(plan.to_json()), "reference": reference, "prices": True}
    answers = run("rank_jobs:plan_job", arguments, plan.num_ranks, timeout_seconds=180)
    bounds = ROUNDED if like else tiny.bounds(tiny.EXACT)
    # A table's rows do not divide equally; what is priced is the rank with most.
    priced = [answer for answer in answers if answer["holds_largest"] or "rows" not in dict(row)]
    return [*tiny.departures(answers, bounds), *tiny.price_differences(priced)]
