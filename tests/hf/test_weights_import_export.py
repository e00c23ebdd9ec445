"""Every family in and out: transformers' logits are ours, slices are slices (`weights_read.py`), and what we write it
loads.

Tests of `cli/ckpt.py`, `hf/weights_read.py`.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import save as save_in_pieces
from hf_models import MODELS, logits, make, quiet_transformers, randomise
from safetensors.torch import load_file, save_file

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.safetensors_folder import open_folder
from meshwright.cli.ckpt import run as ckpt
from meshwright.core.box import Box
from meshwright.core.codec import encode
from meshwright.core.errors import MeshwrightError
from meshwright.hf.config_json import read_folder
from meshwright.hf.weights_import_export import HFExport, chosen_step, export, import_hf
from meshwright.hf.weights_read import parameter_shapes, problems_of, row_blocks, source_of_folder, source_of_named
from meshwright.models.presets import DecoderConfig
from meshwright.zoo.decoder import Decoder

Made = Callable[[str], tuple[Path, Any]]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Name -> its folder and transformers' model, each made once; in several shards."""
    kept: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in kept:
            folder = tmp_path_factory.mktemp("hf") / name
            kept[name] = folder, make(name, folder, max_shard_size="100KB")
        return kept[name]

    return get


def config_of(folder: Path) -> DecoderConfig:
    config = read_folder(folder).config
    assert config is not None
    return config


