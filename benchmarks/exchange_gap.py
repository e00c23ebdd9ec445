"""Claims: what islands that seldom meet, sums in few bits, blocks that are updated seldom and groups of blocks with
losses of their own cost in loss after equal samples.

Measured: the byte-level decoder of `benchmarks/loss_gap.py`, the same weights and batches in every case; the loss on
bytes that no case has trained on, beside that of replicas that sum every gradient in float32. Another seed of the
weights says what a gap of chance is.

Run: python -m benchmarks.exchange_gap [CASE ...] [--steps 500] [--lr 2e-3 ...] [--ranks 2] [--whole] [--seed 0]
[--factors]

`--lr`: of several rates each case, and replicas too, has the one that is best for it. Islands and peers see fewer
samples in a step, and what is best for one is not for the other.
`--whole`: 0.9 M parameters and 2048 tokens a step, in place of 0.2 M and 512. `--factors`: also how many times the
steps of replicas a case needs: these are trained with fewer steps, each time with the whole schedule of the learning
rate, and the number of steps at which they have the case's loss is interpolated.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from typing import Any

import torch

from benchmarks.loss_gap import BATCH, EVALUATED, MODEL, SMALL, bytes_of_the_package, samples
from meshwright.core.codec import decode, encode
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.launch.rank_pool import RankPool
from meshwright.optimizers.update import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.verify import parity

SYNCHRONOUS = "all_reduce"
CASES: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    SYNCHRONOUS: (("replicate", {}),),
    "another seed": (("replicate", {}),),
    "DiLoCo H = 16": (("local_steps", {"every": 16}),),
    "DiLoCo H = 16, momentum 0.5": (("local_steps", {"every": 16, "outer_momentum": 0.5}),),
    "average H = 1": (("local_steps", {"every": 1, "outer": "average"}),),
    **{
        f"{outer} H = {every}, momentum 0.5": (
            ("local_steps", {"every": every, "outer": outer, "outer_momentum": 0.5}),
        )
        for outer in ("average", "nesterov")
        for every in (4, 16, 64, 256)
    },
    "average H = 16": (("local_steps", {"every": 16, "outer": "average"}),),
    "streaming H = 16": (("local_steps", {"every": 16, "fragments": 3, "overlap": 2, "blend": 0.5}),),
    "elastic H = 16": (("local_steps", {"every": 16, "outer": "elastic"}),),
    "DiLoCo H = 16, int8": (("local_steps", {"every": 16}), ("compress_gradients", {"codec": "int8"})),
    "gossip ring": (("gossip", {}),),
    "gossip exponential": (("gossip", {"graph": "exponential"}),),
    "gossip pairs": (("gossip", {"graph": "pairs"}),),
    "gossip push": (("gossip", {"graph": "push"}),),
    "gossip tree": (("gossip", {"graph": "tree"}),),
    "gossip tree, down every 4th": (("gossip", {"graph": "tree", "down": 4}),),
    "gossip ring, drift 0.02": (("gossip", {"drift": 0.02}),),
    "gossip ring, drift 0.1": (("gossip", {"drift": 0.1}),),
    "int8": (("replicate", {}), ("compress_gradients", {"codec": "int8"})),
    "sign": (("replicate", {}), ("compress_gradients", {"codec": "sign"})),
    "sign, no feedback": (("replicate", {}), ("compress_gradients", {"codec": "sign", "feedback": False})),
    "topk 1 %": (("replicate", {}), ("compress_gradients", {"codec": "topk"})),
    "powersgd r = 4": (("replicate", {}), ("compress_gradients", {"codec": "powersgd"})),
    "first half every 2nd": (("replicate", {}), ("multi_rate", {"layers": "first 2"})),
    "first half every 4th": (("replicate", {}), ("multi_rate", {"layers": "first 2", "every": 4})),
    "last half every 2nd": (("replicate", {}), ("multi_rate", {"layers": "last 2"})),
    "1 local head": (("replicate", {}),),
    "3 local heads": (("replicate", {}),),
    "local_loss, 2 groups": (("replicate", {}), ("local_loss", {})),
    "local_loss, 4 groups": (("replicate", {}), ("local_loss", {})),
    "local_loss, 4 groups, 1 cut": (("replicate", {}), ("local_loss", {"every": 2})),
}
LOCAL_HEADS = {
    "1 local head": 1,
    "3 local heads": 3,
    "local_loss, 2 groups": 1,
    "local_loss, 4 groups": 3,
    "local_loss, 4 groups, 1 cut": 3,
}
"""Of the model of a case; 0 for the others."""


def case_job(
    *, plan: str, optimizer: dict[str, Any], steps: int, seed: int, is_small: bool, local_heads: int, rank: int,
    num_ranks: int, rendezvous: str,
) -> float:  # fmt: skip
    """Held-out loss after the last step."""
    parity.enter(rank, num_ranks, rendezvous)
    chosen, rates = Plan.from_json(plan), decode(OptimizerConfig, optimizer, "optimizer")
    text = bytes_of_the_package()
    cut = len(text) * 19 // 20
    opened = open_config(replace(SMALL if is_small else MODEL, local_heads=local_heads), "bytes", seed)
    session = parity.open_session(chosen, opened, rates, dtype="float32", device=torch.device("cpu"))
    part, num_parts = session.mesh.part(chosen.sample_axes)
    rows = slice(part * chosen.batch // num_parts, (part + 1) * chosen.batch // num_parts)
    for step in range(steps):
        session.build.is_last_step = step + 1 == steps
        given = samples(text[:cut], step, chosen.batch, "cpu").rows(rows)
        session.loop.step(given, rates.lr_at(step, steps))
    held_out = (samples(text[cut:], step, chosen.batch, "cpu").rows(rows) for step in range(EVALUATED))
    total, tokens, _ = session.loop.evaluate(held_out)
    parity.leave()
    return total / tokens


SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Of the steps, for which replicas are trained."""


