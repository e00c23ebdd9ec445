"""The loss's scale: halved, doubled, given up; and gradients that are freed of it exactly."""

from __future__ import annotations

import pytest
import tiny
import torch

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.models.presets import DecoderConfig
from meshwright.optimizers.loss_scaling import GROWTH_STEPS, LARGEST_SCALE, LossScaling
from meshwright.optimizers.update import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.verify import parity


def test_the_scale_is_halved_at_once_and_doubled_after_many_good_steps() -> None:
    scaling = LossScaling()
    scaling.update(is_finite=False)
    assert scaling == LossScaling(scale=2.0**15, num_skipped=1)
    for _ in range(GROWTH_STEPS - 1):
        scaling.update(is_finite=True)
    assert scaling == LossScaling(scale=2.0**15, num_good=GROWTH_STEPS - 1)
    scaling.update(is_finite=True)
    assert scaling == LossScaling(scale=2.0**16)
    most = LossScaling(scale=LARGEST_SCALE, num_good=GROWTH_STEPS - 1)
    most.update(is_finite=True)
    assert most.scale == LARGEST_SCALE


@pytest.mark.parametrize(("first", "words"), [(1.0, "in 1 step in a row"), (2.0**60, "in 50 steps in a row")])
def test_it_gives_up(first: float, words: str) -> None:
    scaling = LossScaling(scale=first)

    def skip_many() -> None:
        for _ in range(60):
            scaling.update(is_finite=False)

    with pytest.raises(MeshwrightError, match=words) as caught:
        skip_many()
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_gradients_are_freed_of_the_scale_exactly(name: str, clip: float) -> None:
    """In float32 with a scale, so that nothing else is rounded: the same numbers as without one."""
    config = DecoderConfig(**tiny.LLAMA)
    optimizer = OptimizerConfig(name=name, lr=0.05, clip=clip)
    sessions = []
    for scaling in (None, LossScaling()):
        opened = open_config(config, "tiny", 0)
        plan = Plan(batch=4, microbatch=2)
        session = parity.open_session(plan, opened, optimizer, dtype="float32", device=torch.device("cpu"))
        session.build.loss_scaling = scaling
        session.loop.__init__(session.build, session.loop.optimizer)  # type: ignore[misc]
        sessions.append(session)
    samples = parity.random_samples(config.vocab_size, 4, tiny.SEQUENCE)
    for step in range(3):
        plain, scaled = (session.loop.step(samples(step, 0, 1), 0.05) for session in sessions)
        assert (plain.loss, plain.gradient_norm) == (scaled.loss, scaled.gradient_norm)
        assert (plain.loss_scale, scaled.loss_scale) == (1.0, 2.0**16)
    for (key, value), (_, other) in zip(*(session.build.local_parameters() for session in sessions), strict=True):
        assert torch.equal(value, other), key


def test_a_foreign_module_under_autocast() -> None:
    import meshwright as mw

    told = []
    for dtype in ("fp32", "fp16"):
        torch.manual_seed(0)
        inputs, targets = torch.randn(8, 16), torch.randint(0, 10, (8,))
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 10))
        plan = Plan(batch=8, microbatch=4, techniques=(tiny.t("precision", dtype=dtype),))
        built = mw.build(plan, model, inputs=inputs[:1], optimizer=OptimizerConfig(lr=1e-2), device="cpu")
        told.append([built.step(inputs, targets) for _ in range(3)])
    for wide, narrow in zip(*told, strict=True):
        assert not narrow.is_skipped
        assert narrow.loss != wide.loss
        assert (narrow.loss, narrow.gradient_norm) == pytest.approx((wide.loss, wide.gradient_norm), rel=2e-3)