def decoder_of(folder: Path) -> Decoder:
    config = config_of(folder)
    source, model = source_of_folder(folder, config), Decoder(config)
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(source(name, Box.whole(tuple(each.shape)), each.dtype))
    return model


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(made: Made, name: str) -> None:
    folder, model = made(name)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert difference(logits(decoder_of(folder)), logits(model)) < TOLERANCE


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_slices_are_slices_of_the_whole(made: Made, name: str) -> None:
    folder, _ = made(name)
    config = config_of(folder)
    source = source_of_folder(folder, config)
    for parameter, shape in parameter_shapes(config).items():
        whole = source(parameter, Box.whole(shape), torch.float32)
        for dim in range(len(shape)):
            for index in range(3):
                box = Box.whole(shape).chunk(dim, index, 3)
                assert torch.equal(source(parameter, box, torch.float32), whole[box.slices])
        inner = Box(shape, tuple(n // 3 for n in shape), tuple(n // 2 for n in shape))
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            assert torch.equal(source(parameter, inner, dtype), whole[inner.slices].to(dtype))


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_transformers_loads(made: Made, name: str, tmp_path: Path) -> None:
    folder, model = made(name)
    import_hf(folder, tmp_path / "run", report=lambda _: None)
    assert Reader(chosen_step(tmp_path / "run", None, print)).state["weights_only"] is True
    (tmp_path / "out").mkdir()  # an empty folder may be there
    checkpoint = chosen_step(tmp_path / "run", 0, print)
    out = export(checkpoint, tmp_path / "out", max_shard_bytes=60_000, report=lambda _: None)
    assert len(list(out.glob("*.safetensors"))) > 1
    again = quiet_transformers().AutoModelForCausalLM.from_pretrained(out)
    assert type(again) is type(model)
    assert torch.equal(logits(again), logits(model))
    assert (again.lm_head.weight is again.get_input_embeddings().weight) == model.config.tie_word_embeddings
    assert again.config.eos_token_id == 2
    assert config_of(out) == config_of(folder)


def test_heads_between_blocks_stay_behind(made: Made, tmp_path: Path) -> None:
    folder, model = made("llama")
    config = replace(config_of(folder), local_heads=1)
    plain = decoder_of(folder).state_dict()
    held = {
        f"parameter.{name}": plain[name] if name in plain else torch.zeros(shape)
        for name, shape in parameter_shapes(config).items()
    }
    assert len(held) == len(plain) + 2
    state = {"model_kind": "decoder", "model_config": encode(config)}
    checkpoint = save_in_pieces(tmp_path / "run", 3, held, counts=(2, 1), state=state)
    for base in (None, config_of(folder)):
        exported = HFExport.of(Reader(checkpoint), base)
        assert {f"parameter.{name}" for name in plain} == set(exported.parts)
    out = export(checkpoint, tmp_path / "out", report=lambda _: None)
    again = quiet_transformers().AutoModelForCausalLM.from_pretrained(out)
    assert difference(logits(again), logits(model)) < TOLERANCE


def test_a_checkpoint_cut_for_a_plan_is_written_whole(made: Made, tmp_path: Path) -> None:
    folder, model = made("mixtral")
    config = config_of(folder)
    held = {f"parameter.{name}": each.detach() for name, each in decoder_of(folder).named_parameters()}
    held["optimizer.exp_avg.head.norm.weight"] = torch.zeros(64)
    state = {"model_kind": "decoder", "model_config": encode(config)}
    checkpoint = save_in_pieces(tmp_path / "run", 7, held, counts=(3, 2), num_ranks=4, state=state)
    (folder / "tokenizer.json").write_text("{}")
    out = export(checkpoint, tmp_path / "out", dtype="bfloat16", original=folder, report=lambda _: None)
    again = quiet_transformers().AutoModelForCausalLM.from_pretrained(out)
    assert again.dtype == torch.bfloat16
    rounded = {name: each.bfloat16() for name, each in model.state_dict().items()}
    assert all(torch.equal(each, rounded[name]) for name, each in again.state_dict().items())
    assert (out / "tokenizer.json").read_text() == "{}"
    assert not list(tmp_path.glob("out.tmp-*"))


def test_reading_back_notices_one_changed_byte(made: Made, tmp_path: Path) -> None:
    folder, _ = made("gpt2")
    checkpoint = import_hf(folder, tmp_path / "run", report=lambda _: None)
    out = export(checkpoint, tmp_path / "out", report=lambda _: None)
    reader = Reader(checkpoint)
    HFExport.of(reader, None).compare(out)
    data = bytearray((out / "model.safetensors").read_bytes())
    data[-2] ^= 1
    (out / "model.safetensors").write_bytes(data)
    with pytest.raises(MeshwrightError, match="other values"):
        HFExport.of(reader, None).compare(out)


def test_an_export_that_cannot_be_leaves_nothing(made: Made, tmp_path: Path) -> None:
    folder, _ = made("llama")
    held = {f"parameter.{name}": each.detach() * 1e8 for name, each in decoder_of(folder).named_parameters()}
    checkpoint = save_in_pieces(tmp_path / "run", 0, held)
    config = config_of(folder)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    other = encode(config) | {"vocab_size": 97, "num_layers": 3}
    for arguments, said in (
        ({"out": tmp_path / "out"}, "--model NAME"),
        ({"out": tmp_path / "full", "config": config}, "is there already"),
        ({"out": tmp_path / "out", "config": config, "dtype": "float16"}, "too large for float16"),
        ({"out": tmp_path / "out", "config": DecoderConfig(**other)}, r"the model needs \(97, 64\)"),
    ):
        with pytest.raises(MeshwrightError, match=said):
            export(checkpoint, report=lambda _: None, **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "run"]


def rewrite(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """The same folder in one file, with other tensors or names."""
    to.mkdir()
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    held: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        held |= load_file(file)
    save_file({name: each.contiguous() for name, each in change(held).items()}, to / "model.safetensors")
    return to


def stacked(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as transformers 5 has them in memory."""
    found = {n.replace("block_sparse_moe", "mlp"): each for n, each in held.items() if ".experts." not in n}
    for layer in range(2):
        stem = f"model.layers.{layer}.block_sparse_moe.experts"
        weights = [[held[f"{stem}.{e}.{w}.weight"] for w in ("w1", "w3", "w2")] for e in range(4)]
        to = f"model.layers.{layer}.mlp.experts"
        found[f"{to}.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in weights])
        found[f"{to}.down_proj"] = torch.stack([down for _, _, down in weights])
    return found


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mixtral", stacked),
        ("gpt2", lambda held: {n.removeprefix("transformer."): each for n, each in held.items()}),
        ("gpt2", lambda held: {**held, "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}),
        ("qwen2", lambda held: {**held, "lm_head.weight": held["model.embed_tokens.weight"].clone()}),
    ],
    ids=["stacked experts", "no prefix", "a mask", "a tied head twice"],
)
def test_other_spellings(made: Made, name: str, change: Callable[..., Any], tmp_path: Path) -> None:
    folder, model = made(name)
    assert difference(logits(decoder_of(rewrite(folder, tmp_path / "other", change))), logits(model)) < TOLERANCE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda held: {n: each for n, each in held.items() if "ln_f" not in n},
            "has no tensor 'transformer.ln_f.weight'",
        ),
        (lambda held: {**held, "transformer.wpe.weight": torch.ones(32, 64)}, r"shape \(32, 64\), this model needs"),
        (lambda held: {**held, "transformer.wpe.weight": torch.ones(64, 64, dtype=torch.int8)}, "is int8"),
        (lambda held: {**held, "score.weight": torch.ones(2)}, "'score.weight' is no tensor of this model"),
        (lambda held: {**held, "lm_head.weight": torch.ones(96, 64)}, "differs from 'transformer.wte.weight'"),
    ],
    ids=["missing", "shape", "dtype", "extra", "untied"],
)
def test_tensors_that_do_not_fit(made: Made, change: Callable[..., Any], said: str, tmp_path: Path) -> None:
    folder = rewrite(made("gpt2")[0], tmp_path / "other", change)
    with pytest.raises(MeshwrightError, match=said) as caught:
        source_of_folder(folder, config_of(folder))
    assert caught.value.exit_code == 2
    assert not problems_of(open_folder(made("gpt2")[0]), config_of(folder))


def test_modules_of_transformers_by_their_own_names(tmp_path: Path) -> None:
    transformers = quiet_transformers()
    small = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    models = {
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(**small, intermediate_size=48)),
        "t5": transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2)
        ),
        "mixtral": transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**small, intermediate_size=48, num_key_value_heads=2, num_local_experts=3)
        ),
        "gpt_neox": transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**small, intermediate_size=48)),
        "opt": transformers.OPTForCausalLM(transformers.OPTConfig(**small, ffn_dim=48, word_embed_proj_dim=16)),
        "qwen3_moe": transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**small, num_key_value_heads=2, moe_intermediate_size=24, num_experts=3)
        ),
    }
    for name, model in models.items():
        randomise(model).save_pretrained(tmp_path / name)
        source = source_of_named(tmp_path / name, model)
        for each, value in model.named_parameters():
            for box in row_blocks(tuple(value.shape), most_elements=200):
                assert torch.equal(source(each, box, torch.float32), value.detach()[box.slices])
    with pytest.raises(MeshwrightError, match=r"has no tensor 'shared\.weight'"):
        source_of_named(tmp_path / "bert", models["t5"])
    assert read_folder(tmp_path / "bert").config is None
    checkpoint = import_hf(tmp_path / "bert", tmp_path / "run", report=lambda _: None)
    out = export(checkpoint, tmp_path / "out", report=lambda _: None)
    again = transformers.BertForMaskedLM.from_pretrained(out)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), models["bert"].parameters(), strict=True))


def test_learnt_buffers_are_read_too(tmp_path: Path) -> None:
    transformers = quiet_transformers()
    config = transformers.DeepseekV3Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
        v_head_dim=8,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config)
    corrections = dict(model.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"]
    corrections.copy_(torch.tensor([0.5, -1.0, 2.0, 0.0]))
    wanted = corrections.clone()
    model.save_pretrained(tmp_path / "moe")
    corrections.zero_()
    source_of_named(tmp_path / "moe", model)
    assert torch.equal(corrections, wanted)


def test_the_command_imports_and_exports(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, model = made("qwen2")
    plain = {"model": None, "dtype": None, "step": None, "adapter_only": False}
    ckpt(Namespace(action="import", folder=str(folder), target=str(tmp_path / "run"), **plain))
    export_it = Namespace(action="export", folder=str(tmp_path / "run"), target=str(tmp_path / "out"), **plain)
    export_it.model, export_it.dtype, export_it.step = str(folder), "float32", 0
    assert ckpt(export_it) == 0
    assert "each equal to step 0" in capsys.readouterr().out
    again = quiet_transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again), logits(model))
    for changes, said in (
        ({"target": None}, "needs a second folder"),
        ({"step": 5}, "has no step 5"),
        ({"model": "llama9"}, "no model is called"),
        ({"model": "byte-tiny", "target": str(tmp_path / "other")}, "the model needs"),
        ({"folder": str(tmp_path / "nowhere")}, "no such folder"),
    ):
        with pytest.raises(MeshwrightError, match=said) as caught:
            ckpt(Namespace(**vars(export_it) | changes))
        assert caught.value.exit_code == 2


def test_an_import_does_not_touch_a_run_that_has_checkpoints(made: Made, tmp_path: Path) -> None:
    import_hf(made("llama")[0], tmp_path, report=lambda _: None)
    before = json.loads((tmp_path / "step-00000000" / "manifest.json").read_text())["digest"]
    with pytest.raises(MeshwrightError, match="has checkpoints already"):
        import_hf(made("gpt2")[0], tmp_path, report=lambda _: None)
    assert json.loads((tmp_path / "step-00000000" / "manifest.json").read_text())["digest"] == before
