"""For a training loop of your own: apply a plan with `build` and call `step`, or iterate over `train_steps`.

If the plan has more than one rank, start the script with torchrun.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.checkpoint.step_folders import step_folder
from meshwright.core.codec import encode
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.data.dataset import part_rows
from meshwright.data.open_data import Data
from meshwright.foreign.adapt import Loss, adapt
from meshwright.hf.weights_import_export import export
from meshwright.models.frozen_parameters import IsFrozen, freeze, mark
from meshwright.models.presets import Config, config_kind
from meshwright.ops.device_mesh import Mesh, join
from meshwright.ops.initial_weights import from_tensors
from meshwright.ops.model_interface import Inputs, Model, map_inputs, num_samples
from meshwright.optimizers.update import Optimizer
from meshwright.run.model import ModelDescription, OpenedModel, describe, open_config, open_model, section_named
from meshwright.run.run_file import OptimizerConfig, TrainSection
from meshwright.runtime.build import build as build_plan
from meshwright.runtime.checkpointing import save
from meshwright.runtime.loop import Loop, Samples, StepResult, on_device
from meshwright.runtime.rank import device_of, on_first
from meshwright.runtime.trainer import Trainer, TrainStep


class Built:
    """A model to which a plan was applied, with its optimizer.

    All ranks must call `step`, `evaluate`, `save` and `export` together.
    """

    def __init__(self, loop: Loop, about: Mapping[str, Any] | None = None):
        """`about`: the description of the model in checkpoints, which makes them exportable on their own."""
        self._loop, self._about = loop, dict(about or {})
        self.build = loop.build
        """The rank's share of the model: mesh, boxes, exchanges."""

    @property
    def model(self) -> nn.Module:
        """The part of the model on this rank."""
        return self.build.model

    def rows(self, batch: int) -> slice:
        """The rows of a batch that this rank trains on."""
        part, num_parts = self.build.mesh.part(self.build.plan.sample_axes)
        return part_rows(batch, part, num_parts, self.build.plan.shares)

    def step(
        self, inputs: Inputs, targets: Tensor, weights: Tensor | None = None, *, lr: float | None = None
    ) -> StepResult:
        """Train one step on this rank's rows. `weights` of 0 exclude targets; `lr` defaults to that of the optimizer.

        The loss is the weighted mean over the batch. If all weights of the batch are 0, loss and gradient are zero.
        """
        samples = self._samples(inputs, targets, weights)
        return self._loop.step(samples, self._loop.optimizer.config.lr if lr is None else lr)

    def feed(
        self, inputs: Inputs, targets: Tensor, weights: Tensor | None = None, *, lr: float | None = None
    ) -> list[StepResult]:
        """Like `step`, but without waiting where possible; return the results that are new since the last call."""
        samples = self._samples(inputs, targets, weights)
        return self._loop.feed(samples, self._loop.optimizer.config.lr if lr is None else lr)

    def flush(self) -> list[StepResult]:
        """Complete all steps, as evaluating and saving require; return the results that `feed` has not returned."""
        return self._loop.flush()

    def evaluate(self, inputs: Inputs, targets: Tensor, weights: Tensor | None = None) -> float:
        """Mean loss over the targets of all ranks; zero if all weights are 0."""
        samples = self._samples(inputs, targets, weights)
        return self._loop.evaluate([samples])[0] / samples.divisor

    def save(self, folder: str | Path) -> Path:
        """Write the weights as a checkpoint into `folder`/checkpoints, replacing earlier ones; return its path.

        Any plan can read it. `mw ckpt verify` and `mw ckpt export` accept the folder, and a new run with this
        `run.folder` starts from these weights.
        """
        self._loop.require_rest()
        root = Path(folder) / "checkpoints"
        state = {"weights_only": True, "plan": encode(self.build.plan), **self._about}
        reason = save(root, 0, self.build, self._loop.optimizer, state, keep=1)
        if reason:
            raise MeshwrightError(reason, exit_code=1)
        return step_folder(root, 0)

    def export(self, folder: str | Path, *, dtype: str = "") -> Path:
        """Write the weights to a folder that transformers loads; models other than decoders as plain safetensors.

        `dtype`: "bfloat16", "float16" or "float32"; default: that of the parameters. The folder must not exist.
        """
        out = Path(folder)
        control = self.build.mesh.control

        def make_folder() -> str:
            out.parent.mkdir(parents=True, exist_ok=True)
            return tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent)

        beside = on_first(control, make_folder)
        try:
            checkpoint = self.save(beside)
            on_first(control, lambda: str(export(checkpoint, out, dtype=dtype, report=lambda text: None)))
        finally:
            if self.build.mesh.rank == 0:
                shutil.rmtree(beside, ignore_errors=True)
        return out

    def _samples(self, inputs: Inputs, targets: Tensor, weights: Tensor | None) -> Samples:
        plan, device = self.build.plan, self.build.mesh.device
        rows = self.rows(plan.batch)
        wanted = rows.stop - rows.start
        if num_samples(inputs) != wanted or targets.shape[0] != wanted:
            what = f"this rank's inputs and targets must have {wanted} rows each, not {num_samples(inputs)} and "
            fix = f"Cut the batch with rows({plan.batch})."
            raise MeshwrightError([Problem(where="step", what=f"{what}{targets.shape[0]}.", fix=fix)])
        problems = plan.check_sequence(targets.shape[1]) if targets.ndim > 1 else ()
        if weights is not None and weights.shape != targets.shape:
            what = f"the weights are {tuple(weights.shape)} for targets of shape {tuple(targets.shape)}."
            problems = (*problems, Problem(where="step", what=what, fix="Give one weight for each target."))
        if problems:
            raise MeshwrightError(problems)
        # Without weights nothing on the device needs to be read.
        count = torch.tensor(targets.numel(), dtype=torch.float64) if weights is None else weights.double().sum()
        tokens = self._loop.total(count)
        if tokens < 0:
            what = f"the weights of the batch add up to {tokens:g}, and the loss is divided by that sum."
            raise MeshwrightError([Problem(where="step", what=what, fix="Use weights of 0 or more.")])

        def put(tensor: Tensor) -> Tensor:
            return on_device(tensor, device)

        each = torch.ones(targets.shape, device=device) if weights is None else put(weights)
        return Samples(
            inputs=map_inputs(inputs, put), targets=put(targets), weights=each.to(self.build.dtype), num_tokens=tokens
        )


