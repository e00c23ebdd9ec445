"""States in a few bits: held as priced, saved as any plan reads them, restored to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.step_folders import step_folder
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import DecoderConfig, profile
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.planner.search import search
from meshwright.run.model import open_config
from meshwright.runtime.checkpointing import restore_optimizer, save
from meshwright.simulator.pricing import price
from meshwright.verify import parity

CONFIG = DecoderConfig(**tiny.LLAMA | {"num_layers": 2})
ADAMW = OptimizerConfig(lr=1e-2)


def session_of(*techniques: object) -> parity.Session:
    plan = Plan(techniques=techniques, batch=4, microbatch=4)  # type: ignore[arg-type]
    opened = open_config(CONFIG, "tiny", 0)
    return parity.open_session(plan, opened, ADAMW, dtype="float32", device=torch.device("cpu"))


def train(session: parity.Session, steps: range) -> list[float]:
    samples = parity.random_samples(CONFIG.vocab_size, 4, tiny.SEQUENCE)
    return [session.loop.step(samples(step, 0, 1), 1e-2).loss for step in steps]


@pytest.mark.parametrize("technique", [tiny.LOW_BIT, tiny.LOWEST_BIT], ids=str)
def test_a_resumed_run_goes_on_bit_for_bit_and_any_plan_reads_its_states(technique: object, tmp_path: Path) -> None:
    first = session_of(technique)
    train(first, range(3))
    assert save(tmp_path, 3, first.build, first.loop.optimizer, {"seed": 0}, keep=1) == ""
    reader = Reader(step_folder(tmp_path, 3))
    weights = dict(first.build.local_parameters())

    def resumed(*techniques: object) -> parity.Session:
        session = session_of(*techniques)
        restore_optimizer(reader, session.build, session.loop.optimizer)
        for name, value in session.build.local_parameters():
            value.copy_(weights[name])
        return session

    again = resumed(technique)
    assert all(map(torch.equal, first.loop.optimizer.rule.storage(), again.loop.optimizer.rule.storage()))
    wide = resumed()
    states = {(kind, name): value for kind, name, value, _ in first.loop.optimizer.state()}
    assert len(states) == 2 * len(weights)
    assert all(torch.equal(states[kind, name], value) for kind, name, value, _ in wide.loop.optimizer.state())
    other = tiny.LOWEST_BIT if technique is tiny.LOW_BIT else tiny.LOW_BIT
    losses = [train(session, range(3, 6)) for session in (first, again, wide, resumed(other))]
    assert losses[0] == losses[1]
    assert losses[2] == pytest.approx(losses[0], rel=1e-2)
    assert losses[3] == pytest.approx(losses[0], rel=1e-2)


def test_vectors_and_small_matrices_keep_float32() -> None:
    rule = session_of(technique_named("lowbit_optimizer")(smallest=400)).loop.optimizer.rule
    sizes = {state.name: state.value.numel() for state in rule.kept()}
    dtypes = [tensor.dtype for tensor in rule.storage()]
    num_coded = sum(size >= 400 for size in sizes.values())
    assert 0 < num_coded < len(sizes)
    assert dtypes.count(torch.uint8) == 2 * num_coded
    assert len(dtypes) == 4 * num_coded + 2 * (len(sizes) - num_coded)


@pytest.mark.parametrize(("bits", "each"), [(8, 2 * (1 + 4 / 256)), (4, 2 * (0.5 + 4 / 128))])
def test_the_price_of_a_large_model(bits: int, each: float) -> None:
    model = profile("llama3.2-1b")
    plan = Plan(techniques=(technique_named("lowbit_optimizer")(bits=bits),), batch=1)
    works = [price(model, chosen, sequence=128) for chosen in (plan, Plan(batch=1))]
    held, wide = (sum(r.repeat * r.bytes for r in work.residents if r.category == "optimizer") for work in works)
    assert wide == 8 * model.num_params
    assert held == pytest.approx(each * model.num_params, rel=1e-3)
    moved, before = (sum(t.repeat * t.moved_bytes for t in work.computes if t.phase == "step") for work in works)
    assert before - moved == pytest.approx(2 * (wide - held))


def test_other_optimizers_are_refused_with_the_reason() -> None:
    plan = Plan(techniques=(tiny.LOW_BIT,), batch=1)
    for name in ("lion", "muon", "sgd", "adafactor"):
        (problem,) = OptimizerConfig(name=name).problems_with(plan)
        assert problem.where == "lowbit_optimizer"
        assert "adamw" in problem.fix
    assert OptimizerConfig().problems_with(plan) == []
    with pytest.raises(MeshwrightError, match="pin lowbit_optimizer: this optimizer has no form"):
        search(
            profile("byte-3m"), cluster("h100"), batch=1, sequence=128, optimizer=OptimizerConfig(name="lion"),
            pin=["lowbit_optimizer"], allow="lossy",
        )  # fmt: skip


def test_search_uses_it_only_where_lossy_numbers_are_allowed() -> None:
    model, machines = profile("llama3-8b"), cluster("h100")
    found = search(model, machines, batch=1, sequence=1024)
    assert found.best is None or found.best.plan.technique("lowbit_optimizer") is None
    found = search(model, machines, batch=1, sequence=1024, allow="lossy", optimizer=OptimizerConfig())
    assert found.best is not None
    assert found.best.plan.technique("lowbit_optimizer") is not None
    found = search(model, machines, batch=1, sequence=1024, allow="lossy", optimizer=OptimizerConfig(name="lion"))
    assert found.best is None or found.best.plan.technique("lowbit_optimizer") is None
