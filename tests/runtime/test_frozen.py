"""Frozen parameters in bf16: saved, resumed and exported as they are, and any plan reads them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import resumed
import tiny
import torch
from safetensors.torch import load_file

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.step_folders import step_folder
from meshwright.core.codec import encode
from meshwright.hf.weights_import_export import export
from meshwright.models.frozen_parameters import freeze
from meshwright.models.presets import DecoderConfig
from meshwright.run.model import open_config
from meshwright.runtime.checkpointing import save
from meshwright.verify import parity

CONFIG = DecoderConfig(**tiny.LLAMA)


def session_of(*techniques: object, reader: Reader | None = None) -> parity.Session:
    """Only the last block is trained."""
    opened = open_config(CONFIG, "tiny", 0)
    for name, parameter in opened.model.named_parameters():
        parameter.requires_grad_(name.startswith("blocks.3."))
    opened.profile = freeze(opened.profile, lambda name: not name.startswith("blocks.3."))
    return resumed.session_of(opened, *techniques, reader=reader)


train = partial(resumed.train, vocab_size=CONFIG.vocab_size)


def test_a_resumed_run_goes_on_bit_for_bit_and_an_export_is_of_one_dtype(tmp_path: Path) -> None:
    first = session_of(tiny.BF16)
    before = {name: value.clone() for name, value in first.build.local_parameters()}
    train(first, range(2))
    for name, value in first.build.local_parameters():
        is_trained = name.startswith("blocks.3.")
        assert value.dtype == (torch.float32 if is_trained else torch.bfloat16)
        assert torch.equal(value, before[name]) != is_trained
    about = {"seed": 0, "model_kind": "decoder", "model_config": encode(CONFIG)}
    assert save(tmp_path, 2, first.build, first.loop.optimizer, about, keep=1) == ""
    reader = Reader(step_folder(tmp_path, 2))
    again, wide = session_of(tiny.BF16, reader=reader), session_of(reader=reader)
    assert {value.dtype for _, value in wide.build.local_parameters()} == {torch.float32}
    held = dict(first.build.local_parameters())
    for session in (again, wide):
        assert all(torch.equal(value, held[name].to(value.dtype)) for name, value in session.build.local_parameters())
    losses = [train(session, range(2, 5)) for session in (first, again, wide)]
    assert losses[0] == losses[1]
    assert losses[2] == pytest.approx(losses[0], rel=2e-2)
    written = load_file(export(reader.folder, tmp_path / "out", report=lambda _: None) / "model.safetensors")
    assert {value.dtype for value in written.values()} == {torch.float32}
    assert torch.equal(written["model.embed_tokens.weight"], before["embed.tokens.weight"].float())


def test_storing_them_in_bf16_changes_no_bit_of_a_step() -> None:
    """They are cast where they are used anyway."""
    narrow, wide = session_of(tiny.BF16), session_of(tiny.BF16)
    with torch.no_grad():
        for _, parameter in wide.build.named_parameters():
            parameter.data = parameter.data.float()
    assert train(narrow, range(3)) == train(wide, range(3))
