"""What a technique changes (`Build`), and how values cross an axis during a step (`Exchange`).

These are the interfaces behind `Technique.apply`. `runtime/build.py` implements `Build`; a technique, in the package or
outside it, implements `Exchange`. Importing this file never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

    from meshwright.core.box import Box
    from meshwright.core.plan import Plan
    from meshwright.core.profile import Param, Profile
    from meshwright.core.technique import Technique
    from meshwright.ops.device_mesh import Mesh
    from meshwright.ops.host_memory import HostUnit
    from meshwright.ops.model_interface import Model, ParameterUnit, Spans
    from meshwright.ops.split_backward import Later
    from meshwright.ops.stage_transport import Wire
    from meshwright.optimizers.loss_scaling import LossScaling
    from meshwright.optimizers.rule import RuleMaker
    from meshwright.schedules import Places, Timetable
    from meshwright.techniques.compress_gradients import CompressGradients


class OptimizerState(NamedTuple):
    """Something that an update or an exchange remembers between steps."""

    kind: str
    name: str
    value: torch.Tensor
    box: Box
    """Where the value lies in the whole of what is remembered of this kind for this parameter."""
    is_first: bool = True
    """Of the pieces of a parameter that remember this same value, the one that writes it."""


class Exchange:
    """What ranks along an axis tell each other in a step; one object for each axis, owned by one technique.

    The loop calls these methods at their places in every step, in this order. A method that is not overridden does
    nothing: sums of gradients need `before_backward` or `finish`, averages of parameters `after_update`.
    """

    keeps_pace = True
    """All ranks end a step together. Where not, nothing may wait for all of them but where all rest: at a pause that is
    due by the count of steps, or at a request that `agree` has told all of at one step."""

    def begin_step(self) -> None:
        """Gradients have just been cleared."""

    def before_backward(self, chunk: int, *, is_last: bool) -> None:
        """A microbatch is about to go back through a chunk of layers.

        `is_last`: afterwards the chunk's gradients of this step are whole. Never where the halves of backward are
        apart: `gradients_ready` says it there.
        """

    def gradients_ready(self, chunk: int, *, is_last: bool) -> None:
        """A microbatch has all its gradients in a chunk; `is_last`: so has the step."""

    def finish(self) -> None:
        """All backward passes of the step are over: gradients must be as the optimizer needs them when this returns."""

    def leaves_out(self) -> bool:
        """Whether this rank's step, which is about to begin, has no forward and backward passes."""
        return False

    def agree(self, message: torch.Tensor, lr: float, divisor: float, most: Sequence[float]) -> torch.Tensor | None:
        """In place of the sum over all ranks of a step's message (`BatchUnderWay.message`); None: they sum it.

        `divisor`: of the loss; `most`: the largest loss and norm of a step that may update anything.
        """
        return None

    def after_update(self, count: int) -> None:
        """The optimizer has updated this rank's parameters, for the `count`-th time; not called where a step was
        refused."""

    def before_evaluation(self) -> None:
        """Forward passes without a backward are about to begin."""

    def after_evaluation(self) -> None:
        """They have ended."""

    def before_saving(self) -> None:
        """All ranks are about to write a checkpoint: `Build.evaluated` must be whole when this returns."""

    def take_figures(self) -> Mapping[str, float]:
        """What is newly known about the step before, to be recorded beside its loss; the same on all ranks."""
        return {}

    def kept(self) -> Iterable[OptimizerState]:
        """What it remembers between steps, for checkpoints."""
        return ()


