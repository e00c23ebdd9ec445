"""What `mw check` must not alarm about: plans of odd sizes, modules that draw, round or skip; and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.codec import decode
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.launch.rank_pool import RankPool
from meshwright.run.run_file import RunConfig
from meshwright.verify.check import Checked, check

SIZES = {"num_layers": 4, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 24, "init_std": 0.2}
ODD = {"name": "byte-tiny", "change": SIZES | {"vocab_size": 257, "tied": True}}
"""Words that no axis divides, as GPT-2's 50257."""


class Layer(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 128), nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(self.norm(x)))
        if self.kind == "dropout":
            inner = F.dropout(inner, 0.2, self.training)
        out = self.down(inner)
        if self.kind == "path" and self.training:
            out = out * out.new_empty((out.shape[0], 1, 1)).bernoulli_(0.8).div_(0.8)
        if self.kind == "rounds":
            out = F.softmax(out.float(), -1).to(x.dtype)
        return x + out


class Words(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.embed, self.out = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(3))
        self.kind = kind

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            if self.kind != "skips" or number == 0 or int(tokens[0, 0]) % 2:
                x = layer(x)
        return self.out(x)


def words(kind: str) -> nn.Module:
    return Words(kind)


def foreign(kind: str) -> dict[str, Any]:
    return {"factory": "test_healthy:words", "arguments": {"kind": kind}}


def checked(folder: Path, pool: RankPool, model: dict[str, Any], *techniques: dict[str, Any]) -> Checked:
    (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog; " * 100, encoding="utf-8")
    data = {"train": str(folder / "corpus.txt"), "sequence": 16, "held_out_fraction": 0.0}
    train = {"batch": 12, "steps": 8, "optimizer": {"lr": 1e-2, "clip": 0.5}}
    config = decode(RunConfig, {"model": model, "data": data, "train": train, "run": {"folder": str(folder)}}, "")
    made = [technique_named(each["name"])(**{k: v for k, v in each.items() if k != "name"}) for each in techniques]
    return check(config, Plan(techniques=tuple(made), batch=12, microbatch=2), pool=pool)


def t(name: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, **settings}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "techniques"),
    [
        pytest.param(ODD, [t("tensor", size=2), t("pipeline", size=2)], id="ragged-tensor-pipeline"),
        pytest.param(ODD, [t("shard", size=2), t("context", size=2)], id="ragged-shard-context", marks=SLOW),
        pytest.param(ODD, [t("shard", size=2), t("tensor", size=2)], id="ragged-shard-tensor", marks=SLOW),
        pytest.param(foreign("path"), [t("tensor", size=2)], id="paths", marks=SLOW),
        pytest.param(foreign("skips"), [t("recompute")], id="no-gradient"),
    ],
)
def test_a_healthy_plan_passes(tmp_path: Path, pool: RankPool, model: dict[str, Any], techniques: list[Any]) -> None:
    found = checked(tmp_path, pool, model, *techniques)
    assert [(part.departures[:1], part.traffic[:1]) for part in found.parts if not part.passed] == []
    assert all(part.tolerance == 1e-9 for part in found.parts)


def test_dropout_is_kept_where_ranks_differ_in_samples_only(tmp_path: Path, pool: RankPool) -> None:
    found = checked(tmp_path, pool, foreign("dropout"), t("replicate", size=2), t("recompute"))
    assert found.passed
    assert [part.what for part in found.parts] == ["in float64"]


@pytest.mark.slow
def test_dropout_is_kept_on_one_rank_where_ranks_draw_otherwise(tmp_path: Path, pool: RankPool) -> None:
    found = checked(tmp_path, pool, foreign("dropout"), t("pipeline", size=2), t("recompute"))
    assert found.passed
    assert [part.what for part in found.parts] == ["dropout off, in float64", "one rank, dropout kept, in float64"]


def test_a_module_that_rounds_inside_sets_the_tolerance(tmp_path: Path, pool: RankPool) -> None:
    found = checked(tmp_path, pool, foreign("rounds"), t("tensor", size=2))
    (part,) = found.parts
    assert found.passed
    assert 1e-9 < part.tolerance < 1e-5
    assert "one device departs from itself" in part.tolerance_from


def test_what_the_command_refuses_is_refused_from_python_too(tmp_path: Path, pool: RankPool) -> None:
    with pytest.raises(MeshwrightError, match="6 equal chunks"):
        checked(tmp_path, pool, {"name": "byte-tiny"}, t("context", size=3))
    with pytest.raises(MeshwrightError, match="64 equal pieces"):
        checked(tmp_path, pool, {"name": "byte-tiny"}, t("chunked_loss", chunks=64))


def test_numbers_drawn_can_be_their_means() -> None:
    from meshwright.verify.reference import MeanDraws

    with MeanDraws():
        x = torch.full((4, 3), 2.0, requires_grad=True)
        y = F.dropout(x, 0.5, True)
        y.sum().backward()
        assert torch.equal(y, x)
        assert torch.equal(x.grad, torch.ones(4, 3))
        assert float(torch.rand(2)[0]) == 0.5
