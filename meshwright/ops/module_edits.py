"""Changing modules in place while their parameters keep their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward`, keeping only its inputs until backward needs the rest."""

    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return wrapped


def writes_in_place(module: nn.Module) -> bool:
    """Whether it may write into what it is given, as `nn.ReLU(inplace=True)` does."""
    return any(getattr(each, "inplace", False) is True for each in module.modules())


def on_copies(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward` of copies of its tensors: a replay must find its inputs as they were."""

    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        copied = [each.clone() if isinstance(each, Tensor) and each.is_floating_point() else each for each in args]
        return forward(*copied, **kwargs)

    return wrapped


def replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Wherever it hangs: in more than one module where it is tied."""
    for module in model.modules():
        for name in [name for name, value in module._parameters.items() if value is old]:
            module._parameters[name] = new
