"""Triton kernels, one file each. Each has a plain form in torch beside its caller.

A kernel is used on CUDA where Triton can be imported and compiles it. Where it fails, the plain form runs from then on
and a warning says so, once.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TypeVar

from torch import Tensor

from meshwright.core.errors import first_line

T = TypeVar("T")

_failed: set[str] = set()
"""Kernels that did not compile or run here."""


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def is_usable(name: str, tensor: Tensor) -> bool:
    """Whether kernel `name` may run on this tensor: on a GPU, or anywhere by Triton's interpreter (in tests)."""
    on_device = tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return on_device and tensor.numel() > 0 and name not in _failed and has_triton()


def run_or_fall_back(name: str, tensor: Tensor, kernel: Callable[[], T], plain: Callable[[], T]) -> T:
    """The kernel, or the plain form where the kernel is not usable on this tensor or cannot be compiled; a kernel must
    not change its inputs before it runs."""
    if not is_usable(name, tensor):
        return plain()
    try:
        return kernel()
    except Exception as error:
        import torch

        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        _failed.add(name)
        what = f"the Triton kernel {name} does not run here, torch's own operations take its place: "
        warnings.warn(what + first_line(error), stacklevel=2)
        return plain()
