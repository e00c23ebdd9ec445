"""`mw plan --change, --train, --freeze, --optimizer` with a named model, and sequences beyond its positions.

Tests of `cli/arguments.py`.
"""

from __future__ import annotations

import json
import shlex

import pytest
from command import mw

PLAN = ("plan", "--cluster", "2xh100", "--batch", "8", "--seq", "512", "--top", "1", "--json")


def best(*flags: str) -> dict[str, object]:
    done = mw(*PLAN, "--model", "gpt2-124m", *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["best"]["forecast"]


def test_dimensions_optimizer_and_frozen_parts_change_the_answer_as_in_a_run_file() -> None:
    plain = best()
    kept = plain["peak_bytes_by_category"]
    shallow = best("--change", "num_layers=2")
    assert shallow["peak_bytes_by_category"]["parameters"] < 0.8 * kept["parameters"]
    frozen = best("--train", "blocks.11.*", "--pin", "replicate=2")
    assert frozen["peak_bytes_by_category"]["optimizer"] < 0.1 * kept["optimizer"]
    sgd = best("--optimizer", "sgd,momentum=0")
    assert sgd["peak_bytes_by_category"].get("optimizer", 0) == 0


def test_flags_win_over_the_run_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\nname = "gpt2-124m"\ntrain = ["blocks.0.*"]\n[data]\ntrain = "x"\nsequence = 512\n'
        '[train]\nbatch = 8\nsteps = 1\noptimizer = { name = "sgd", momentum = 0.0 }\n[run]\nfolder = "r"\n'
    )
    done = mw("plan", str(file), "--cluster", "2xh100", "--json", "--optimizer", "adamw", "--train", "blocks.*")
    kept = json.loads(done.stdout)["best"]["forecast"]["peak_bytes_by_category"]
    assert kept["optimizer"] > 0.5 * kept["parameters"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--change", "num_layer=2"], ['--change num_layer: unknown key. Did you mean "num_layers"?']),
        (["--change", "num_layers"], ["--change num_layers: is not of the form a.b=c."]),
        (["--train", "blocks.99.*"], ["matches no parameter of", "whose last block is"]),
        (["--train", "nothing.*"], ['--train: "nothing.*" matches no parameter', "blocks.*.mlp.up.weight"]),
        (["--freeze", "*"], ["--freeze: nothing is left to train."]),
        (["--optimizer", "adamx", "--change", "num_layers=0"], ["--optimizer name: 'adamx'", "--change num_layers"]),
        (["--optimizer", "sgd,momentum=2"], ["--optimizer momentum: is 2"]),
        (["--optimizer", "sgd,foo=2"], ["--optimizer foo: unknown key"]),
        (["--seq", "9" * 400], ["--seq: 1e+18 tokens; gpt2-124m has positions for 1024"]),
        (["--seq", "2048"], ["--seq: 2048 tokens; gpt2-124m has positions for 1024", "--change max_sequence=2048."]),
        (["--what-if", "seq=4096"], ["--what-if seq=4096: 4096 tokens", "--change max_sequence=4096."]),
    ],
)
def test_what_is_wrong_is_named_by_its_flag(flags: list[str], words: list[str]) -> None:
    done = mw(*PLAN, "--model", "gpt2-124m", *flags)
    assert done.returncode == 2
    for each in words:
        assert each in done.stderr


def test_more_positions_are_offered_where_there_are_some() -> None:
    done = mw("plan", "--model", "llama3-8b", "--cluster", "8xh100", "--what-if", "seq=16384")
    assert done.returncode == 2
    assert "or --model llama3.1-8b," in done.stderr
    assert "--change max_sequence=16384 --change rope_scaling=llama3" in done.stderr


def test_the_next_command_simulates_the_same_model(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plan = tmp_path / "best.plan.json"
    flags = ["--change", "num_layers=3", "--train", "blocks.2.*", "--optimizer", "lion"]
    words = ["--model", "gpt2-124m", "--cluster", "2xh100", "--batch", "8", "--top", "1", "-o", str(plan), *flags]
    done = mw("plan", *words)
    next_step = done.stdout.split("next: mw ")[1].strip().replace(" \\\n", " ")
    assert "\n" not in next_step, "not a command that can be copied"
    shown = mw(*shlex.split(next_step), "--json")
    assert shown.returncode == 0, shown.stderr
    again = mw("plan", *words, "--json")
    expected = json.loads(again.stdout)["best"]["forecast"]
    told = json.loads(shown.stdout)
    assert told["peak_bytes_by_category"] == expected["peak_bytes_by_category"]
    assert told["step_seconds"] == pytest.approx(expected["step_seconds"], rel=1e-9)
