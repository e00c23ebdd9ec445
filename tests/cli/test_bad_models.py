"""Modules that know nothing of us and make trouble: each is told in a line before anything starts, or trains right.

Tests of `foreign/factory.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import RUN, mw, write_plan, write_run
from torch import Tensor, nn

from meshwright.cli.main import main
from meshwright.core.errors import MeshwrightError
from meshwright.launch.rank_pool import RankPool
from meshwright.run.model import describe_run
from meshwright.run.prepare import prepare
from meshwright.run.run_file import read_run
from meshwright.verify.check import check

HERE = Path(__file__).stem
FACTORY = RUN.replace('name = "byte-tiny"', f'factory = "{HERE}:plain"').replace("sequence = 32", "sequence = 8")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 160), nn.Linear(160, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(self.norm(x))))


class Plain(nn.Module):
    def __init__(self, vocab_size: int = 256) -> None:
        super().__init__()
        self.words, self.scores = nn.Embedding(vocab_size, 16), nn.Linear(16, vocab_size)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.scores(x)


def plain() -> nn.Module:
    return Plain()


def speaking() -> nn.Module:
    print("a factory may print")
    return Plain()


def leaving() -> None:
    sys.exit(0)


def lazy() -> nn.Module:
    module = Plain()
    module.scores = nn.LazyLinear(256)
    return module


def without_values() -> nn.Module:
    with torch.device("meta"):
        return Plain()


def whole_numbers() -> nn.Module:
    module = Plain()
    module.table = nn.Parameter(torch.arange(4), requires_grad=False)
    return module


def frozen() -> nn.Module:
    return Plain().requires_grad_(False)


def idle() -> nn.Module:
    module = Plain()
    module.forgotten = nn.Linear(2, 2)
    return module


def of_two() -> nn.Module:
    class OfTwo(Plain):
        def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(tokens)

    return OfTwo()


def with_argument(width: int) -> nn.Module:
    return Plain()


def small() -> nn.Module:
    return Plain(40)


def one_block_twice() -> nn.Module:
    module = Plain()
    module.blocks[1] = module.blocks[0]
    return module


def one_norm_for_all() -> nn.Module:
    module = Plain()
    for block in module.blocks:
        block.norm = module.blocks[0].norm
    return module


def run_twice() -> nn.Module:
    class Again(Plain):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.words(tokens)
            for block in (*self.blocks, *self.blocks):
                x = block(x)
            return self.scores(x)

    return Again()


def learnt_places() -> nn.Module:
    """Has places for just the samples of the run: examining it must not ask for more."""

    class Placed(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(torch.randn(8, 16))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.words(tokens) + self.places[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.scores(x)

    return Placed()


def one_score_for_a_text() -> nn.Module:
    class Short(Plain):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens).mean(1)

    return Short()


def pictures() -> tuple[nn.Module, None, Tensor]:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), None, torch.zeros(1, 1, 8, 8)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("leaving", ("raised SystemExit: 0", f"{HERE}.py:")),
        ("lazy", ("scores.weight has no shape yet",)),
        ("without_values", ("words.weight is on the meta device",)),
        ("whole_numbers", ("table holds int64", "buffer")),
        ("frozen", ("nothing is left to train",)),
        ("idle", ("do not depend on forgotten.weight, forgotten.bias", "model.freeze")),
        ("of_two", ("missing 1 required positional argument: 'mask'",)),
        ("with_argument", ("model.arguments", "'width'")),
        ("nowhere", ("has no function nowhere",)),
    ],
)
def test_a_factory_that_is_of_no_use_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], factory: str, words: tuple[str, ...]
) -> None:
    code = main(["train", write_run(tmp_path, FACTORY), "--set", f"model.factory={HERE}:{factory}"])
    said = capsys.readouterr()
    assert code == 2, said.err
    assert said.err.count("\n") == 1
    for word in words:
        assert word in said.err
    assert not (tmp_path / "run").exists()


def test_what_is_idle_may_be_frozen(tmp_path: Path) -> None:
    changes = [f"model.factory={HERE}:idle", 'model.freeze=["forgotten.*"]']
    assert describe_run(read_run(write_run(tmp_path, FACTORY), changes)).kind == "module"


def test_what_a_factory_prints_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, FACTORY.replace("plain", "speaking"))
    assert main(["plan", path, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["best"]
    assert "a factory may print" in said.err


@pytest.mark.parametrize("factory", ["one_block_twice", "one_norm_for_all", "run_twice"])
def test_shared_weights_train_right_or_are_refused_with_the_reason(
    tmp_path: Path, pool: RankPool, factory: str
) -> None:
    """Once, a module that stood in two places was left with the empty tensors it had been examined with."""
    path = write_run(tmp_path, FACTORY)
    config = read_run(path, [f"model.factory={HERE}:{factory}", 'plan.pin=["shard=2"]', "plan.allow=reordered"])
    checked = check(config, prepare(config, "", lambda text: None).plan, pool=pool)
    assert checked.passed, checked.parts[0]
    with pytest.raises(MeshwrightError, match=r"more than (one place|once)"):
        prepare(read_run(path, [f"model.factory={HERE}:{factory}", 'plan.pin=["pipeline=2"]']), "", lambda text: None)


@pytest.mark.parametrize("pin", ["tensor=2", "pipeline=2"])
def test_examining_a_module_asks_for_no_more_places_than_a_sample_has(tmp_path: Path, pool: RankPool, pin: str) -> None:
    changes = [f"model.factory={HERE}:learnt_places", f'plan.pin=["{pin}"]', "plan.allow=reordered"]
    config = read_run(write_run(tmp_path, FACTORY), changes)
    assert check(config, prepare(config, "", lambda text: None).plan, pool=pool).passed


def test_scores_that_do_not_fit_the_targets_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write_plan(tmp_path, {"name": "replicate", "size": 1})
    path = write_run(tmp_path, FACTORY)
    code = main(["check", path, "--plan", plan, "--set", f"model.factory={HERE}:one_score_for_a_text"])
    said = capsys.readouterr().err
    assert code == 2, said
    assert "scores are (3, 256) for targets of shape (3, 8)" in said
    assert "Traceback" not in said


def arrays(folder: Path, size: int = 8, num_classes: int = 10) -> str:
    import numpy as np

    images = np.random.default_rng(0).integers(0, 255, (40, size, size), dtype=np.uint8)
    np.savez(folder / "images.npz", images=images, labels=np.arange(40) % num_classes)
    return str(folder / "images.npz")


@pytest.mark.parametrize(
    ("factory", "data", "words"),
    [
        ("plain", arrays, ("hold images", "learns from tokens")),
        ("pictures", None, ("hold tokens", "learns from images")),
        ("pictures", lambda folder: arrays(folder, size=16), ("images are 1 x 16 x 16", "1 x 8 x 8")),
        ("pictures", lambda folder: arrays(folder, num_classes=13), ("up to 12", "scores for 10")),
        ("small", None, ("vocabulary 40", "scores for 40")),
    ],
)
def test_data_that_does_not_fit_a_module_is_told_before_it_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    factory: str,
    data: Callable[[Path], str] | None,
    words: tuple[str, ...],
) -> None:
    words_given = ["train", write_run(tmp_path, FACTORY), "--set", f"model.factory={HERE}:{factory}"]
    if data is not None:
        words_given += ["--set", f"data.train={data(tmp_path)}"]
    code = main(words_given)
    said = capsys.readouterr().err
    assert code == 2, said
    for word in words:
        assert word in said
    assert not (tmp_path / "run" / "logs").exists()


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An architecture that is none of our decoders."""
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 2}
    config = transformers.OPTConfig(vocab_size=260, num_attention_heads=2, max_position_embeddings=16, **sizes)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hf") / "opt"
    transformers.OPTForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_folder_of_another_architecture_is_trained_exported_and_loaded(tmp_path: Path, opt: Path) -> None:
    import transformers

    text = RUN.replace('name = "byte-tiny"', f'hf = "{opt}"').replace("sequence = 32", "sequence = 16")
    path = write_run(tmp_path, text.replace("steps = 8", "steps = 2"))

    def told(done: subprocess.CompletedProcess[str], code: int = 0) -> str:
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    assert "positions for 16" in told(mw("train", path, "--set", "data.sequence=17"), 2)
    told(mw("train", path, "--plan", write_plan(tmp_path, {"name": "shard", "size": 2}, microbatch=2)))
    out = tmp_path / "out"
    assert "each equal to step 2" in told(mw("ckpt", "export", str(tmp_path / "run"), str(out)))
    before = transformers.OPTForCausalLM.from_pretrained(opt)
    after, found = transformers.OPTForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(found.values())
    moved = [not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert any(moved)
    assert all(torch.isfinite(each).all() for each in after.parameters())
