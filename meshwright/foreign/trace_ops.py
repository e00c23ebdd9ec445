"""What the tracer runs in place of operators that are one kernel on a GPU and many (or none) on a CPU without values.

Attention keeps query, key, value, output and one float32 number a row, and never a matrix of scores; norms keep their
input and a number a row; dropout keeps a mask of bytes; experts are one grouped product. Gradients have the right
shapes and no meaning: only what runs and what it holds is looked at.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode

from meshwright.foreign.examine import is_single_draw

NAMESPACE = "meshwright_trace"


def _define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Any:
    """An operator; without values it runs `fake`, or the kernel if that looks at shapes only."""
    full = f"{NAMESPACE}::{name}"
    torch.library.define(full, schema)
    torch.library.impl(full, "cpu", kernel)
    torch.library.register_fake(full, fake or kernel)
    return getattr(getattr(torch.ops, NAMESPACE), name)


def attention_shapes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Any:
    # Flash and cuDNN write the output in the layout of the query.
    is_alike = value.shape[-1] == query.shape[-1]
    out = torch.empty_like(query) if is_alike else query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def attention_values(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Any:
    grouped = query.dim() > 3 and query.shape[-3] != key.shape[-3]
    out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=grouped)
    return out.clone(), query.new_zeros(query.shape[:-1], dtype=torch.float32)


def _likes(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(map(torch.zeros_like, tensors))


def _lowered(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast casts the arguments of an operator that we stand for."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    return tuple(each.to(torch.get_autocast_dtype("cpu")) for each in tensors)


ATTENTION = _define(
    "attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal) -> (Tensor, Tensor)",
    attention_values,
    attention_shapes,
)
ATTENTION_BACKWARD = _define(
    "attention_backward",
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor rows, bool is_causal)"
    " -> (Tensor, Tensor, Tensor)",
    lambda grad, query, key, value, out, rows, is_causal: _likes(query, key, value),
)


class TracedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        out, rows = ATTENTION(query, key, value, mask, is_causal)
        ctx.save_for_backward(query, key, value, out, rows, mask)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *kept, mask = ctx.saved_tensors
        into_mask = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None  # a bias that is learned
        return (*ATTENTION_BACKWARD(grad, *kept, ctx.is_causal), into_mask, None)


def attention_flops(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> float:
    """Two products of every query with every key it sees; a causal one sees half of them."""
    rows, seen = math.prod(query.shape[:-1]), key.shape[-2]
    return 2.0 * rows * seen * (query.shape[-1] + value.shape[-1]) * (0.5 if is_causal else 1.0)


BACKWARD_ATTENTION = 2.5
"""Times forward: five products where forward has two (Dao 2023)."""


def rms_norm_values(x: Tensor, weight: Tensor | None, dims: int) -> tuple[Tensor, Tensor]:
    over = tuple(range(-dims, 0))
    inverse = x.float().square().mean(over, keepdim=True).add(1e-6).rsqrt()
    out = (x.float() * inverse).to(x.dtype)
    return (out.clone() if weight is None else out * weight.to(x.dtype)), inverse.flatten(-dims)


RMS_NORM = _define(
    "rms_norm",
    "(Tensor x, Tensor? weight, int dims) -> (Tensor, Tensor)",
    rms_norm_values,
    lambda x, weight, dims: (torch.empty_like(x), x.new_empty((*x.shape[:-dims], 1), dtype=torch.float32)),
)
RMS_NORM_BACKWARD = _define(
    "rms_norm_backward",
    "(Tensor grad, Tensor x, Tensor? weight, Tensor inverse) -> (Tensor, Tensor)",
    lambda grad, x, weight, inverse: _likes(x, x.new_zeros(()) if weight is None else weight),
)


class TracedRMSNorm(torch.autograd.Function):
    """As CUDA's: keeps its input and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        out, inverse = RMS_NORM(x, weight, dims)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        into_x, into_weight = RMS_NORM_BACKWARD(grad, x, weight, inverse)
        return into_x, None if weight is None else into_weight, None


