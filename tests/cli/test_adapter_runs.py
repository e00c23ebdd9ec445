"""`mw` with low-rank adapters: planned for a small card, trained, resumed, checked and exported.

Tests of `cli/arguments.py`, `cli/ckpt.py`, `run/model.py`.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from command import RUN, mw, write_run
from safetensors.torch import load_file

LLAMA = ("plan", "--model", "llama3-8b", "--cluster", "rtx4090", "--seq", "2048", "--batch", "8", "--top", "1")
TUNED = RUN.replace(
    'name = "byte-tiny"',
    'name = "byte-tiny"\nchange = {{ hidden_size = 64, ffn_size = 128 }}\nadapter = {{ rank = 4, base = "nf4" }}',
)


def test_an_8b_model_on_a_card_of_24_gb() -> None:
    whole = mw(*LLAMA, "--json")
    assert whole.returncode == 1, "all parameters of it do not fit"
    done = mw(*LLAMA, "--json", "--adapter", "rank=16,base=nf4")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)["best"]["forecast"]
    assert answer["peak_bytes"] < 24e9
    kept = answer["peak_bytes_by_category"]
    # 6.98 B elements of blocks in 4.5 bits, embedding, head and norms in bf16, 41.9 M trained in float32.
    assert kept["parameters"] == 6_979_321_856 * 9 // 16 + 2 * (8_030_261_248 - 6_979_321_856) + 4 * 41_943_040
    assert kept["optimizer"] == 8 * 41_943_040
    wider = json.loads(mw(*LLAMA, "--json", "--adapter", "rank=16,base=int8").stdout)["best"]["forecast"]
    assert wider["peak_bytes_by_category"]["parameters"] == kept["parameters"] + 6_979_321_856 // 2


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("rank=0", "--adapter rank: is 0. Use at least 1."),
        ("rank=5000", "--adapter rank: is 5000, and attention.key has no more than 1024."),
        ("base=nf4", "--adapter rank: missing."),
        ("rank=8,base=fp4", "--adapter base: 'fp4' is not one of its values."),
        ('rank=8,targets=["q_proj","mlp.*"]', '--adapter targets: "q_proj" matches no linear layer of a block.'),
        ("rank=8,dropout=0.1", "--adapter dropout: unknown key."),
        ("16", "--adapter 16: is not of the form a.b=c."),
    ],
)
def test_what_is_wrong_is_named_by_the_flag(flag: str, said: str) -> None:
    done = mw(*LLAMA, "--adapter", flag)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_next_command_simulates_the_same_adapters(tmp_path: Path) -> None:
    plan, flags = str(tmp_path / "best.plan.json"), ["--adapter", "rank=16,base=nf4"]
    done = mw(*LLAMA, *flags, "-o", plan)
    next_step = shlex.split(done.stdout.split("next: mw ")[1].replace("\\\n", " "))  # as a shell reads it
    shown = mw(*next_step, "--json")
    assert shown.returncode == 0, shown.stderr
    expected = json.loads(mw(*LLAMA, *flags, "--json").stdout)["best"]["forecast"]
    assert json.loads(shown.stdout)["peak_bytes_by_category"] == expected["peak_bytes_by_category"]


def test_adapters_are_trained_resumed_checked_and_exported(tmp_path: Path) -> None:
    file = write_run(tmp_path, TUNED)
    first = mw("train", file, "--set", "train.steps=4")
    assert first.returncode == 0, first.stderr
    again = mw("train", file, "--set", "train.steps=8", "--set", "run.ranks=1")
    assert again.returncode == 0, again.stderr
    done = mw("check", file)
    assert done.returncode == 0, done.stdout + done.stderr
    run = str(tmp_path / "run")
    outs = {step: tmp_path / f"adapter-{step}" for step in (4, 8)}
    for step, out in outs.items():
        done = mw("ckpt", "export", run, str(out), "--adapter-only", "--step", str(step))
        assert done.returncode == 0, done.stderr
    before, after = (load_file(out / "adapter_model.safetensors") for out in outs.values())
    assert before.keys() == after.keys()
    assert all(not before[name].equal(after[name]) for name in before)
    merged = mw("ckpt", "export", run, str(tmp_path / "merged"))
    assert merged.returncode == 0, merged.stderr
    weights = [load_file(tmp_path / "merged" / "model.safetensors"), after]
    name = "model.layers.1.self_attn.q_proj"
    low = after[f"base_model.model.{name}.lora_B.weight"] @ after[f"base_model.model.{name}.lora_A.weight"]
    assert low.abs().max() > 0
    assert weights[0][f"{name}.weight"].shape == low.shape
