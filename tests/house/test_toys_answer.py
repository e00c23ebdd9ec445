"""A renderer of `Answer` that is no part of the package gets everything from the value.

Tests of `ask/answer.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import toy_markdown_answer
from toy_markdown_answer import markdown

from meshwright.api import plan
from meshwright.ask.answer import Answer
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import preset

TINY = decoder_profile(preset("byte-tiny"), "byte-tiny")
QUICK = ("pipeline", "tensor", "recompute", "precision")


def asked(**more: object) -> Answer:
    settings = {"batch": 4, "sequence": 32, "ban": QUICK, "top": 3} | more
    return plan(TINY, cluster("2xlaptop"), **settings)  # type: ignore[arg-type]


def test_the_toy_is_short() -> None:
    assert len(Path(toy_markdown_answer.__file__).read_text(encoding="utf-8").splitlines()) <= 120


def test_all_parts_of_an_answer_are_rendered() -> None:
    answer = asked(why=["microbatch"], what_if=["memory=x2"], front=True, devices="1..2")
    text = markdown(answer)
    assert answer.best is not None
    for words in ("# byte-tiny on", "## Plans", "bottleneck", "## Why microbatch", "## What if memory=x2"):
        assert words in text
    assert "## Numbers of devices" in text
    assert "## The fastest plan for each memory" in text
    assert str(answer.best.plan) in text


def test_where_nothing_fits_the_ways_out_are_rendered() -> None:
    text = markdown(asked(max_memory="300.2MiB"))
    assert "Nothing fits" in text
    assert "## Ways out" in text


@pytest.mark.parametrize("more", [{"why": ["microbatch"], "what_if": ["memory=x2"]}, {"max_memory": "300.2MiB"}])
def test_an_answer_goes_to_json_and_back(more: dict[str, object]) -> None:
    answer = asked(**more)
    again = Answer.from_json(answer.to_json())
    assert again.to_json() == answer.to_json()
    assert again.result == answer.result
    assert markdown(again) == markdown(answer)