def build(
    plan: Plan,
    model: nn.Module | Config | ModelDescription | str,
    *,
    inputs: Inputs | None = None,
    loss: Loss | None = None,
    optimizer: OptimizerConfig | None = None,
    seed: int = 0,
    device: str = "",
    dtype: torch.dtype = torch.float32,
) -> Built:
    """Apply a plan to a model, for a training loop of your own.

    Parameters
    ----------
    plan
        The plan. If it has more than one rank, start the program with torchrun.
    model
        Any module, with sample `inputs`; or the name of a preset, dimensions, or the result of `mw.model`. Weights of a
        module or a Hugging Face folder are used; otherwise they are initialised from the seed.
    inputs
        Sample inputs of a module: a tensor, or a tuple of tensors, with one or more samples.
    loss
        (output, targets) -> one value per target. Default: cross entropy of the scores of the module.
    optimizer
        Default: AdamW.
    device
        "cpu" or "cuda". Default: a GPU if there is one.
    dtype
        The dtype of parameters, gradients and optimizer states; float64 is for comparisons.
    """
    mesh = _mesh(plan, device)
    opened, told = _open(model, seed, inputs, loss)
    made = build_plan(plan, opened.model, opened.profile, mesh, opened.source, dtype)
    return Built(Loop(made, Optimizer(optimizer or OptimizerConfig(), made)), told)


