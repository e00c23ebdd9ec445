"""For people with their own loop: `build` a plan onto a model, then call `step`; or drive `train`, a generator.

Start the script with torchrun when the plan has more than one rank; with one rank nothing is needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plan import Plan
from meshwright.data.batch import part_rows
from meshwright.data.source import TextData
from meshwright.models.config import DecoderConfig, preset
from meshwright.models.cost import decoder_profile
from meshwright.models.decoder import Decoder
from meshwright.ops.mesh import Mesh, join
from meshwright.runtime.build import build as build_plan
from meshwright.runtime.config import OptimizerConfig, TrainSection
from meshwright.runtime.init import Source, from_tensors, seeded
from meshwright.runtime.loop import Loop, Samples, StepResult
from meshwright.runtime.optimizer import Optimizer
from meshwright.runtime.rank import device_of
from meshwright.runtime.train import Step, Trainer


class Built:
    """A model cut, split, wrapped and filled as the plan says, with its optimizer."""

    def __init__(self, loop: Loop):
        self._loop = loop
        self.build = loop.build

    @property
    def model(self) -> nn.Module:
        """This rank's part."""
        return self.build.model

    def rows(self, batch: int) -> slice:
        """The rows of a batch that this rank trains on."""
        part, num_parts = self.build.mesh.part(self.build.plan.sample_axes)
        return part_rows(batch, part, num_parts)

    def step(
        self, inputs: Tensor, targets: Tensor, weights: Tensor | None = None, *, lr: float | None = None
    ) -> StepResult:
        """One step on this rank's rows; `weights` of 0 leave tokens out; without a rate, the optimizer's own."""
        samples = self._samples(inputs, targets, weights)
        return self._loop.step(samples, self._loop.optimizer.config.lr if lr is None else lr)

    def evaluate(self, inputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> float:
        """Mean loss over the tokens of all ranks."""
        total, tokens = self._loop.evaluate([self._samples(inputs, targets, weights)])
        return total / tokens

    def _samples(self, inputs: Tensor, targets: Tensor, weights: Tensor | None) -> Samples:
        plan, device = self.build.plan, self.build.mesh.device
        wanted = plan.batch // plan.num_replicas
        if inputs.shape[0] != wanted or inputs.shape != targets.shape:
            what = f"this rank's inputs and targets must have {wanted} rows each, not {tuple(inputs.shape)} and "
            fix = f"Cut the batch with rows({plan.batch})."
            raise MeshwrightError([Problem(where="step", what=f"{what}{tuple(targets.shape)}.", fix=fix)])
        problems = plan.check_sequence(inputs.shape[1])
        if problems:
            raise MeshwrightError(problems)
        weights = torch.ones(inputs.shape) if weights is None else weights
        tokens = self._loop.total(weights.sum().double())
        return Samples(
            inputs=inputs.to(device),
            targets=targets.to(device),
            weights=weights.to(device, self.build.dtype),
            num_tokens=max(tokens, 1.0),
        )


def build(
    plan: Plan,
    model: Decoder | DecoderConfig | str,
    *,
    optimizer: OptimizerConfig | None = None,
    seed: int = 0,
    device: str = "",
) -> Built:
    """Apply a plan. A model that already has weights keeps them; otherwise they come from the seed."""
    mesh = _mesh(plan, device)
    meta, config, source = _on_meta(model, seed)
    made = build_plan(plan, meta, decoder_profile(config, "decoder"), mesh, source)
    return Built(Loop(made, Optimizer(optimizer or OptimizerConfig(), made)))


def train(
    plan: Plan,
    model: Decoder | DecoderConfig | str,
    data: TextData,
    settings: TrainSection,
    *,
    device: str = "",
) -> Iterator[Step]:
    """Train and yield every step."""
    mesh = _mesh(plan, device)
    meta, config, source = _on_meta(model, settings.seed)
    trainer = Trainer(plan, meta, decoder_profile(config, "decoder"), data, settings, mesh, source=source)
    yield from trainer.steps()


def _on_meta(model: Decoder | DecoderConfig | str, seed: int) -> tuple[Decoder, DecoderConfig, Source]:
    if isinstance(model, Decoder):
        config = model.config
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        is_empty = any(value.device.type == "meta" for value in weights.values())
        source = seeded(model.init_value, seed) if is_empty else from_tensors(weights)
    elif isinstance(model, str | DecoderConfig):
        config, source = preset(model) if isinstance(model, str) else model, None
    else:
        what = f"cannot apply a plan to a {type(model).__name__}."
        fix = "Give a model's name, a DecoderConfig or a meshwright.models.decoder.Decoder."
        raise MeshwrightError([Problem(where="build", what=what, fix=fix)])
    with torch.device("meta"):
        meta = Decoder(config)
    return meta, config, source or seeded(meta.init_value, seed)


def _mesh(plan: Plan, device: str) -> Mesh:
    place = device_of(device or ("cuda" if torch.cuda.is_available() else "cpu"), _local_rank())
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != plan.num_ranks:
        what = f"the plan needs {plan.num_ranks} ranks, this program was started with {ranks}."
        fix = f"Start it with: torchrun --nproc-per-node {plan.num_ranks} SCRIPT"
        raise MeshwrightError([Problem(where="build", what=what, fix=fix)])
    if plan.mesh and not dist.is_initialized():
        join(0, ranks, place)
    return Mesh.make(plan.mesh, place)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