class Build(Protocol):
    """One rank's share of a model while a plan is applied to it. Techniques add functions to its phases."""

    plan: Plan
    profile: Profile
    model: Model
    mesh: Mesh
    dtype: torch.dtype
    """Of parameters, gradients and optimizer state, but for parameters and gradients of another `weight_dtype`."""
    weight_dtype: torch.dtype
    frozen_dtype: torch.dtype | None
    """Of parameters that are not trained; None: as of others."""
    compute_dtype: torch.dtype
    timetable: Timetable
    stage: int
    num_stages: int
    spans: Spans
    """Blocks of this stage's chunks."""
    wire: Wire | None
    """To the stages before and after."""
    later: Later | None
    """Where the halves of backward are apart: the second ones still to do."""
    sequence_ways: int
    """Ranks that share the tokens between layers."""
    loss_scale: float
    """A factor of the loss, for exchanges that divide gradients by something."""
    loss_scaling: LossScaling | None
    """A further factor that gradients are freed of before they are used, where small ones would be lost."""
    boxes: dict[str, Box]
    """Parameter -> the part of it that is here."""
    cut_axes: dict[str, frozenset[str]]
    """Axes that cut a parameter; along all others it is a replica."""
    canonical: dict[str, str]
    """Name here -> the one name a parameter has in every plan (tied weights have two names)."""
    zero_filled: set[int]
    """Ids of parameters whose gradient is only the zeros it began the step with: nothing was added so far."""
    exchanges: list[Exchange]
    """Called in this order at every place of a step."""
    exchange_owners: dict[str, str]
    """Axis -> the technique that exchanges over it."""
    rule_wraps: list[Callable[[RuleMaker], RuleMaker]]
    """How techniques change the making of this rank's optimizer: what it keeps, where, and what a step of it does."""
    tied: tuple[str, ...]
    """Parameters that two layers share."""
    replayed_blocks: set[int]
    """Blocks that keep nothing but their input, and are computed again in backward."""
    wide: dict[str, torch.Tensor]
    """Parameter -> its values as they are updated and written to checkpoints, where the parameter itself is a copy of
    them in fewer bits."""
    evaluated: dict[str, torch.Tensor]
    """Parameter -> the values that are evaluated and written to checkpoints, where training goes on with others."""
    coding: CompressGradients | None
    """How the next technique that asks codes what it sums; it leaves None."""
    trained_from: int
    """Nothing before the block of this number has a gradient in the step under way; -1: as the profile says."""
    is_last_step: bool
    """The step under way is known to be the last of the run."""
    masters: dict[str, torch.Tensor]
    """Parameter -> the copy in host memory that is updated and written to checkpoints, where the device has another."""
    host_units: list[HostUnit]
    """Layers whose masters those are."""
    disk: Path | None
    """A folder on the disk that may hold optimizer states; None: the system's folder of temporary files."""
    streams_blocks: bool
    """Of such blocks, the device has the weights only while they run."""

    @property
    def places(self) -> Places: ...

    @property
    def first_block(self) -> int:
        """Blocks of the whole model before this stage's first."""
        ...

    @property
    def island(self) -> int:
        """Which of the islands this rank belongs to."""
        ...

    def at(self, phase: str, change: Callable[[Build], None]) -> None:
        """Call `change` in one of `PHASES`."""

    def named_params(self) -> Iterable[tuple[str, Param]]:
        """Canonical name and profile entry of every parameter of this stage, tied ones once."""
        ...

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...

    def units(self) -> list[ParameterUnit]:
        """Layers whose parameters are gathered and reduced together."""
        ...

    def keep_spans(self, spans: Spans) -> None:
        """Become the stage of these blocks."""

    def cut(self, name: str, dim: int, index: int, count: int, axis: str) -> None:
        """Keep the index-th of `count` pieces of a parameter."""

    def cut_everything(self, axis: str) -> None:
        """A parameter lives at one place along `axis`."""

    def materialise(self, parameters: Iterable[nn.Parameter], device: torch.device | None = None) -> None:
        """Allocate and fill the parameters that are still on the meta device; None: on the mesh's."""

    def owns(self, name: str, *axes: str) -> bool:
        """Whether this rank answers for its piece: exactly one of the replicas (of an island) does, or, along `axes`,
        each of them."""
        ...

    def add_exchange(self, technique: Technique, exchange: Exchange, *more_axes: str) -> None:
        """Exchange over the technique's axis (and `more_axes`); raises where another technique does so already."""

    def sum_late(
        self, technique: Technique, name: str, group: dist.ProcessGroup | None, *, is_copy: bool = False
    ) -> None:
        """Sum a parameter's gradient over `group` once the backward passes are over, in one message with all others.

        `is_copy`: another stage answers for the parameter. A `group` of None: nothing is summed from here.
        """

    def sum_rest_late(self, technique: Technique) -> None:
        """Ranks along the technique's axis see different data: sum what it does not cut over it, late."""