def _log_sums(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.float32)


LOG_SUMS = _define("log_sums", "(Tensor logits, Tensor targets) -> Tensor", _log_sums)
LOSS_GRADIENT = _define("loss_gradient", "(Tensor logits, Tensor grad) -> Tensor", lambda x, grad: torch.empty_like(x))


class TracedTokenLoss(torch.autograd.Function):
    """As the kernel: keeps the logits and one number a row."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        log_sum = LOG_SUMS(logits, targets)
        ctx.save_for_backward(logits, targets, log_sum)
        return log_sum - log_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return LOSS_GRADIENT(ctx.saved_tensors[0], grad), None


ROWS_TIMES = _define(
    "rows_times", "(Tensor x, Tensor weight) -> Tensor", lambda x, weight: x.new_empty(x.shape[0], weight.shape[2])
)
OUTER = _define(
    "outer",
    "(Tensor grad, Tensor x, int num_experts) -> Tensor",
    lambda grad, x, num_experts: x.new_empty(num_experts, grad.shape[1], x.shape[1]),
)


class GroupedProduct(torch.autograd.Function):
    """Rows of each group times its matrix (groups, k, n), however many rows a group has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return ROWS_TIMES(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return ROWS_TIMES(grad, weight.transpose(1, 2)), OUTER(x, grad, weight.shape[0])


RECURRENT_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
RECURRENT_KEPT = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
"""Numbers cuDNN keeps for each step and unit beside the output, as measured on an H200."""


def rnn_shapes(x: Tensor, weights: list[Tensor], size: int, kept: int, time: int) -> tuple[Tensor, Tensor, Tensor]:
    batch = [length for dim, length in enumerate(x.shape[:-1]) if dim != time]
    out = x.new_empty((*x.shape[:-1], weights[1].shape[1]))
    return out, x.new_empty((*x.shape[:-1], kept)), x.new_empty((*batch, size))


RECURRENT = _define(
    "recurrent", "(Tensor x, Tensor[] weights, int size, int kept, int time) -> (Tensor, Tensor, Tensor)", rnn_shapes
)
RECURRENT_BACKWARD = _define(
    "recurrent_backward",
    "(Tensor grad, Tensor x, Tensor out, Tensor gates, Tensor[] weights) -> Tensor[]",
    lambda grad, x, out, gates, weights: list(_likes(x, *weights)),
)


class Recurrent(torch.autograd.Function):
    """One layer in one direction, as cuDNN's: keeps its input, its output, and gates and cell of every step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, kept: int, time: int, *weights: Tensor) -> tuple[Tensor, Tensor]:
        out, gates, cell = RECURRENT(x, weights, size, kept, time)
        ctx.save_for_backward(x, out, gates, *weights)
        return out, cell

    @staticmethod
    def backward(ctx: Any, grad: Tensor, into_cell: Tensor) -> tuple[Tensor | None, ...]:
        x, out, gates, *weights = ctx.saved_tensors
        into_x, *into_weights = RECURRENT_BACKWARD(grad, x, out, gates, weights)
        return into_x, None, None, None, *into_weights


def recurrent_flops(x: Tensor, weights: list[Tensor]) -> float:
    """Every step multiplies its input and its state by the matrices among the weights."""
    return sum(2.0 * math.prod(x.shape[:-1]) * each.numel() for each in weights if each.dim() == 2)


def recur(
    name: str, x: Tensor, hx: Any, weights: list[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    x, *weights = _lowered(x, *weights)
    size, time = weights[0].shape[0] // RECURRENT_GATES[name], int(batch_first)
    kept = size * RECURRENT_KEPT[name]
    each = len(weights) // (num_layers * (1 + bidirectional))
    last, cells = [], []
    for layer in range(num_layers):
        outs = []
        for _ in range(1 + bidirectional):
            own, weights = weights[:each], weights[each:]
            out, cell = Recurrent.apply(x, size, kept, time, *own)
            outs.append(out)
            last.append(out.select(time, -1))
            cells.append(cell)
        x = torch.cat(outs, -1) if bidirectional else outs[0]
        x = _dropped(x, dropout, train and layer + 1 < num_layers)
    states = (torch.stack(last), torch.stack(cells))
    return (x, *states) if name == "lstm" else (x, states[0])


GROUPED = tuple(filter(None, (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None))))
LOSSES: tuple[Any, ...] = (F.cross_entropy, F.nll_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
LOSSES += (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.ctc_loss)


class _KernelMode(TorchFunctionMode):
    """Calls of torch's functions that CUDA would serve by one kernel; `in_loss` marks what belongs to a loss."""

    def __init__(self, in_loss: Callable[[], Any]):
        super().__init__()
        self.in_loss = in_loss

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        if func in (F.rms_norm, torch.rms_norm):
            return _normalized(*args, **kwargs)
        if func is F.dropout:
            return _dropped(*args, **kwargs)
        if func in GROUPED and args[0].dim() == 2 and args[1].dim() == 3:
            return GroupedProduct.apply(*_lowered(*args[:2]))
        if is_single_draw(func, args):
            return torch.tensor(0.5)  # a coin thrown for a whole layer: kept, as most are
        if is_recurrent(func, args):
            return recur(func.__name__, *args)
        if func is torch.bincount and kwargs.get("minlength"):
            return args[0].new_zeros(kwargs["minlength"], dtype=torch.int64)
        if func in LOSSES:
            with self.in_loss():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def is_recurrent(func: Any, args: Any) -> bool:
    """A recurrent layer over whole sequences (packed ones come as their rows), without values."""
    is_dense = len(args) == 9 and isinstance(args[3], bool) and isinstance(args[0], FakeTensor)
    return is_dense and getattr(func, "__name__", "") in RECURRENT_GATES


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return TracedAttention.apply(*_lowered(query, key, value), attn_mask, is_causal)


def _normalized(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return TracedRMSNorm.apply(x, weight, len(normalized_shape))


def _dropped(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return x
    return torch.native_dropout(x, p, True)[0]


@contextmanager
def one_kernel_each(in_loss: Callable[[], Any], unfused: Callable[[], Any]) -> Iterator[None]:
    """`in_loss` and `unfused` mark what is run inside of them."""
    from meshwright.ops import cross_entropy as loss
    from meshwright.ops import routing as experts
    from meshwright.zoo import layers

    through = layers.through_experts

    def in_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
        with in_loss():
            return TracedTokenLoss.apply(logits, targets)

    def losses(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        with in_loss():
            logits.mul_(1.0)  # they are read, and the gradient is written in place
        return logits[:, 0] - logits[:, 0], logits

    def through_experts(*args: Any) -> Tensor:
        with unfused():  # it is not compiled with its block
            return through(*args)

    def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return TracedRMSNorm.apply(x, weight, 1)

    def rows_times(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        counts.cumsum(0).to(torch.int32)  # the grouped kernel asks where each group ends
        return ROWS_TIMES(x, weight)

    def outer(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
        counts.cumsum(0).to(torch.int32)
        return OUTER(grad, x, counts.shape[0])

    with ExitStack() as stack:
        stack.enter_context(_KernelMode(in_loss))
        for owner, name, stand_in in (
            (loss.TokenLoss, "apply", in_token_loss),
            (loss, "_losses", losses),
            (layers, "through_experts", through_experts),
            (layers.RMSNormFunction, "apply", rms_norm),
            (experts, "_rows_times", rows_times),
            (experts, "_outer", outer),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        masking = sys.modules.get("transformers.masking_utils")
        if masking is not None and hasattr(masking, "find_packed_sequence_indices"):
            packed = masking.find_packed_sequence_indices
            # Without values it says that samples are packed, and a mask of all pairs takes the place of `is_causal`.
            alone = mock.patch.object(masking, "find_packed_sequence_indices", lambda places: (packed(places), None)[1])
            stack.enter_context(alone)
        yield
