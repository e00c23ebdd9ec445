"""A fused kernel as a plugin: the residual sum before a block's second norm, and that norm, in one.

`MESHWRIGHT_PLUGINS=toy_fused_norm` makes it a technique like any other. Its price finds what it changes by roles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.profile import Profile
from meshwright.core.technique import Choice, Exactness, Option, Technique
from meshwright.core.work import Compute, Task, Work, replace

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class FusedNorm(Technique):
    name: ClassVar[str] = "fused_norm"
    phase: ClassVar[str] = "block"
    exactness: ClassVar[Exactness] = "exact"

    is_used: bool = True

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        roles = {op.role for layer in profile.block_layers for op in layer.ops}
        return (Choice("is_used", (True,)),) if {"norm", "residual"} <= roles else ()

    def price(self, work: Work) -> Work:
        """A norm that follows a residual sum finds its input in registers, and is no kernel of its own."""
        tasks: list[Task] = []
        before: dict[str, int] = {}
        for task in work.tasks:
            if isinstance(task, Compute) and task.phase == "forward":
                at = before.get(task.layer, -1)
                if task.role == "norm" and at >= 0:
                    added = tasks[at]
                    moved = added.moved_bytes + task.moved_bytes / 2
                    tasks[at] = replace(added, name="residual+norm", moved_bytes=moved)
                    before[task.layer] = -1
                    continue
                before[task.layer] = len(tasks) if task.role == "residual" else -1
            tasks.append(task)
        return replace(work, tasks=tuple(tasks))

    def apply(self, build: Build) -> None:
        build.at("block", self._fuse)

    def _fuse(self, build: Build) -> None:
        for block in build.model.block_modules():
            block.forward = _fused(block)


def _fused(block: nn.Module) -> Any:
    add_norm = _add_norm()

    def forward(x: Tensor, *tables: Any, **named: Any) -> Tensor:
        attended = block.attention(block.attention_norm(x), *tables, **named)
        x, normal = add_norm.apply(x, attended, block.mlp_norm.weight.to(x.dtype), block.mlp_norm.epsilon)
        return x + block.mlp(normal)

    return forward


def _add_norm() -> Any:
    import torch

    class AddNorm(torch.autograd.Function):
        """x + y, and its root-mean-square norm. Going back, both gradients are added in one go."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
            total = x + y
            inverse = total.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
            ctx.save_for_backward(total, weight, inverse)
            return total, total * inverse * weight

        @staticmethod
        def backward(ctx: Any, into_total: Tensor, into_normal: Tensor) -> tuple[Tensor | None, ...]:
            total, weight, inverse = ctx.saved_tensors
            normal = total * inverse
            along = into_normal * normal
            mean = (along @ weight).div_(total.shape[-1]).unsqueeze(-1)
            grad = (into_normal * weight - normal * mean) * inverse + into_total
            return grad, grad, along.flatten(0, -2).sum(0), None

    return AddNorm
