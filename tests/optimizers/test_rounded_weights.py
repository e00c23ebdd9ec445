"""Weights rounded at random: with the right mean, by numbers that depend on parameter, element and step alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import resumed
import tiny
import torch

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.step_folders import step_folder
from meshwright.core.box import Box
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.models.presets import DecoderConfig
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.optimizers.rounded_weights import (
    compiled_rounding,
    noise,
    places_of,
    round_at_random,
    seed_of,
)
from meshwright.run.model import open_config
from meshwright.runtime.checkpointing import save
from meshwright.verify import parity

CONFIG = DecoderConfig(**tiny.LLAMA | {"num_layers": 2})
NARROW = tiny.t("precision", weights="bf16")
CPU = torch.device("cpu")


def test_rounding_is_to_a_neighbour_with_the_right_mean() -> None:
    values = torch.tensor([1.0 + 2**-9, -3.7, 1e-30, 2.0, 0.0, 65504.0])
    places = places_of(Box.whole((4096, 6)), CPU)
    wide = values.expand(4096, 6)
    rounded = round_at_random(wide, noise(places, seed_of("w", 1))).float()
    for column, value in enumerate(values.tolist()):
        found = rounded[:, column].unique()
        assert len(found) == (1 if value in (2.0, 0.0) else 2)
        assert bool((found - value).abs().max() <= abs(value) * 2**-7)
        assert float(rounded[:, column].mean()) == pytest.approx(value, rel=2**-12)
    odd = torch.tensor([float("inf"), float("-inf"), float("nan")])
    assert torch.equal(round_at_random(odd, torch.full((3,), 0xFFFF, dtype=torch.int32)).float()[:2], odd[:2])
    assert bool(round_at_random(odd, torch.full((3,), 0xFFFF, dtype=torch.int32))[2].isnan())


def test_a_piece_draws_what_the_whole_parameter_draws_there() -> None:
    whole = noise(places_of(Box.whole((8, 6)), CPU), seed_of("w", 3))
    for dim in (0, 1):
        piece = Box.whole((8, 6)).chunk(dim, 1, 2)
        assert torch.equal(noise(places_of(piece, CPU), seed_of("w", 3)), whole[piece.slices])
    assert not torch.equal(noise(places_of(Box.whole((8, 6)), CPU), seed_of("w", 4)), whole)
    assert not torch.equal(noise(places_of(Box.whole((8, 6)), CPU), seed_of("v", 3)), whole)
    assert abs(float(whole.double().mean()) / 2**15 - 1) < 0.2


def test_compiled_rounding_is_the_plain_one() -> None:
    box = Box((40_000, 70_000), (35_000, 0), (3, 70_000))  # places beyond the range of int32
    wide, seed = torch.randn(3, 70_000), seed_of("w", 3)
    first = 35_000 * 70_000 - 2**32
    numbers = torch.tensor([first, seed], dtype=torch.int32)
    assert torch.equal(compiled_rounding(CPU)(wide, numbers), round_at_random(wide, noise(places_of(box, CPU), seed)))


def _session(*techniques: object, reader: Reader | None = None) -> parity.Session:
    return resumed.session_of(open_config(CONFIG, "tiny", 0), *techniques, reader=reader)


_train = partial(resumed.train, vocab_size=CONFIG.vocab_size)


@pytest.mark.parametrize("more", [(), (tiny.LOW_BIT,)], ids=["alone", "with lowbit_optimizer"])
def test_a_resumed_run_goes_on_bit_for_bit_and_any_plan_reads_its_weights(more: tuple[object], tmp_path: Path) -> None:
    first = _session(NARROW, *more)
    _train(first, range(2))
    assert {value.dtype for _, value in first.build.local_parameters()} == {torch.bfloat16}
    assert save(tmp_path, 2, first.build, first.loop.optimizer, {"seed": 0}, keep=1) == ""
    reader = Reader(step_folder(tmp_path, 2))
    again, wide = _session(NARROW, *more, reader=reader), _session(reader=reader)
    assert {value.dtype for _, value in wide.build.local_parameters()} == {torch.float32}
    losses = [_train(session, range(2, 5)) for session in (first, again, wide)]
    assert losses[0] == losses[1]
    assert losses[2] == pytest.approx(losses[0], rel=2e-2)


def test_a_parameter_is_rounded_in_slices_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for elements in (1 << 25, 100):
        monkeypatch.setattr("meshwright.optimizers.rounded_weights.SLICE_ELEMENTS", elements)
        session = _session(NARROW)
        losses.append((_train(session, range(3)), [value for _, value in session.build.local_parameters()]))
    assert losses[0][0] == losses[1][0]
    assert all(torch.equal(a, b) for a, b in zip(losses[0][1], losses[1][1], strict=True))


def test_an_optimizer_that_looks_at_whole_parameters_is_refused() -> None:
    plan = Plan(techniques=(NARROW,), batch=4)
    (problem,) = OptimizerConfig(name="muon").problems_with(plan)
    assert "precision updates them one by one" in str(problem)
    with pytest.raises(MeshwrightError, match="one by one"):
        parity.open_session(
            plan, open_config(CONFIG, "tiny", 0), OptimizerConfig(name="muon"), dtype="float32", device=CPU
        )
