"""Every pair of techniques: `check` objects, or the pair trains one device's model and moves what was priced.

What is found is the compatibility matrix of the docs. `pytest tests/parity/test_pairs.py --write-matrix` writes it.

Tests of `techniques/chunked_loss.py`, `techniques/compile.py`, `techniques/compress_activations.py`,
`techniques/lowbit_optimizer.py`, `techniques/offload_states.py`, `techniques/precision.py`, `techniques/replicate.py`,
`techniques/stream_weights.py`, `techniques/tensor.py`, `techniques/update_in_backward.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import tiny
from tiny import t

from meshwright.core.plan import Plan
from meshwright.core.technique import Technique, technique_names
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import DecoderConfig

Run = Callable[..., list[dict[str, Any]]]
MATRIX = Path(__file__).parents[2] / "docs" / "techniques" / "matrix.md"
MODEL = tiny.QWEN | {"num_layers": 2}
NAMES = technique_names()
PAIRS = (*combinations(NAMES, 2), *((name, name) for name in NAMES))
"""A technique with itself: alone."""

SETTINGS: dict[str, tuple[Technique, ...]] = {
    "chunked_loss": (tiny.CHUNKED,),
    "compile": (tiny.COMPILE,),
    "compress_activations": (tiny.COMPRESS,),
    "compress_gradients": (tiny.KEEP_ALL,),
    "context": (tiny.RING,),
    "expert": (tiny.EXPERT,),
    "gossip": (tiny.PEERS,),
    "local_loss": (tiny.UNCUT,),
    "local_steps": (tiny.ISLANDS,),
    "lowbit_optimizer": (tiny.LOW_BIT,),
    "multi_rate": (tiny.EVERY_STEP,),
    "offload_activations": (tiny.OFFLOAD,),
    "offload_states": (tiny.ON_HOST, tiny.ON_HOST_AHEAD, tiny.ON_DISK),
    "parameter_server": (tiny.SERVED,),
    "pipeline": (tiny.PIPELINE, tiny.INTERLEAVED),
    "precision": (tiny.BF16,),
    "recompute": (tiny.RECOMPUTE_SOME,),
    "replicate": (tiny.REPLICATE,),
    "rows": (tiny.ROWS,),
    "shard": (tiny.SHARD3, tiny.SHARD1),
    "stream_weights": (tiny.STREAMED,),
    "tensor": (tiny.SEQUENCED, tiny.TENSOR),
    "update_in_backward": (tiny.IN_BACKWARD,),
}

BESIDE: dict[tuple[str, str], tuple[tuple[Technique, ...], ...]] = {
    ("compress_activations", "offload_activations"): ((tiny.COMPRESS_ONE, t("offload_activations", layers="first 1")),),
    ("compress_activations", "recompute"): ((tiny.COMPRESS_ONE, tiny.RECOMPUTE_ONE),),
    ("offload_activations", "recompute"): (
        (tiny.OFFLOAD_ONE, tiny.RECOMPUTE_ONE),
        (tiny.OFFLOAD_INPUTS, tiny.RECOMPUTE_SOME),
    ),
}
"""Other settings of those that both name blocks: each block follows one of them."""


APPROXIMATE = (tiny.ISLANDS, tiny.PEERS, tiny.SERVED, tiny.EVERY_STEP, tiny.UNCUT)
"""Approximate techniques in settings that give one device's losses and parameters, with plain SGD for islands."""


def num_microbatches(plan: Plan) -> int:
    return 1 if plan.technique("update_in_backward") else 2