def steps_factor(loss: float, steps: int, losses: dict[int, float]) -> str:
    """Times the steps of replicas that a case needs for its `loss` after `steps`; `losses` of replicas by steps."""
    ordered = sorted(losses.items())
    for (fewer, above), (more, below) in itertools.pairwise(ordered):
        if below <= loss <= above:
            return f"{steps / (fewer + (more - fewer) * (above - loss) / (above - below)):.2f}"
    return "less than 1" if loss < min(losses.values()) else f"more than {steps / ordered[0][0]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, nargs="+", default=[2e-3])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--factors", action="store_true")
    parser.add_argument("cases", nargs="*", default=[*CASES])
    given = parser.parse_args()
    batch = BATCH if given.whole else BATCH // 2
    losses: dict[int, float] = {}
    shares = [round(share * given.steps) for share in SHARES[1:]] if given.factors else []
    with RankPool(given.ranks, threads_per_rank=1) as pool:
        for case, steps in [(SYNCHRONOUS, each) for each in (given.steps, *shares)] + [
            (case, given.steps) for case in given.cases if case != SYNCHRONOUS
        ]:
            techniques = []
            for name, settings in CASES[case]:
                kind = technique_named(name)
                techniques.append(kind(**settings, **({"size": given.ranks} if kind.axis else {})))
            plan = Plan(techniques=tuple(techniques), batch=batch, microbatch=batch // given.ranks)
            question = {"plan": json.dumps(encode(plan)), "steps": steps, "is_small": not given.whole}
            question |= {"seed": given.seed + (case == "another seed"), "local_heads": LOCAL_HEADS.get(case, 0)}
            by_rate = {}
            for lr in given.lr:
                question["optimizer"] = encode(OptimizerConfig(lr=lr, warmup=20))
                by_rate[lr], *_ = pool.run(
                    "benchmarks.exchange_gap:case_job", question, given.ranks, timeout_seconds=3600
                )
            best = min(given.lr, key=lambda lr: by_rate[lr])
            loss = by_rate[best]
            if case == SYNCHRONOUS:
                losses[steps] = loss
            first = losses[given.steps]
            gap = f"gap {loss - first:+.4f} ({(loss / first - 1) * 100:+.2f} %)"
            gap += f"   steps x {steps_factor(loss, steps, losses)}" if given.factors and case != SYNCHRONOUS else ""
            rates = ", ".join(f"{lr:g}: {each:.4f}" for lr, each in by_rate.items()) if len(by_rate) > 1 else ""
            print(f"{case:28} {steps:5} steps   held-out loss {loss:.4f}   {gap}   {rates}", flush=True)


if __name__ == "__main__":
    main()
