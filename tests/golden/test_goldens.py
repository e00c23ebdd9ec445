"""Answers of `mw plan` and prices of the parity suite's plans equal those stored here.

A change that is meant to change them writes them again: pytest tests/golden -m "slow or not slow" --write-goldens
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from questions import HERE, QUESTIONS, answer

from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Technique
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import DecoderConfig
from meshwright.run.model import describe
from meshwright.run.run_file import ModelSection, OptimizerConfig
from meshwright.simulator.pricing import price

WIDTHS = {"float64": 8, "float32": 4}
PRICES = HERE / "prices.jsonl"
PRICED = [json.loads(line) for line in PRICES.read_text().splitlines()]
FAST = ("124m_on_2", "nothing_fits_pinned", "run_file", "foreign_mlp", "dlrm_on_8", "vgg_on_2")
BY_HAND = (
    "nothing_fits_memory",
    "8b_front",
    "mixed_nodes",
    "deepseek_on_256",
    "8b_auto",
    "mixed_unequal",
    "405b_on_512",
)
"""With the prices of foreign modules, six minutes: run with --all-goldens (docs/benchmarks.md says when)."""


def marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if name in FAST else (pytest.mark.slow,)


def skip_unless_all(request: pytest.FixtureRequest) -> None:
    chosen = request.config.getoption("--all-goldens") or request.config.getoption("--write-goldens")
    if not chosen:
        pytest.skip("run by hand, with --all-goldens")


@pytest.mark.parametrize("name", [pytest.param(each, marks=marks(each)) for each in QUESTIONS])
def test_plans_and_numbers_are_those_stored(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if name in BY_HAND:
        skip_unless_all(request)
    code, found = answer(name, tmp_path)
    found = {"exit_code": code, **found}
    file = HERE / "plans" / f"{name}.json"
    if request.config.getoption("--write-goldens"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(found, indent=0) + "\n")
    assert found == with_defaults(json.loads(file.read_text()))


def with_defaults(value: Any) -> Any:
    """A stored answer with settings of techniques that came later, at their defaults, and in today's notation."""
    if isinstance(value, list):
        return [with_defaults(each) for each in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("techniques"), list):
        made = [Technique.decode_any(each, "", []) for each in value["techniques"]]
        value = value | {"techniques": [each.encode_self() for each in made if each is not None]}
        value |= {"version": Plan.VERSION} if "version" in value else {}
    return {key: with_defaults(each) for key, each in value.items()}


@cache
def profile_of(config: str, sequence: int) -> Profile:
    asked = json.loads(config)
    if "section" in asked:
        return describe(decode(ModelSection, asked["section"], "model"), sequence).profile
    return decoder_profile(DecoderConfig(**asked), "tiny")


def prices_of(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each stage: messages of a step, resident bytes by category and life, flops and bytes moved by phase."""
    plan = Plan.from_json(json.dumps(asked["plan"]))
    profile = profile_of(json.dumps(asked["config"], sort_keys=True), asked["sequence"])
    optimizer = decode(OptimizerConfig, asked["optimizer"], "optimizer")
    sequence = asked["sequence"] if profile.counts == "tokens" else 1
    width = WIDTHS[asked["dtype"]]
    found = []
    for stage in range(len(plan.blocks_of_stages(profile))):
        work = price(profile, plan, sequence=sequence, stage=stage, optimizer=optimizer, element_bytes=width)
        messages = Counter[str]()
        for task in work.collectives:
            messages[f"{task.kind} {task.axis} {int(task.bytes)} {task.phase}"] += int(task.repeat)
        residents, computed = Counter[str](), Counter[str]()
        for item in work.residents:
            residents[f"{item.category} {item.life}"] += int(item.repeat * item.bytes)
        for task in work.computes:
            computed[f"{task.phase} flops"] += float(f"{task.repeat * task.flops:.12g}")
            computed[f"{task.phase} moved"] += float(f"{task.repeat * task.moved_bytes:.12g}")
        rounded = {key: float(f"{value:.10g}") for key, value in computed.items()}
        found.append({"messages": +messages, "residents": +residents, "computed": rounded})
    return found


@pytest.mark.parametrize("is_foreign", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_prices_are_those_stored(is_foreign: bool, request: pytest.FixtureRequest) -> None:
    if is_foreign:
        skip_unless_all(request)
    asked = [each for each in PRICED if ("factory" in each["asked"]["config"].get("section", {})) == is_foreign]
    assert len(asked) > 40
    found = [{"asked": each["asked"], "price": prices_of(each["asked"])} for each in asked]
    if request.config.getoption("--write-goldens"):
        others = map(json.loads, PRICES.read_text().splitlines())
        kept = [each for each in others if each["asked"] not in [one["asked"] for one in asked]]
        lines = [json.dumps(each, sort_keys=True) + "\n" for each in kept + found]
        PRICES.write_text("".join(sorted(lines)))
        return
    assert [each["asked"]["plan"] for each, now in zip(asked, found, strict=True) if each != now] == []


def test_there_are_enough_questions() -> None:
    assert len(QUESTIONS) - len(BY_HAND) >= 40
    assert set(BY_HAND) <= set(QUESTIONS)
    assert len(PRICED) > 400
