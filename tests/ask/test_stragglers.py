"""`mw plan --stragglers`: against a pipeline's recurrence over all ways to be slow, closed forms, and what is read."""

from __future__ import annotations

import itertools
import json

import pytest

from meshwright.ask.question import Question
from meshwright.ask.stragglers import Stragglers, forecast_stragglers, read_stragglers
from meshwright.cli.main import main
from meshwright.core.errors import Problem
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import profile
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.simulator.pricing import stage_plan

QUESTION = Question(
    profile=profile("byte-3m"),
    cluster=cluster("1x4xh100"),
    batch=8,
    sequence=128,
    allow="exact",
    optimizer=OptimizerConfig(),
)


def _gpipe_seconds(stages: list[tuple[float, float, float]], count: int, send: float) -> float:
    """Forwards of all microbatches, then their backwards in reverse, then the update; (forward, backward, update)."""
    last = len(stages) - 1
    forward = [[0.0] * count for _ in stages]
    backward = [[0.0] * count for _ in stages]
    for s, m in itertools.product(range(len(stages)), range(count)):
        start = max(forward[s][m - 1] if m else 0.0, forward[s - 1][m] + send if s else 0.0)
        forward[s][m] = start + stages[s][0]
    for s, m in itertools.product(reversed(range(len(stages))), range(count)):
        mine = backward[s][m - 1] if m else forward[s][-1]
        backward[s][m] = max(mine, backward[s + 1][m] + send if s < last else 0.0) + stages[s][1]
    return max(backward[s][-1] for s in range(len(stages))) + max(stage[2] for stage in stages)


def test_a_pipeline_takes_what_all_ways_to_be_slow_take_on_average() -> None:
    plan = Plan(techniques=(technique_named("pipeline")(size=4, schedule="gpipe"),), batch=8, microbatch=1)
    staged = stage_plan(QUESTION.profile, plan, QUESTION.cluster, sequence=128, optimizer=QUESTION.optimizer)
    usual = [(s.all_seconds.forward, s.all_seconds.backward, s.tail_seconds) for s in staged.unfolded]
    mean = 0.0
    for slow in itertools.product((False, True), repeat=4):
        chance = 0.2 ** sum(slow) * 0.8 ** (4 - sum(slow))
        times = [
            tuple(3 * part if is_slow else part for part in each) for each, is_slow in zip(usual, slow, strict=True)
        ]
        mean += chance * _gpipe_seconds(times, 8, float(staged.send_seconds))
    found = forecast_stragglers(Stragglers(share=0.2, factor=3.0), plan, QUESTION)
    assert found.slowdown == pytest.approx(mean / _gpipe_seconds(usual, 8, float(staged.send_seconds)), rel=0.05)
    assert found.waiting_share == pytest.approx(1 - 0.8**4)
    for share, factor in ((0.0, 3.0), (0.2, 1.0)):
        assert forecast_stragglers(Stragglers(share=share, factor=factor), plan, QUESTION).slowdown == pytest.approx(1)


def test_replicas_wait_for_the_slowest_and_sums_keep_their_time() -> None:
    plan = Plan(techniques=(technique_named("replicate")(size=4),), batch=8)
    always = forecast_stragglers(Stragglers(share=1.0, factor=2.0), plan, QUESTION).slowdown
    found = forecast_stragglers(Stragglers(share=0.1, factor=2.0), plan, QUESTION)
    assert 1.1 < always < 2  # all but the exposed sum of gradients
    assert found.slowdown == pytest.approx(1 + (1 - 0.9**4) * (always - 1))
    assert found.slowdown_alone == pytest.approx(1 + 0.1 * (always - 1))


@pytest.mark.parametrize("text", ["2", "0.1x", "x2", "1.5x2", "0.1x0.5", "0.1xinf", "0.1x1e300", "nanx2", "-0.1x2"])
def test_what_is_not_a_share_and_a_slowdown_is_refused(text: str) -> None:
    problems: list[Problem] = []
    read_stragglers(text, problems)
    assert len(problems) == 1


def test_the_command_says_it_in_words_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    question = ["plan", "--model", "byte-3m", "--cluster", "1x4xh100", "--batch", "8", "--stragglers"]
    assert main([*question, "0.1x2", "--pin", "replicate=4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["stragglers"]
    assert found["waiting_share"] == pytest.approx(1 - 0.9**4)
    assert found["slowdown"] > found["slowdown_alone"] > 1
    assert main([*question, "nonsense", "--pin", "nonsense"]) == 2
    said = capsys.readouterr().err
    assert said.count("nonsense") >= 2
    assert "--stragglers" in said
