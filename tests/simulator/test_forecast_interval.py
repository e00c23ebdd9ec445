"""The interval of a forecast: every domain has one, and says what it rests on."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

import meshwright as mw
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.machine.named_clusters import cluster
from meshwright.simulator.forecast import (
    CPUS,
    OTHER_GPUS,
    PROBED_CPUS,
    PROBED_GPUS,
    SCALES,
    Domain,
    domain_of,
    forecast,
    interval_of,
    interval_table,
)

MODELS = ("decoders", "experts", "other models")


def test_every_domain_has_an_interval_around_the_forecast() -> None:
    devices = {*interval_table()["devices"].values(), OTHER_GPUS, PROBED_GPUS, CPUS, PROBED_CPUS}
    for kind, scale, model in product(devices, range(len(SCALES)), MODELS):
        low, high, basis = interval_of(Domain(kind, scale, model))
        assert 0.2 < low < 0.97 < 1.03 < high < 5
        assert str(Domain(kind, scale, model)) in basis


@pytest.mark.parametrize(
    ("model", "machines", "ranks", "domain"),
    [
        ("llama3-8b", "8xh100", 8, ("H100s", 1, "decoders")),
        ("llama3-8b", "8xh100", 1, ("H100s", 0, "decoders")),
        ("gpt3-175b", "128x8xa100", 1024, ("A100s", 4, "decoders")),
        ("gpt3-175b", "128x8xa100", 64, ("A100s", 2, "decoders")),
        ("mixtral-8x7b", "32x8xh800", 256, ("H100s", 3, "experts")),
        ("mixtral-8x7b", "gb200", 1, ("B200s", 0, "experts")),
        ("vit-b16", "rtx3090", 1, (OTHER_GPUS, 0, "other models")),
        ("vit-b16", "a10g", 1, (OTHER_GPUS, 0, "other models")),  # no A100
        ("llama3-8b", "8xmi300x", 8, (OTHER_GPUS, 1, "decoders")),
        ("byte-3m", "2xlaptop", 2, (CPUS, 1, "decoders")),
    ],
)
def test_domains_are_told_apart(model: str, machines: str, ranks: int, domain: tuple[str, int, str]) -> None:
    assert domain_of(mw.model(model).profile, cluster(machines), ranks) == domain


def test_a_probed_machine_is_a_domain_of_its_own() -> None:
    profile = mw.model("byte-3m").profile
    for name, kind in (("h100", PROBED_GPUS), ("laptop", PROBED_CPUS)):
        probed = replace(cluster(name), sources={"measured": "today"})
        assert domain_of(profile, probed, 1).devices == kind


def test_a_forecast_says_what_nobody_has_measured() -> None:
    shard, expert = technique_named("shard"), technique_named("expert")
    few = Plan(techniques=(shard(size=8),), batch=64)
    said = forecast(mw.model("llama3-8b").profile, few, cluster("8xh100"), sequence=2048)
    assert "measured runs of decoders on H100s, one node" in said.interval_basis
    many = Plan(techniques=(expert(size=8), shard(size=128)), batch=1024)
    profile = mw.model("mixtral-8x7b").profile
    wide = forecast(profile, many, cluster("128x8xh100"), sequence=2048, replays=False)
    assert wide.interval_basis.startswith("nothing measured by anybody of experts on H100s, more than 64 nodes")
    assert wide.step_seconds_high / wide.step_seconds_low > said.step_seconds_high / said.step_seconds_low


def test_after_runs_of_its_own_a_machine_needs_no_domain() -> None:
    learned = replace(cluster("8xh100"), sources={"learned.compute": "learned from 3 runs"})
    plan = Plan(techniques=(technique_named("shard")(size=8),), batch=64)
    said = forecast(mw.model("llama3-8b").profile, plan, learned, sequence=2048)
    off = said.step_seconds_high / said.step_seconds
    assert said.step_seconds / said.step_seconds_low == pytest.approx(off)
    assert said.interval_basis == "what runs on this machine leave open"
