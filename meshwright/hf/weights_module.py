"""Modules that transformers makes: those of folders that our decoder cannot stand for, and experts inside of any."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from meshwright.core.errors import MeshwrightError, error_at, last_line
from meshwright.hf.config_json import read_folder
from meshwright.ops.model_interface import Inputs
from meshwright.ops.routing import GroupedLinear

OUR_EXPERTS = "meshwright"


def transformers_module(folder: str, sequence: int) -> tuple[nn.Module, Inputs]:
    """The module of a Hugging Face folder that our decoder cannot stand for; its parameters on the meta device."""
    known = read_folder(folder)
    where = f"model.hf {folder}"
    try:
        import transformers
    except ImportError:
        what = f"{known.architecture} is not one of our decoders ({known.reason}), and transformers is not installed."
        raise error_at(where, what, "pip install 'meshwright[hf]'") from None
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind = getattr(transformers, known.architecture, None)
        if not known.architecture:  # what models of this type are called where they continue texts
            kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            raise error_at(
                where, f"transformers has no {known.architecture or config.model_type}.", f"({known.reason})"
            )
        with parameters_on_meta():
            module = kind(config)
    except MeshwrightError:
        raise
    except Exception as error:
        raise error_at(where, f"transformers cannot make it: {last_line(error)}") from None
    config = module.config
    if getattr(config, "is_encoder_decoder", False):
        what = f"{known.architecture} reads two texts."
        raise error_at(where, what, "Write a factory that returns a module of the inputs your data has.")
    keys = ("max_position_embeddings", "max_seq_len", "n_positions")
    longest = next((int(getattr(config, key)) for key in keys if getattr(config, key, None)), sequence)
    return module, torch.zeros(1, max(1, min(sequence, longest)), dtype=torch.int64)


def take_over_experts(module: nn.Module) -> None:
    """Let transformers' experts run by our grouped product, unless somebody chose another way."""
    moe: Any = sys.modules.get("transformers.integrations.moe")
    for each in module.modules() if moe is not None else ():
        config: Any = getattr(each, "config", None)
        if getattr(config, "_experts_implementation", "") == "grouped_mm" and hasattr(each, "_is_expert_parallel"):
            moe.ALL_EXPERTS_FUNCTIONS.register(OUR_EXPERTS, experts_forward)
            config._experts_implementation_internal = OUR_EXPERTS


@torch.compiler.disable
def experts_forward(self: Any, hidden: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
    """The forward of transformers' experts, in any dtype and without a look at values: its own kernels know no float64.

    What `self` has is transformers' interface for such functions (transformers/integrations/moe.py).
    """
    experts, order = chosen.flatten().sort(stable=True)
    counts = torch.zeros(self.num_experts, dtype=torch.int64, device=hidden.device)
    counts.scatter_add_(0, experts, torch.ones_like(experts))
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype

    def times(x: Tensor, name: str) -> Tensor:
        weight, bias = getattr(self, name).to(dtype), getattr(self, f"{name}_bias", None) if self.has_bias else None
        made = GroupedLinear.apply(x, weight.transpose(1, 2) if self.is_transposed else weight, counts)
        return made if bias is None else made + bias[experts].to(dtype)

    inner = times(hidden[order // chosen.shape[-1]].to(dtype), "gate_up_proj" if self.has_gate else "up_proj")
    out = times(self._apply_gate(inner) if self.has_gate else self.act_fn(inner), "down_proj")
    if getattr(self, "has_post_expert_norm", False):
        out = self.post_expert_norm(out)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    rows = (out * share.flatten()[order].unsqueeze(-1))[back]
    return rows.view(*chosen.shape, -1).sum(-2).to(hidden.dtype)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have their buffers, and parameters without memory."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, value: nn.Parameter | None) -> None:
        if value is not None and value.device.type != "meta":
            value = nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
        register(self, name, value)

    with mock.patch.object(nn.Module, "register_parameter", on_meta):
        yield
