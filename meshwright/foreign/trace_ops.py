"""What the tracer runs in place of operators that are one kernel on a GPU and many (or none) on a CPU without values.

Attention keeps query, key, value, output and one float32 number a row, and never a matrix of scores; norms keep their
input and a number a row; dropout keeps a mask of bytes; experts are one grouped product. Gradients have the right
shapes and no meaning: only what runs and what it holds is looked at.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode

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


class OneKernel(torch.autograd.Function):
    """`run(*tensors)` gives what is returned, and what is kept beside the tensors; `back(gradient of the first that is
    returned, *tensors, *kept)` the gradients of the tensors."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], back: Callable[..., Any], *tensors: Tensor | None) -> Any:
        made, kept = run(*tensors)
        ctx.save_for_backward(*tensors, *kept)
        ctx.back = back
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.back(grad, *ctx.saved_tensors)


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


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Tensor:
    def run(*tensors: Tensor) -> Any:
        out, rows = ATTENTION(*tensors, is_causal)
        return out, (out, rows)

    def back(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Any, *kept: Tensor) -> Any:
        into_mask = torch.zeros_like(mask) if mask is not None and mask.requires_grad else None  # a learned bias
        return *ATTENTION_BACKWARD(grad, query, key, value, *kept, is_causal), into_mask

    return OneKernel.apply(run, back, *_lowered(query, key, value), attn_mask)


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


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """As CUDA's: keeps its input and one number a row."""

    def run(x: Tensor, weight: Tensor | None) -> Any:
        out, inverse = RMS_NORM(x, weight, len(normalized_shape))
        return out, (inverse,)

    def back(grad: Tensor, x: Tensor, weight: Tensor | None, inverse: Tensor) -> tuple[Tensor | None, ...]:
        into_x, into_weight = RMS_NORM_BACKWARD(grad, x, weight, inverse)
        return into_x, None if weight is None else into_weight

    return OneKernel.apply(run, back, x, weight)


LOG_SUMS = _define(
    "log_sums",
    "(Tensor logits, Tensor targets) -> Tensor",
    lambda logits, targets: logits.new_empty(logits.shape[:-1], dtype=torch.float32),
)
LOSS_GRADIENT = _define("loss_gradient", "(Tensor logits, Tensor grad) -> Tensor", lambda x, grad: torch.empty_like(x))


ROWS_TIMES = _define(
    "rows_times", "(Tensor x, Tensor weight) -> Tensor", lambda x, weight: x.new_empty(x.shape[0], weight.shape[2])
)
OUTER = _define(
    "outer",
    "(Tensor grad, Tensor x, int num_experts) -> Tensor",
    lambda grad, x, num_experts: x.new_empty(num_experts, grad.shape[1], x.shape[1]),
)


def grouped_product(x: Tensor, weight: Tensor) -> Tensor:
    """Rows of each group times its matrix (groups, k, n), however many rows a group has."""

    def back(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return ROWS_TIMES(grad, weight.transpose(1, 2)), OUTER(x, grad, weight.shape[0])

    return OneKernel.apply(lambda *args: (ROWS_TIMES(*args), ()), back, x, weight)


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


def recurrent_layer(x: Tensor, size: int, kept: int, time: int, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    """One layer in one direction, as cuDNN's: keeps its input, its output, and gates and cell of every step."""

    def run(x: Tensor, *weights: Tensor) -> Any:
        out, gates, cell = RECURRENT(x, weights, size, kept, time)
        return (out, cell), (out, gates)

    def back(grad: Tensor, x: Tensor, *held: Tensor) -> list[Tensor]:
        *weights, out, gates = held
        return RECURRENT_BACKWARD(grad, x, out, gates, weights)

    return OneKernel.apply(run, back, x, *weights)


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
            out, cell = recurrent_layer(x, size, kept, time, own)
            outs.append(out)
            last.append(out.select(time, -1))
            cells.append(cell)
        x = torch.cat(outs, -1) if bidirectional else outs[0]
        x = _dropped(x, dropout, train and layer + 1 < num_layers)
    states = (torch.stack(last), torch.stack(cells))
    return (x, *states) if name == "lstm" else (x, states[0])


def _dropped(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return x
    return torch.native_dropout(x, p, True)[0]


GROUPED = tuple(filter(None, (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None))))
LOSSES: tuple[Any, ...] = (F.cross_entropy, F.nll_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
LOSSES += (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.ctc_loss)
STAND_INS: dict[Any, Callable[..., Any]] = {F.scaled_dot_product_attention: attend, F.dropout: _dropped}
STAND_INS |= dict.fromkeys((F.rms_norm, torch.rms_norm), _rms_norm)


class FixedDraw(TorchFunctionMode):
    """A number drawn for a whole layer (`torch.rand([])`, as for layer drop) is the given one.

    Recurrent layers, which torch would go through step by step, are one operator where there are no values.
    """

    def __init__(self, value: float):
        super().__init__()
        self.value = value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.rand and not any(args[0] if len(args) == 1 and not isinstance(args[0], int) else args):
            return torch.tensor(self.value)
        # A recurrent layer over whole sequences; packed ones come as their rows.
        is_dense = len(args) == 9 and isinstance(args[3], bool) and isinstance(args[0], FakeTensor)
        if is_dense and getattr(func, "__name__", "") in RECURRENT_GATES:
            return recur(func.__name__, *args)
        return func(*args, **(kwargs or {}))


class _KernelMode(FixedDraw):
    """Calls of torch's functions that CUDA would serve by one kernel; `in_loss` marks what belongs to a loss."""

    def __init__(self, in_loss: Callable[[], Any]):
        super().__init__(0.5)  # a coin thrown for a whole layer: kept, as most are
        self.in_loss = in_loss

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in STAND_INS:
            return STAND_INS[func](*args, **kwargs)
        if func in GROUPED and args[0].dim() == 2 and args[1].dim() == 3:
            return grouped_product(*_lowered(*args[:2]))
        if func is torch.bincount and kwargs.get("minlength"):
            return args[0].new_zeros(kwargs["minlength"], dtype=torch.int64)
        with self.in_loss() if func in LOSSES else nullcontext():
            return super().__torch_function__(func, types, args, kwargs)


@contextmanager
def one_kernel_each(in_loss: Callable[[], Any]) -> Iterator[None]:
    """`in_loss` marks what is run inside of it."""
    from meshwright.ops import cross_entropy as loss
    from meshwright.ops import routing as experts
    from meshwright.zoo import layers

    def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
        """As the kernel: keeps the logits and one number a row."""

        def run(logits: Tensor, targets: Tensor) -> Any:
            log_sum = LOG_SUMS(logits, targets)
            return log_sum - log_sum, (log_sum,)

        with in_loss():
            return OneKernel.apply(run, lambda grad, logits, *_: (LOSS_GRADIENT(logits, grad), None), logits, targets)

    def losses(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        with in_loss():
            logits.mul_(1.0)  # they are read, and the gradient is written in place
        return logits[:, 0] - logits[:, 0], logits

    def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return _rms_norm(x, weight.shape, weight)

    def rows_times(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        counts.cumsum(0).to(torch.int32)  # the grouped kernel asks where each group ends
        return ROWS_TIMES(x, weight)

    def outer(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
        counts.cumsum(0).to(torch.int32)
        return OUTER(grad, x, counts.shape[0])

    with ExitStack() as stack:
        stack.enter_context(_KernelMode(in_loss))
        for owner, name, stand_in in (
            (loss.TokenLoss, "apply", token_loss),
            (loss, "_losses", losses),
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
