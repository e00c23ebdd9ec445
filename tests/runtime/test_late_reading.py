"""One process reads loss and norm a step late: every result once, and nothing of a step that was not finite stays.

Tests of `runtime/loop.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.models.presets import DecoderConfig
from meshwright.optimizers.update import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.runtime.loop import Samples
from meshwright.verify import parity

CONFIG = DecoderConfig(**tiny.GPT)
CPU = torch.device("cpu")
NAMES = ("adamw", "sgd", "lion", "low bits")


def opened(
    name: str = "adamw", *, clip: float = 0.5, dtype: str = "float32", device: torch.device = CPU
) -> parity.Session:
    optimizer = OptimizerConfig(name="adamw" if name == "low bits" else name, lr=0.05, clip=clip, weight_decay=0.1)
    techniques = (tiny.t("lowbit_optimizer", smallest=64),) if name == "low bits" else ()
    plan = Plan(batch=4, microbatch=2, techniques=techniques)
    return parity.open_session(plan, open_config(CONFIG, "tiny", 0), optimizer, dtype=dtype, device=device)


def given(step: int, *, spoiled: bool = False) -> Samples:
    samples = parity.random_samples(CONFIG.vocab_size, 4, tiny.SEQUENCE)(step, 0, 1)
    weights = samples.weights.float()
    return replace(samples, weights=weights * float("nan") if spoiled else weights)


def state_of(session: parity.Session) -> dict[str, torch.Tensor]:
    optimizer = session.loop.optimizer
    found = {f"parameter {name}": value.clone() for name, value in session.build.local_parameters()}
    found |= {f"{kind} {name}": value.clone() for kind, name, value, _ in optimizer.state()}
    inner = getattr(optimizer.rule, "inner", None)
    counts = [] if inner is None else [kept["step"] for kept in inner.state.values() if "step" in kept]
    return found | {f"count {i}": value.clone() for i, value in enumerate([*counts, torch.tensor(optimizer.num_steps)])}


def assert_same(session: parity.Session, wanted: dict[str, torch.Tensor]) -> None:
    found = state_of(session)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", NAMES)
def test_feed_step_and_flush_give_every_result_once_and_in_order(name: str) -> None:
    one, late = opened(name), opened(name)
    wanted = [one.loop.step(given(step), 0.05) for step in range(6)]
    told = [late.loop.feed(given(step), 0.05) for step in range(4)]
    assert [len(each) for each in told] == ([1, 1, 1, 1] if name == "lion" else [0, 1, 1, 1])
    results = [result for each in (*told, late.loop.flush()) for result in each]
    assert late.loop.flush() == []
    results.append(late.loop.step(given(4), 0.05))
    results += late.loop.feed(given(5), 0.05) + late.loop.flush()
    assert results == wanted
    assert_same(late, state_of(one))


def test_requests_are_those_of_their_step() -> None:
    session = opened()
    results = session.loop.feed(given(0), 0.05, stop=True) + session.loop.feed(given(1), 0.05, save=True)
    results += session.loop.flush()
    assert [(result.must_stop, result.must_save) for result in results] == [(True, False), (False, True)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_step_that_is_not_finite_leaves_nothing_though_the_next_was_launched(name: str, dtype: str, at: int) -> None:
    session = opened(name, dtype=dtype)
    for step in range(at):
        session.loop.step(given(step), 0.05)
    before = state_of(session)

    def feed_two() -> None:
        session.loop.feed(given(at, spoiled=True), 0.05)
        session.loop.feed(given(at + 1), 0.05)

    with pytest.raises(MeshwrightError, match="this step was not taken") as caught:
        feed_two()
    assert caught.value.exit_code == 1
    assert_same(session, before)
    assert session.loop.flush() == []
    twin = opened(name, dtype=dtype)
    for step in (*range(at), 7):
        twin.loop.step(given(step), 0.05)
    session.loop.step(given(7), 0.05)  # the error was raised: training goes on
    assert_same(session, state_of(twin))


@pytest.mark.parametrize("call", ["flush", "step"])
def test_the_last_step_raises_when_it_is_read(call: str) -> None:
    session = opened()
    session.loop.step(given(0), 0.05)
    before = state_of(session)
    bad = given(1, spoiled=True)

    def read() -> None:
        if call == "step":
            session.loop.step(bad, 0.05)
        else:
            session.loop.feed(bad, 0.05)
            session.loop.flush()

    with pytest.raises(MeshwrightError, match="this step was not taken"):
        read()
    assert_same(session, before)


def test_nobody_looks_at_weights_whose_step_was_not_read() -> None:
    session = opened()
    session.loop.feed(given(0), 0.05)
    for look in (session.loop.require_rest, lambda: session.loop.evaluate([given(1)])):
        with pytest.raises(MeshwrightError, match="Call flush first"):
            look()
    session.loop.flush()
    session.loop.require_rest()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("clip", [0.0, 0.01, 0.5, 1e6])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("on_device", [True, False])
def test_clipping_is_torchs(name: str, clip: float, dtype: str, on_device: bool) -> None:
    """Bit for bit where nothing is clipped; else up to the 1e-6 that torch adds to the norm, and a rounding."""
    session = opened(name, clip=clip, dtype=dtype)
    ours, config = session.loop.optimizer, session.loop.optimizer.config
    own = [p.detach().clone().requires_grad_() for p in ours.parameters]
    split = [p for p in own if p.ndim >= 2], [p for p in own if p.ndim < 2]
    groups = [{"params": each, "weight_decay": decay} for each, decay in zip(split, (0.1, 0.0), strict=True)]
    theirs: torch.optim.Optimizer
    if name == "adamw":
        betas = (config.beta1, config.beta2)
        theirs = torch.optim.AdamW(groups, lr=0.05, betas=betas, eps=config.epsilon, fused=True)
    else:
        theirs = torch.optim.SGD(groups, lr=0.05, momentum=config.momentum, fused=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        ours.zero_gradients()
        for parameter, twin in zip(ours.parameters, own, strict=True):
            parameter.grad = torch.randn(twin.shape, generator=generator, dtype=twin.dtype)
            twin.grad = parameter.grad.clone()
        ours.take_gradients()
        norm = ours.squared_norm().sqrt()
        ours.update(0.05, norm if on_device else float(norm), torch.zeros(()) if on_device else None)
        if clip:
            torch.nn.utils.clip_grad_norm_(own, clip)
        theirs.step()
    is_same = not 0 < clip < 1e6
    bounds = {"rtol": 0.0, "atol": 0.0} if is_same else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(ours.parameters, own, **bounds)


def test_a_checkpoint_after_a_bad_step_is_not_written(tmp_path: Path) -> None:
    import meshwright as mw

    built = mw.build(Plan(batch=4, microbatch=4), CONFIG, optimizer=OptimizerConfig(lr=0.05), device="cpu")
    samples = given(0)
    built.feed(samples.inputs, samples.targets, samples.weights * float("nan"))
    with pytest.raises(MeshwrightError, match="Call flush first"):
        built.save(tmp_path)
    with pytest.raises(MeshwrightError, match="this step was not taken"):
        built.flush()
    assert not (tmp_path / "checkpoints").exists()
    built.save(tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_host_does_not_wait_inside_a_step_on_a_gpu(name: str) -> None:
    session = opened(name, device=torch.device("cuda"))
    own = [parity.own_samples(session, lambda *at: given(at[0], spoiled=at[0] == 4), step) for step in range(6)]
    session.loop.step(own[0], 0.05)  # what is lazy happens here
    torch.cuda.set_sync_debug_mode("error")  # waiting for an event is none of what it forbids
    try:
        results = [result for step in (1, 2, 3) for result in session.loop.feed(own[step], 0.05)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    results += session.loop.flush()
    twin = opened(name, device=torch.device("cuda"))
    assert results == [twin.loop.step(each, 0.05) for each in own[:4]][1:]
    assert_same(session, state_of(twin))

    def feed_two() -> None:
        session.loop.feed(own[4], 0.05)
        session.loop.feed(own[5], 0.05)

    with pytest.raises(MeshwrightError, match="this step was not taken"):
        feed_two()
    assert_same(session, state_of(twin))
