"""Reading a run file runs nobody's code; what only the model can tell is told later, with the same place.

Tests of `run/model.py`.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command import RUN, clean_environment, write_run

from meshwright.core.codec import decode, encode
from meshwright.core.errors import MeshwrightError
from meshwright.run.model import ModelDescription, describe, describe_run, open_model
from meshwright.run.run_file import ModelSection, read_run

FACTORY = RUN.replace('name = "byte-tiny"', 'factory = "watched_model:make"')
WATCHED = """
import os
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

def note(what):
    with open(os.environ["WATCHED"], "a") as file:
        file.write(f"{os.getpid()} {os.getppid()} {what}\\n")

note("imported")

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 256), nn.Linear(256, 16))

    def forward(self, x):
        return x + self.inner(x), None, (torch.float32, 3)

class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scores = nn.Linear(16, 256)

    def forward(self, tokens):
        if isinstance(self.words.weight, FakeTensor):
            note("traced")
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)[0]
        return self.scores(x)

def make():
    note("made")
    return Watched()
"""


def watched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / "watched_model.py").write_text(WATCHED, encoding="utf-8")
    monkeypatch.setenv("WATCHED", str(folder / "watched.txt"))
    monkeypatch.chdir(folder)
    return write_run(folder, FACTORY)


def test_reading_a_run_file_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_run(watched(tmp_path, monkeypatch), ["data.sequence=9999999", 'model.freeze=["nothing.*"]'])
    assert config.model.factory == "watched_model:make"
    assert not (tmp_path / "watched.txt").exists()
    assert decode(type(config), encode(config), "") == config


def test_what_the_model_tells_has_its_line_of_the_run_file(tmp_path: Path) -> None:
    path = write_run(tmp_path, RUN.replace("sequence = 32", "sequence = 99999"))
    with pytest.raises(MeshwrightError) as caught:
        describe_run(read_run(path))
    (problem,) = caught.value.problems
    assert problem.where == f"{path}:5: data.sequence"
    assert "has positions for" in problem.what
    with pytest.raises(MeshwrightError) as caught:
        describe_run(read_run(write_run(tmp_path), ["data.sequence=99999", 'model.freeze=["nothing.*"]']))
    assert caught.value.problems[0].where.startswith(("--set", path))


def test_a_description_is_the_same_after_a_journey_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_run(watched(tmp_path, monkeypatch))
    sections = [config.model, ModelSection(name="byte-tiny"), ModelSection(name="vgg-tiny")]
    for section in sections:
        described = describe(section, 32)
        arrived = decode(ModelDescription, json.loads(json.dumps(encode(described))), "description")
        assert arrived == described
        assert arrived.profile.fingerprint == described.profile.fingerprint
        assert open_model(arrived, 0).profile == described.profile
    sys.modules.pop("watched_model")


RANDOM = """
import random

import numpy
import torch
from torch import nn


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [random.randint(1, 500), int(torch.randint(1, 500, ())), int(numpy.random.randint(1, 500))]
        blocks = [nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for width in widths]
        self.layers = nn.Sequential(nn.Embedding(256, 8), *blocks)
        self.head = nn.Linear(8, 256)

    def forward(self, tokens):
        return self.head(self.layers(tokens))


def make():
    print("not a result")
    return Drawn()
"""


def test_a_factory_that_draws_its_module_is_seeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ranks are, by one thread at a time; the process draws on as it would have."""
    (tmp_path / "drawn_model.py").write_text(RANDOM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    section = ModelSection(factory="drawn_model:make")
    random.seed(5)
    expected = random.random()
    random.seed(5)
    with ThreadPoolExecutor(2) as pool:
        one, other, third = pool.map(lambda seed: describe(section, 32, seed), (3, 3, 4))
    assert random.random() == expected
    assert one == other
    assert one.profile.fingerprint != third.profile.fingerprint
    assert "not a result" not in capsys.readouterr().out
    opened = open_model(one, 3)
    shapes = {name: tuple(value.shape) for name, value in opened.model.module.named_parameters()}  # type: ignore[attr-defined]
    assert sum(math.prod(shape) for shape in shapes.values()) == one.profile.num_params
    sys.modules.pop("drawn_model")


def test_a_module_is_looked_at_once_in_the_parent_and_never_in_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess

    path = watched(tmp_path, monkeypatch)
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright.cli.main", "train", path, "--set", 'plan.pin=["pipeline=2"]'],
        stderr=subprocess.PIPE,
        env=clean_environment() | {"WATCHED": os.environ["WATCHED"]},
    )
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said.decode()
    notes = Counter(line for line in (tmp_path / "watched.txt").read_text(encoding="utf-8").splitlines())
    made = {line.split()[0]: count for line, count in notes.items() if line.endswith("made")}
    traced = {line.split()[0] for line in notes if line.endswith("traced")}
    assert len(made) == 3
    assert set(made.values()) == {1}
    parents = dict(line.split()[:2] for line in notes)
    (supervisor,) = traced
    assert parents.pop(supervisor) == str(process.pid)
    assert set(parents.values()) == {supervisor}
