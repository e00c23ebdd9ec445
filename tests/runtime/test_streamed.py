"""Runs whose weights stream: evaluated, saved and resumed under other plans, after a failed step; built by blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import resumed
import tiny
from tiny import t

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.step_folders import step_folder
from meshwright.core.codec import encode
from meshwright.core.errors import MeshwrightError
from meshwright.models.frozen_parameters import freeze
from meshwright.models.presets import DecoderConfig
from meshwright.run.model import open_config
from meshwright.runtime.build import RankBuild
from meshwright.runtime.checkpointing import save
from meshwright.verify import parity

CONFIG = DecoderConfig(**tiny.LLAMA | {"num_layers": 6})
STREAMED = (t("offload_states"), t("stream_weights"), tiny.RECOMPUTE)
AHEAD = (t("offload_states", ahead=True), t("stream_weights"), tiny.RECOMPUTE)
SAMPLES = parity.random_samples(CONFIG.vocab_size, 4, tiny.SEQUENCE)

train = partial(resumed.train, vocab_size=CONFIG.vocab_size)


def session_of(*techniques: object, reader: Reader | None = None) -> parity.Session:
    return resumed.session_of(open_config(CONFIG, "tiny", 0), *techniques, reader=reader)


@pytest.mark.parametrize("dtype", [(), (tiny.BF16,)], ids=["float32", "bf16"])
def test_other_plans_go_on_from_its_checkpoint_and_it_from_theirs(tmp_path: Path, dtype: tuple[object, ...]) -> None:
    plain, streamed = session_of(*dtype), session_of(*STREAMED, *dtype)
    assert train(plain, range(2)) == train(streamed, range(2))
    about = {"seed": 0, "model_kind": "decoder", "model_config": encode(CONFIG)}
    for name, session in (("plain", plain), ("streamed", streamed)):
        assert save(tmp_path / name, 2, session.build, session.loop.optimizer, about, keep=1) == ""
    expected = train(plain, range(2, 5))
    assert train(streamed, range(2, 5)) == expected
    for name in ("plain", "streamed"):
        reader = Reader(step_folder(tmp_path / name, 2))
        for techniques in ((), STREAMED):
            assert train(session_of(*techniques, *dtype, reader=reader), range(2, 5)) == expected


def test_evaluation_streams_too_and_changes_nothing() -> None:
    plain, streamed = session_of(), session_of(*STREAMED)
    for step in range(3):
        assert train(streamed, range(step, step + 1)) == train(plain, range(step, step + 1))
        batches = [SAMPLES(10 + step, 0, 1), SAMPLES(20 + step, 0, 1)]
        assert streamed.loop.evaluate(batches) == plain.loop.evaluate(batches)


@pytest.mark.parametrize("techniques", [STREAMED, AHEAD], ids=["after", "ahead"])
def test_a_step_that_is_not_finite_leaves_the_weights_as_they_were(techniques: tuple[object, ...]) -> None:
    plain, streamed = session_of(), session_of(*techniques)
    assert train(streamed, range(2)) == train(plain, range(2))
    given = SAMPLES(7, 0, 1)
    with pytest.raises(MeshwrightError, match="step was not taken"):
        streamed.loop.step(replace(given, weights=given.weights * float("inf")), resumed.RATE)
    batches = [SAMPLES(8, 0, 1)]
    assert streamed.loop.evaluate(batches) == plain.loop.evaluate(batches)
    assert train(streamed, range(2, 4)) == train(plain, range(2, 4))


def test_frozen_parameters_stay_on_the_device() -> None:
    losses = []
    for techniques in ((), STREAMED):
        opened = open_config(CONFIG, "tiny", 0)
        for name, parameter in opened.model.named_parameters():
            parameter.requires_grad_("norm" in name or name.startswith("blocks.3."))
        opened.profile = freeze(opened.profile, lambda name: "norm" not in name and not name.startswith("blocks.3."))
        losses.append(train(resumed.session_of(opened, *techniques), range(3)))
    assert losses[0] == losses[1]


def test_one_block_at_a_time_has_weights_while_a_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    plain = RankBuild.materialise

    def materialise(self: RankBuild, parameters: object) -> None:
        plain(self, parameters)  # type: ignore[arg-type]
        blocks = [block for block in self.model.block_modules() for block in block.parameters()]
        storages = {
            each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in blocks if not each.is_meta
        }
        held.append(sum(storages.values()))

    monkeypatch.setattr(RankBuild, "materialise", materialise)
    session = session_of(*STREAMED)
    units = [unit for unit in session.build.host_units if unit.is_streamed]
    assert len(units) == CONFIG.num_layers
    block = max(unit.flat_working.nbytes for unit in units)
    assert block <= max(held) <= block + 4 * len(units)
