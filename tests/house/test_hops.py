"""How many functions of ours a reader goes through, from the user's call to torch's backward: counted, not claimed."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from house import PACKAGE

import meshwright as mw

MOST_FROM_BUILD = 4


def hops() -> list[str]:
    """Our functions on the stack."""
    frames = traceback.extract_stack()
    return [f"{Path(f.filename).name}:{f.name}" for f in frames if str(PACKAGE) in f.filename]


def test_few_hops_from_step_to_backward(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    seen: list[list[str]] = []
    plain = torch.Tensor.backward

    def backward(self: torch.Tensor, *given: object, **more: object) -> None:
        seen.append(hops())
        plain(self, *given, **more)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    built = mw.build(mw.Plan(batch=2), module, inputs=torch.zeros(1, 4), device="cpu")
    built.step(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    assert seen
    assert len(seen[-1]) <= MOST_FROM_BUILD, seen[-1]
