"""Plans whose collectives are staged as for ranks that share one GPU: on the CPU by force, on a GPU where there is one.

Tests of `ops/staged_collectives.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from tiny import plan_of

from meshwright.ops.staged_collectives import VARIABLE, is_shared

Run = Callable[..., list[dict[str, Any]]]


@pytest.mark.parametrize("techniques", tiny.SHARING, ids=tiny.joined)
def test_staged_collectives_train_as_one_device(techniques: tuple[Any, ...], ran: Run) -> None:
    plan = plan_of(*techniques)
    answers = ran(plan, tiny.model_for_sharing(plan), device="staged", prices=False)
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert all(answer["num_staged"] for answer in answers), "nothing was staged"
    assert not any(answer["num_unwaited"] for answer in answers), "a result was never waited for"


def test_ranks_share_a_gpu_only_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not is_shared(gpu)
    monkeypatch.setenv(VARIABLE, "1")
    assert is_shared(gpu)
    assert not is_shared(torch.device("cpu"))