def train_steps(
    plan: Plan,
    model: nn.Module | Config | ModelDescription | str,
    data: Data,
    settings: TrainSection,
    *,
    inputs: Inputs | None = None,
    loss: Loss | None = None,
    device: str = "",
) -> Iterator[TrainStep]:
    """Train in this process and yield every step. `model`, `inputs`, `loss` and `device` are those of `build`."""
    mesh = _mesh(plan, device)
    opened, _ = _open(model, settings.seed, inputs, loss)
    yield from Trainer(plan, opened, data, settings, mesh).steps()


def _open(
    model: nn.Module | Config | ModelDescription | str, seed: int, inputs: Inputs | None, loss: Loss | None
) -> tuple[OpenedModel, dict[str, Any]]:
    """The model on the meta device with the source of its weights, and what a checkpoint tells of it."""
    if isinstance(model, str):
        model = describe(section_named(model), 0)
    if isinstance(model, ModelDescription):
        return open_model(model, seed), model.about()
    opened = _open_module(model, seed, inputs, loss)
    config: Config | None = getattr(opened.model, "config", None)
    if config is None:
        return opened, {"model_kind": "module"}
    return opened, {"model_kind": config_kind(config), "model_config": encode(config)}


def _open_module(model: nn.Module | Config, seed: int, inputs: Inputs | None, loss: Loss | None) -> OpenedModel:
    if not isinstance(model, nn.Module):
        if not hasattr(model, "__dataclass_fields__"):
            what = f"cannot apply a plan to a {type(model).__name__}."
            fix = "Give a model's name, its dimensions (such as a DecoderConfig) or a module."
            raise MeshwrightError([Problem(where="build", what=what, fix=fix)])
        return open_config(model, "model", seed)
    if isinstance(model, Model):
        config = model.config
        opened = open_config(config, "model", seed)
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        if not any(value.device.type == "meta" for value in weights.values()):
            filled = {**weights, **{name: value.detach().clone() for name, value in model.named_buffers()}}
            opened.source = from_tensors(filled)
        for (_, mine), theirs in zip(opened.model.named_parameters(), model.parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)
        return OpenedModel(model=opened.model, profile=_frozen(opened.profile, model, freeze), source=opened.source)
    if inputs is None:
        what = f"a {type(model).__name__} needs sample inputs to be understood."
        fix = "Give inputs=..., a tensor or tuple of tensors with one or more samples."
        raise MeshwrightError([Problem(where="build", what=what, fix=fix)])
    made, profile = adapt(model, inputs, name=type(model).__name__, loss=loss)
    source = from_tensors({name: value.detach().clone() for name, value in model.named_parameters()})
    made.empty()
    return OpenedModel(model=made, profile=_frozen(profile, made, mark), source=source)


def _frozen(profile: Profile, model: nn.Module, by: Callable[[Profile, IsFrozen], Profile]) -> Profile:
    name_of = getattr(model, "public_name", str)
    own = {name_of(name) for name, value in model.named_parameters() if not value.requires_grad}
    return by(profile, lambda name: name in own) if own else profile


def _mesh(plan: Plan, device: str) -> Mesh:
    place = device_of(
        device or ("cuda" if torch.cuda.is_available() else "cpu"), int(os.environ.get("LOCAL_RANK", "0"))
    )
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != plan.num_ranks:
        what = f"the plan needs {plan.num_ranks} ranks, this program was started with {ranks}."
        fix = f"Start it with: torchrun --nproc-per-node {plan.num_ranks} SCRIPT"
        raise MeshwrightError([Problem(where="build", what=what, fix=fix)])
    if plan.mesh and not dist.is_initialized():
        # One rank that nobody has launched meets itself.
        join(0, ranks, place, rendezvous="" if "RANK" in os.environ else str(Path(tempfile.mkdtemp()) / "store"))
    return Mesh.make(plan.mesh, place)
