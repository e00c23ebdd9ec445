"""What ranks run for `test_shard`: what is there of the second copy, and among whom it is gathered."""

from __future__ import annotations

import json
from typing import Any

import tiny
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.models.presets import DecoderConfig
from meshwright.optimizers.update import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.verify import parity


def second_copy_job(
    *, plan: dict[str, Any], config: dict[str, Any], dtype: str, rank: int, num_ranks: int, rendezvous: str
) -> dict[str, Any]:
    """Bytes of the copy at each backward, after the step and after an evaluation."""
    parity.enter(rank, num_ranks, rendezvous)
    chosen, rates = Plan.from_json(json.dumps(plan)), decode(OptimizerConfig, tiny.ADAMW, "optimizer")
    shape = decode(DecoderConfig, config, "config")
    session = parity.open_session(chosen, open_config(shape, "tiny", 0), rates, dtype=dtype, device=torch.device("cpu"))
    (exchange,) = session.build.exchanges
    inner, held = exchange.before_backward, list[int]()

    def held_bytes() -> int:
        sharded = [fully_shard.state(module)._fsdp_param_group for module in exchange.wrapped]
        params = [each for group in sharded if group is not None for each in group.fsdp_params]
        copies = [getattr(each, "_sharded_post_forward_param_data", None) for each in params]
        return sum(copy.untyped_storage().nbytes() for copy in copies if copy is not None)

    def before_backward(chunk: int, *, is_last: bool) -> None:
        held.append(held_bytes())
        inner(chunk, is_last=is_last)

    exchange.before_backward = before_backward
    samples = parity.random_samples(shape.vocab_size, chosen.batch, tiny.SEQUENCE)
    given = parity.own_samples(session, samples, 0)
    session.loop.step(given, rates.lr)
    answer = {"during": held, "after_step": held_bytes()}
    session.loop.evaluate([given])
    answer["after_evaluation"] = held_bytes()
    groups = {name: each for name, each in session.mesh.extra.items() if "/" in name}
    answer["ranks"] = {name: dist.get_process_group_ranks(group) for name, (group,) in groups.items()}
    parity.leave()
    return answer
