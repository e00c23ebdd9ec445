"""States on the host: the same numbers bit for bit, the bytes that were priced, nothing changed by a step not taken."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import resumed
import tiny
import torch

from meshwright.ask.question import with_devices
from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.step_folders import step_folder
from meshwright.core.cluster import Cluster, HostResources
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import Technique
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import DecoderConfig, profile
from meshwright.optimizers import host_states
from meshwright.optimizers.host_states import HostStatesRule
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.planner.search import search
from meshwright.run.model import open_config
from meshwright.runtime.checkpointing import save
from meshwright.simulator.forecast import forecast
from meshwright.simulator.pricing import price
from meshwright.verify import parity

CONFIG = DecoderConfig(**tiny.LLAMA | {"num_layers": 2})
SHARES = (1.0, 0.5)
AHEAD = (False, True)
DISK = tiny.t("offload_states", disk_share=1.0)


def session_of(
    optimizer: OptimizerConfig, *techniques: Technique, microbatch: int = 4, dtype: str = "float32"
) -> parity.Session:
    plan = Plan(techniques=techniques, batch=4, microbatch=microbatch)
    opened = open_config(CONFIG, "tiny", 0)
    return parity.open_session(plan, opened, optimizer, dtype=dtype, device=torch.device("cpu"))


def samples(step: int) -> Any:
    return parity.random_samples(CONFIG.vocab_size, 4, tiny.SEQUENCE)(step, 0, 1)


def offload(share: float = 1.0, ahead: bool = False) -> Technique:
    return tiny.t("offload_states", share=share, ahead=ahead)


def held(session: parity.Session) -> dict[Any, torch.Tensor]:
    session.loop.require_rest()
    values: dict[Any, torch.Tensor] = dict(session.build.local_parameters())
    return {key: value.clone() for key, value in values.items()} | {
        state[:2]: state[2].clone() for state in session.loop.optimizer.state()
    }


def assert_same(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [key for key, value in one.items() if not torch.equal(value, other[key])] == []


@pytest.mark.parametrize("beside", [(), (tiny.BF16,), (tiny.BF16, tiny.RECOMPUTE, tiny.CHUNKED)], ids=tiny.joined)
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
@pytest.mark.parametrize(("clip", "microbatch"), [(0.0, 4), (0.5, 4), (0.5, 2), (100.0, 2)])
def test_all_states_on_the_host_change_no_bit(
    beside: tuple[Technique, ...], name: str, clip: float, microbatch: int
) -> None:
    """With a clip of 0.5 every step is clipped, so that updates made ahead are undone."""
    optimizer = OptimizerConfig(name=name, clip=clip)
    sessions = [session_of(optimizer, *beside, microbatch=microbatch)]
    ways = (offload(), offload(ahead=True), DISK)
    sessions += [session_of(optimizer, *beside, way, microbatch=microbatch) for way in ways]
    for step in range(3):
        results = [session.loop.step(samples(step), 0.05) for session in sessions]
        assert clip != 0.5 or results[0].gradient_norm > clip
        assert len({result.loss for result in results}) == 1
    for session in sessions[1:]:
        assert_same(held(sessions[0]), held(session))


def test_a_step_may_begin_before_updates_have_ended() -> None:
    optimizer = OptimizerConfig(clip=0.5)
    plain = session_of(optimizer, tiny.BF16)
    for ahead in AHEAD:
        session = session_of(optimizer, tiny.BF16, offload(0.5, ahead))
        for step in range(4):
            session.loop.feed(samples(step), 0.05)
        session.loop.flush()
        if not ahead:
            for step in range(4):
                plain.loop.step(samples(step), 0.05)
        mine, its = held(session), held(plain)
        assert all(torch.allclose(mine[key], its[key], rtol=0, atol=1e-6) for key in its)


@pytest.mark.parametrize("ahead", AHEAD)
def test_one_compiled_pass_is_the_same_update(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = OptimizerConfig(clip=0.5)
    plain = session_of(optimizer, dtype="float64")
    monkeypatch.setattr(host_states, "compiles_updates", lambda build: True)
    session = session_of(optimizer, offload(ahead=ahead), dtype="float64")
    rule = session.loop.optimizer.rule
    assert isinstance(rule, HostStatesRule)
    assert all(isinstance(states.rule, host_states.FlatRule) for states in rule.units)
    for step in range(3):
        for each in (plain, session):
            each.loop.step(samples(step), 0.05)
    mine, its = held(session), held(plain)
    assert mine.keys() == its.keys()
    assert max(float((mine[key] - its[key]).abs().max()) for key in its) < 1e-9


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_that_is_not_finite_changes_nothing(
    ahead: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_states, "compiles_updates", lambda build: compiled)
    plain, session = session_of(OptimizerConfig()), session_of(OptimizerConfig(), offload(ahead=ahead))
    given = samples(0)
    session.loop.step(given, 0.05)
    before = held(session)
    with pytest.raises(MeshwrightError, match="this step was not taken"):
        session.loop.step(replace(given, weights=given.weights * float("nan")), 0.05)
    session.loop.optimizer.rule.begin(0.0, 0)
    assert_same(before, held(session))
    if not compiled:
        plain.loop.step(given, 0.05)
        assert plain.loop.step(samples(1), 0.05).loss == session.loop.step(samples(1), 0.05).loss
        assert_same(held(plain), held(session))


@pytest.mark.parametrize("microbatch", [4, 2])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("way", ["after", "ahead", "disk", "half on disk"])
def test_what_moves_and_what_the_host_and_the_disk_hold_are_priced(microbatch: int, share: float, way: str) -> None:
    on_disk = {"disk": share, "half on disk": share / 2}.get(way, 0.0)
    given = {"share": share, "ahead": way == "ahead", "disk_share": on_disk}
    optimizer, techniques = OptimizerConfig(), (tiny.BF16, tiny.t("offload_states", **given))
    session = session_of(optimizer, *techniques, microbatch=microbatch)
    rule = session.loop.optimizer.rule
    assert isinstance(rule, HostStatesRule)
    moved = []
    for step in range(3):
        session.loop.step(samples(step), 0.05)
        rule.finish()  # also what is read for the step after
        for layer in rule.on_disk:
            assert layer.loaded is None or layer.loaded.result()
        moved.append(Counter(rule.lanes.moved))
    plan = session.build.plan
    work = price(session.build.profile, plan, sequence=tiny.SEQUENCE, optimizer=optimizer)
    promised: Counter[tuple[str, str]] = Counter()
    for copy in work.copies:
        times = 1 if copy.per_step else plan.num_microbatches
        promised[copy.source, copy.target] += int(copy.repeat * copy.bytes) * times
    assert moved[2] - moved[1] == promised
    there: dict[int, int] = {}
    on_disk_now = 0
    for states in rule.units:
        if (layer := states.unit.on_disk) is not None:
            on_disk_now += layer.tensor_bytes
            states_here = [states.unit.flat_working, states.landing, *states.sums]
            for tensor in states_here:
                there[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            continue
        flats = [states.unit.flat_masters, states.unit.flat_working, states.landing, *states.sums]
        for tensor in (*flats, *states.rule.storage(), *states.old):
            there[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    on_host = sum(item.repeat * item.bytes for item in work.residents if item.tier == "host")
    for layer in rule.on_disk[:1]:
        there[0] = min(layer.file.num_buffers, len(rule.on_disk)) * max(each.tensor_bytes for each in rule.on_disk)
    assert sum(there.values()) == on_host
    assert on_disk_now == sum(item.repeat * item.bytes for item in work.residents if item.tier == "disk")
    assert bool(on_disk_now) == bool(on_disk)
    assert all(parameter.grad is None for states in rule.units for parameter in states.unit.parameters)
    blocks = [states.unit for states in rule.units if states.unit.is_block]
    assert blocks
    assert {parameter.dtype for unit in blocks for parameter in unit.parameters} == {torch.bfloat16}


def test_runs_go_on_with_other_shares(tmp_path: Path) -> None:
    """Saved with one share and read with another, or without, bit for bit."""

    def opened() -> Any:
        return open_config(CONFIG, "tiny", 0)

    first = resumed.session_of(opened(), tiny.BF16, offload(ahead=True))
    resumed.train(first, range(2), CONFIG.vocab_size)
    assert save(tmp_path, 2, first.build, first.loop.optimizer, {}, 1) == ""
    wanted, after = resumed.train(first, range(2, 4), CONFIG.vocab_size), held(first)
    reader = Reader(step_folder(tmp_path, 2))
    for techniques in ((), (offload(),), (offload(0.5, ahead=True),)):
        session = resumed.session_of(opened(), tiny.BF16, *techniques, reader=reader)
        assert resumed.train(session, range(2, 4), CONFIG.vocab_size) == wanted
        mine = held(session)
        assert all(torch.allclose(mine[key], value, rtol=0, atol=1e-6) for key, value in after.items())
    assert_same(after, held(resumed_again(opened(), reader, offload())))


def resumed_again(opened: Any, reader: Reader, *techniques: Technique) -> parity.Session:
    session = resumed.session_of(opened, tiny.BF16, *techniques, reader=reader)
    resumed.train(session, range(2, 4), CONFIG.vocab_size)
    return session


def known(name: str = "h100", *, memory_bytes: int = 0) -> Cluster:
    """A cluster with a host whose rates are known, and with other device memory."""
    machines = cluster(name)
    host = replace(machines.host, memory_bytes=256 * 2**30, adam_elements_per_second=4.5e9)
    if memory_bytes:
        machines = with_devices(machines, lambda device: replace(device, memory_bytes=memory_bytes))
    return replace(machines, host=host)


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    shape = profile("byte-tiny")
    others = {tiny.IN_BACKWARD: "updates parameters by itself", tiny.t("precision", dtype="fp16"): "fp16 overflows"}
    others |= {tiny.t("precision", weights="bf16"): "updates parameters by itself"}
    others |= {tiny.t("compile", scope="model"): "exist at once"}
    for other, reason in others.items():
        assert any(reason in each.what for each in Plan(techniques=(offload(), other)).check(shape)), other
    (problem,) = Plan(techniques=(offload(1.5),)).check(shape)
    assert problem.what == "share is 1.5."
    (problem,) = OptimizerConfig(name="muon").problems_with(Plan(techniques=(offload(),)))
    assert "whole parameters" in problem.what
    plan = Plan(techniques=(offload(),), batch=1)
    (problem,) = plan.check(shape, replace(known(), host=HostResources()))
    assert problem.fix == "Measure them: mw probe."
    assert plan.check(shape, known()) == ()
    (problem,) = plan.check(profile("llama3-70b"), known())
    assert "too little for masters and gradients alone" in problem.what


def test_the_forecast_has_less_on_the_device_and_charges_the_host() -> None:
    model, machines = profile("llama3.2-3b"), known()

    def told(*techniques: Technique) -> Any:
        plan = Plan(techniques=(tiny.BF16, tiny.RECOMPUTE, *techniques), batch=4, microbatch=4)
        return forecast(model, plan, machines, sequence=4096)

    plain, after, ahead = told(), told(offload()), told(offload(ahead=True))
    assert plain.peak_bytes - after.peak_bytes > 10 * model.num_params
    assert after.peak_bytes_by_tier["host"] > 14 * model.num_params
    more = ahead.peak_bytes_by_tier["host"] - after.peak_bytes_by_tier["host"]
    assert 12 * model.num_params < more < 14 * model.num_params  # of blocks also gradients apart from the working copy
    assert plain.step_seconds < ahead.step_seconds < after.step_seconds
    slow = replace(machines, host=replace(machines.host, adam_elements_per_second=1e8))
    plan = Plan(techniques=(tiny.BF16, offload()), batch=4)
    assert "by cores of the host" in forecast(model, plan, slow, sequence=1024).bottleneck


def test_search_uses_the_host_where_nothing_else_fits() -> None:
    common: dict[str, Any] = {"batch": 4, "sequence": 1024}
    assert search(profile("llama3-8b"), replace(known(), host=HostResources()), **common).best is None
    found = search(profile("llama3-8b"), known(), **common)
    assert found.best is not None
    assert found.best.plan.technique("offload_states") is not None
    assert found.best.forecast.fits
