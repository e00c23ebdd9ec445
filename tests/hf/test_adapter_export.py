"""Adapters trained on a Hugging Face folder: merged, transformers computes what ours do; by themselves, PEFT does.

Tests of `hf/weights_import_export.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import save as save_in_pieces
from hf_models import SIZES, logits, quiet_transformers, randomise
from safetensors.torch import load_file

from meshwright.core.box import Box
from meshwright.core.errors import MeshwrightError
from meshwright.hf.weights_import_export import export
from meshwright.models.dimensions import Adapter
from meshwright.run.model import describe, open_model
from meshwright.run.run_file import ModelSection

BASES = ("bf16", "int8", "nf4")
TARGETS = ("attention.query", "attention.value", "mlp.*")


def folder_of(path: Path, kind: str = "Llama", **changes: Any) -> Path:
    transformers = quiet_transformers()
    torch.manual_seed(0)
    sizes = SIZES | {"intermediate_size": 128} if kind == "Llama" else {"n_embd": 64, "n_layer": 1, "n_head": 4}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, "vocab_size": 96, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model).save_pretrained(path)
    return path


def checkpoint_of(folder: Path, root: Path, base: Any, *, is_trained: bool = True) -> tuple[Path, Any]:
    """A checkpoint in pieces, and the model that it holds."""
    section = ModelSection(hf=str(folder), adapter=Adapter(rank=4, alpha=6.0, base=base, targets=TARGETS))
    description = describe(section, 16)
    opened = open_model(description, 0)
    held, generator = {}, torch.Generator().manual_seed(1)
    for name, each in opened.model.named_parameters():
        dtype = torch.float32 if each.is_floating_point() else each.dtype
        value = opened.source(name, Box.whole(tuple(each.shape)), dtype)
        if name.endswith("lora_B"):
            assert not value.any()
            value = torch.empty_like(value).normal_(0, 0.1 * is_trained, generator=generator)
        held[f"parameter.{name}"] = value
    model = opened.model.to_empty(device="cpu")
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(held[f"parameter.{name}"])
    state = description.about()
    return save_in_pieces(root, 3, held, counts=(2, 1), state=state), model


@pytest.mark.parametrize("base", BASES)
def test_merged_weights_compute_what_adapters_do(base: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf")
    checkpoint, model = checkpoint_of(folder, tmp_path / "run", base)
    out = export(checkpoint, tmp_path / "out", report=lambda _: None)
    merged = quiet_transformers().AutoModelForCausalLM.from_pretrained(out)
    wanted = logits(model)
    assert float((logits(merged) - wanted).abs().max() / wanted.abs().max()) < 1e-5
    before = load_file(folder / "model.safetensors")
    after = load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    adapted = {"q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}
    assert moved == (adapted if base == "bf16" else adapted | {"k_proj", "o_proj"})


@pytest.mark.parametrize("base", BASES)
def test_adapters_by_themselves_are_loaded_by_peft(base: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = folder_of(tmp_path / "hf")
    checkpoint, model = checkpoint_of(folder, tmp_path / "run", base)
    # The weights as they were stored, for PEFT to add adapters to.
    untrained, _ = checkpoint_of(folder, tmp_path / "first", base, is_trained=False)
    plain = export(untrained, tmp_path / "plain", report=lambda _: None)
    out = export(checkpoint, tmp_path / "adapter", adapter_only=True, report=lambda _: None)
    assert sorted(each.name for each in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = peft.PeftModel.from_pretrained(quiet_transformers().AutoModelForCausalLM.from_pretrained(plain), str(out))
    settings = loaded.peft_config["default"]
    assert (settings.r, settings.lora_alpha) == (4, 6.0)
    assert settings.base_model_name_or_path == str(folder)
    assert settings.target_modules == {"q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}
    wanted = logits(model)
    assert float((logits(loaded.eval()) - wanted).abs().max() / wanted.abs().max()) < 1e-5
    with loaded.disable_adapter():
        assert float((logits(loaded) - wanted).abs().max() / wanted.abs().max()) > 1e-3


def test_what_has_no_adapters_or_no_place_for_them_is_refused(tmp_path: Path) -> None:
    gpt = folder_of(tmp_path / "gpt", "GPT2", n_positions=32)
    section = ModelSection(hf=str(gpt), adapter=Adapter(rank=2))
    opened = open_model(describe(section, 16), 0)
    shapes = {name: Box.whole(tuple(each.shape)) for name, each in opened.model.named_parameters()}
    held = {f"parameter.{name}": opened.source(name, box, torch.float32) for name, box in shapes.items()}
    checkpoint = save_in_pieces(tmp_path / "run", 1, held, counts=(1,), state=describe(section, 16).about())
    with pytest.raises(MeshwrightError, match="no adapter of ours fits"):
        export(checkpoint, tmp_path / "out", adapter_only=True, report=lambda _: None)
    merged = export(checkpoint, tmp_path / "merged", report=lambda _: None)
    state = describe(ModelSection(hf=str(gpt)), 16).about()
    plain = {name: value for name, value in held.items() if ".lora_" not in name}
    checkpoint = save_in_pieces(tmp_path / "plain", 1, plain, counts=(1,), state=state)
    with pytest.raises(MeshwrightError, match="has no adapters"):
        export(checkpoint, tmp_path / "out", adapter_only=True, report=lambda _: None)
    assert not (tmp_path / "out").exists()
    assert json.loads((merged / "config.json").read_text())["model_type"] == "gpt2"
