"""config.json by known keys: what our decoder cannot be has a reason, what is broken has a place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hf_models import LLAMA3_ROPE, SIZES

from meshwright.core.errors import MeshwrightError
from meshwright.hf.config_json import MAX_CONFIG_BYTES, HFModel, config_for, read_folder
from meshwright.models.presets import PRESETS, DecoderConfig

LLAMA = {"architectures": ["LlamaForCausalLM"], **SIZES}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": 9,
}
QWEN = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}


def read(folder: Path, value: Any) -> HFModel:
    (folder / "config.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return read_folder(folder)


def decoder(folder: Path, value: dict[str, Any]) -> DecoderConfig:
    found = read(folder, value)
    assert found.config is not None, found.reason
    return found.config


def test_both_spellings_of_rope_are_one(tmp_path: Path) -> None:
    old_scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old = decoder(tmp_path, {**LLAMA, "rope_theta": 5e5, "rope_scaling": old_scaling, "torch_dtype": "bfloat16"})
    new = decoder(tmp_path, {**LLAMA, "rope_parameters": LLAMA3_ROPE, "dtype": "bfloat16"})
    assert old == new
    assert (new.rope_scaling, new.rope_theta, new.rope_original_sequence) == ("llama3", 5e5, 32)


def test_silence_means_what_transformers_takes_it_for(tmp_path: Path) -> None:
    silent = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert decoder(tmp_path, silent).num_kv_heads == 4
    assert decoder(tmp_path, {**silent, "architectures": ["MistralForCausalLM"], "num_attention_heads": 8}) == replace(
        decoder(tmp_path, LLAMA), num_heads=8, num_kv_heads=8, sliding_window=4096
    )
    qwen3 = decoder(tmp_path, {**LLAMA, "architectures": ["Qwen3ForCausalLM"]})
    assert (qwen3.head_size, qwen3.qk_norm, qwen3.sliding_window) == (128, True, 0)
    assert (decoder(tmp_path, GPT2).tied, decoder(tmp_path, GPT2).ffn_size) == (True, 256)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({**LLAMA, "attention_bias": True}, "attention_bias is True"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias is True"),
        ({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({**LLAMA, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "part of each head"),
        ({**LLAMA, "rope_parameters": {"full": {"rope_theta": 1e4}, "local": {"rope_theta": 1e3}}}, "layers differ"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config"),
        ({**LLAMA, "sliding_window": 32}, "sliding_window is 32, which is not known here"),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 1}, "some layers have a sliding window"),
        ({**QWEN, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, "some layers"),
        ({**GPT2, "activation_function": "relu"}, "activation_function is 'relu'"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration"),
        ({"model_type": "llama"}, "no architecture"),
    ],
)
def test_what_our_decoder_cannot_be_has_a_reason(tmp_path: Path, value: dict[str, Any], said: str) -> None:
    found = read(tmp_path, value)
    assert found.config is None
    assert said in found.reason


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ("{" + '"a":{' * 100_000, "not valid JSON"),
        ('{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' is there twice"),
        ('{"vocab_size": NaN}', "not a number"),
        ('{"a": "' + "x" * MAX_CONFIG_BYTES + '"}', "the limit is"),
        ({**LLAMA, "auto_map": {"AutoModel": "modeling.Mine"}}, "custom code is not run"),
        ({**LLAMA, "architectures": ["A", "B"]}, "one class name"),
        ({**LLAMA, "architectures": "LlamaForCausalLM"}, "one class name"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size: expected a whole number"),
        ({**LLAMA, "hidden_size": True}, "hidden_size: expected a whole number"),
        ({**LLAMA, "hidden_size": -64}, "hidden_size: is -64"),
        ({**LLAMA, "num_hidden_layers": 10**12}, "num_hidden_layers: is 1000000000000"),
        ({**LLAMA, "num_attention_heads": 7}, "config.json: num_key_value_heads"),
        ({**LLAMA, "rms_norm_eps": -1.0}, "rms_norm_eps: is -1.0"),
        ({**LLAMA, "rope_theta": 0}, "rope_theta: is 0"),
        ({**LLAMA, "rope_scaling": [1]}, "rope_parameters: expected a table"),
        ({**LLAMA, "rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor: expected"),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 0, "sliding_window": -1}, "sliding_window: is -1"),
    ],
)
def test_what_is_broken_has_a_place(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        read(tmp_path, value)
    assert caught.value.exit_code == 2
    assert said in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError) as caught:
        read(tmp_path, {"architectures": ["LlamaForCausalLM"], "hidden_size": -1, "vocab_size": "many"})
    assert len(caught.value.problems) == 6


def test_a_linked_or_missing_config_is_not_followed(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match="is missing"):
        read_folder(tmp_path)
    (tmp_path / "real.json").write_text(json.dumps(LLAMA))
    (tmp_path / "config.json").symlink_to(tmp_path / "real.json")
    with pytest.raises(MeshwrightError, match="symbolic link"):
        read_folder(tmp_path)


@pytest.mark.parametrize("name", [name for name, config in PRESETS.items() if isinstance(config, DecoderConfig)])
def test_named_models_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    config = PRESETS[name]
    if config.num_shared_experts or config.router == "sigmoid":
        with pytest.raises(MeshwrightError, match=r"num_shared_experts|router"):
            config_for(config)
        return
    read_back = decoder(tmp_path, json.loads(json.dumps(config_for(config))))
    if config.num_experts:  # transformers has one intermediate_size, and no capacity
        config = replace(config, ffn_size=config.expert_ffn_size, capacity_factor=0.0)
    sized = [replace(each, head_size=each.size_of_head) for each in (read_back, config)]
    assert sized[0] == sized[1]


@pytest.mark.parametrize("changes", [{"qk_norm": True, "qkv_bias": True}, {"bias": True}, {"norm": "layer"}])
def test_what_no_family_holds_is_named(changes: dict[str, Any]) -> None:
    with pytest.raises(MeshwrightError) as caught:
        config_for(replace(PRESETS["byte-tiny"], **changes))
    assert {problem.where for problem in caught.value.problems} <= changes.keys()
    assert "needs" in str(caught.value)