def plans_of(first: str, second: str) -> list[Plan]:
    """The pair in all its settings, each with two microbatches, or one where they cannot be added up."""
    chosen = product(SETTINGS[first], SETTINGS[second]) if first != second else zip(SETTINGS[first])
    chosen = BESIDE.get((first, second), chosen)
    plans = []
    for techniques in chosen:
        whole = tiny.plan_of(*techniques)
        count = num_microbatches(whole)
        plans.append(tiny.plan_of(*techniques, microbatch=tiny.BATCH // whole.num_replicas // count))
    return plans


def verdict(plan: Plan, ran: Run) -> str:
    """`exact`, `rounded`, or why not; an AssertionError where the pair is allowed and wrong."""
    model = tiny.MOE if plan.technique("expert") else MODEL
    if tiny.INTERLEAVED in plan.techniques:
        model = model | {"num_layers": 4}
    if plan.technique("local_loss"):
        model = model | {"local_heads": 1}
    problems = plan.check(decoder_profile(DecoderConfig(**model), "tiny"))
    if problems:
        return "; ".join(map(str, problems))
    assert plan.num_microbatches == num_microbatches(plan)
    exact = not any(each.rounds for each in plan.techniques if each not in APPROXIMATE)
    optimizer = tiny.ADAMW if plan.num_microbatches > 1 else tiny.ADAMW | {"clip": 0.0}
    bounds = tiny.bounds(tiny.EXACT) if exact else tiny.ROUNDED
    if plan.island_axes:
        optimizer = tiny.ADAMW if plan.technique("lowbit_optimizer") else tiny.SGD | {"momentum": 0.0, "clip": 0.0}
        bounds = {name: bound for name, bound in bounds.items() if name in ("loss", "parameter")}
    answers = ran(plan, model, dtype="float64" if exact else "float32", optimizer=optimizer)
    assert tiny.departures(answers, bounds) == []
    assert tiny.price_differences(answers) == []
    if plan.technique("compile"):
        assert all(answer["num_graphs"] > 0 for answer in answers), "nothing was compiled"
    return "exact" if exact else "rounded"


def render(found: dict[frozenset[str], list[str]]) -> str:
    """A table, and the reasons below it."""
    signs, reasons = {"exact": "✓", "rounded": "≈"}, []
    rows = []
    for row in NAMES:
        cells = []
        for column in NAMES:
            verdicts = found[frozenset((row, column))]
            refused = [each for each in verdicts if each not in signs]
            if refused and refused[0] not in reasons:
                reasons.append(refused[0])
            worst = f"✗ {reasons.index(refused[0]) + 1}" if refused else signs[max(verdicts)]
            cells.append(worst)
        rows.append(f"| **{row}** | {' | '.join(cells)} |")
    settings = [f"- {name}: {', '.join(f'`{each}`' for each in SETTINGS[name])}" for name in NAMES]
    lines = [
        "# Which techniques go together",
        "",
        "Found by `tests/parity/test_pairs.py`, which trains every pair on a tiny model, compared with one device:",
        "✓ the same numbers (1e-9 in float64), ≈ the same algorithm in fewer bits, ✗ refused by `check`. Each pair",
        "also sends exactly the bytes that its price says. The diagonal is a technique alone.",
        "",
        f"| | {' | '.join(NAMES)} |",
        f"|---{'|---' * len(NAMES)}|",
        *rows,
        "",
        "In these settings:",
        "",
        *settings,
    ]
    if reasons:
        lines += ["", "Refused:", "", *(f"{number}. {text}" for number, text in enumerate(reasons, 1))]
    return "\n".join(lines) + "\n"


def test_every_technique_has_settings_here() -> None:
    assert set(SETTINGS) == set(NAMES)
    for name, chosen in SETTINGS.items():
        assert chosen
        assert {each.name for each in chosen} == {name}


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=["+".join(pair) for pair in PAIRS])
def test_a_pair_is_refused_or_right(first: str, second: str, ran: Run) -> None:
    plans = plans_of(first, second)
    assert plans
    for plan in plans:
        assert verdict(plan, ran)


def test_the_matrix_in_the_docs_is_what_is_found(ran: Run, request: pytest.FixtureRequest) -> None:
    found = {frozenset(pair): [verdict(plan, ran) for plan in plans_of(*pair)] for pair in PAIRS}
    text = render(found)
    before, title, triples = MATRIX.read_text(encoding="utf-8").partition("\n## Three at a time")
    if request.config.getoption("--write-matrix"):
        MATRIX.write_text(text + title + triples, encoding="utf-8")
        before = text
    assert before == text, "run pytest tests/parity/test_pairs.py --write-matrix"
