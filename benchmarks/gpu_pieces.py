"""The pieces that splits leave to one GPU: are they equal to the whole, and how much of its speed do they keep?

    python -m benchmarks.gpu pieces [--json RESULT.json]

matmul    1/t of a Llama-8B block's matrices, as `tensor` cuts them: forward and both halves of backward
context   a ring of n virtual ranks: each rank's attention by the ring's own code, others' keys taken from beside it
experts   1/e of the experts with as many rows, as `expert` leaves them: grouped matmuls
halves    a block's backward in two halves, as `pipeline` schedules split it

Times are the GPU's own (events, with work queued ahead), medians; nothing is sent, so what `context` and `experts` lose
here they lose before any link is slow. Docs: docs/gpu.md.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from meshwright.models.presets import DecoderConfig, preset
from meshwright.ops.attention import attention_mask
from meshwright.ops.context_parallel import Ring, TokenSplit, piece_of
from meshwright.ops.routing import Gated, GroupedLinear, through_experts
from meshwright.ops.split_backward import _weight_gradient, split_backward
from meshwright.ops.traffic import RING_TAG
from meshwright.zoo.layers import Attention, SwiGLU, TransformerBlock, rope_table

BOUNDS = {torch.bfloat16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-12}
"""Of the largest relative error (norm of the difference over norm), by dtype."""
QUEUE_CYCLES = 50_000_000
"""The GPU waits so long (25 ms) that launches get ahead of it: what is timed is then its own work."""

Row = dict[str, Any]
Run = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    config: DecoderConfig
    num_tokens: int
    sequence: int
    """Of attention."""
    expert_ffn: int
    num_exact_tokens: int
    """Of a block whose gradients are compared in float64."""
    device: str
    dtypes: tuple[torch.dtype, ...]
    """In which attention is compared and timed."""


LLAMA_8B = cast(DecoderConfig, preset("llama3-8b"))
FULL = Sizes(
    config=LLAMA_8B,
    num_tokens=8192,
    sequence=16384,
    expert_ffn=7168,
    num_exact_tokens=512,
    device="cuda",
    dtypes=(torch.bfloat16, torch.float32),
)
TINY = Sizes(
    config=replace(LLAMA_8B, hidden_size=64, num_heads=16, num_kv_heads=8, ffn_size=128),
    num_tokens=64,
    sequence=64,
    expert_ffn=32,
    num_exact_tokens=16,
    device="cpu",
    dtypes=(torch.bfloat16, torch.float64),
)
"""Proves the script itself, where there is no GPU."""


class Timing(NamedTuple):
    ms: float
    host_ms: float
    """To launch it. Where it is more than `ms`, the GPU waits for Python unless something else keeps it busy."""


def timed(run: Run, samples: int = 12, before: Run = lambda: None) -> Timing:
    """Median of `run`; `before` each, untimed."""
    for _ in range(3):
        before()
        run()
    if not torch.cuda.is_available():
        before()
        ms = _host_ms(run)
        return Timing(ms, ms)
    torch.cuda.synchronize()
    torch.cuda._sleep(QUEUE_CYCLES)
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(samples)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(samples)]
    host = []
    for start, end in zip(starts, ends, strict=True):
        before()
        start.record()
        host.append(_host_ms(run))
        end.record()
    torch.cuda.synchronize()
    return Timing(median(start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)), min(host))


def _host_ms(run: Run) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def error_of(got: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """The largest of several tensors' relative errors."""
    pairs = [
        (ours, whole.to(torch.promote_types(whole.dtype, torch.float32)))
        for ours, whole in zip(got, wanted, strict=True)
    ]
    return max(float((ours.to(whole.dtype) - whole).norm() / whole.norm()) for ours, whole in pairs)


def drawn(*shape: int, sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=sizes.device, dtype=torch.float32).to(dtype)


PARTS = ("forward", "into input", "into weight")


def shapes_of(config: DecoderConfig, ways: int) -> dict[str, list[tuple[int, int]]]:
    """(outputs, inputs) of a block's matrices on one of so many ranks: outputs cut, or inputs where pieces add up."""
    d, head, ffn = config.hidden_size, config.size_of_head, config.ffn_size // ways
    heads, kv_heads = config.num_heads * head // ways, config.num_kv_heads * head // ways
    return {
        "query, key, value": [(heads, d), (kv_heads, d), (kv_heads, d)],
        "attention output": [(d, heads)],
        "gate, up": [(ffn, d), (ffn, d)],
        "down": [(d, ffn)],
    }


@torch.no_grad()
def matmul_ms(shapes: list[tuple[int, int]], sizes: Sizes) -> dict[str, float]:
    """Forward and both halves of backward of matrices with the same input, one after the other as a block runs them."""
    x = drawn(sizes.num_tokens, shapes[0][1], sizes=sizes)
    weights = [drawn(*shape, sizes=sizes) for shape in shapes]
    grads = [drawn(sizes.num_tokens, shape[0], sizes=sizes) for shape in shapes]
    runs: tuple[Run, ...] = (
        lambda: [nn.functional.linear(x, weight.to(x.dtype)) for weight in weights],
        lambda: [grad @ weight for grad, weight in zip(grads, weights, strict=True)],
        lambda: [_weight_gradient(weight, x, grad) for weight, grad in zip(weights, grads, strict=True)],
    )
    return {part: timed(run, samples=40).ms for part, run in zip(PARTS, runs, strict=True)}


def matmul(sizes: Sizes) -> Iterator[Row]:
    whole: dict[tuple[str, str], float] = {}
    for ways in (1, 2, 4, 8):
        cases = shapes_of(sizes.config, ways)
        ms_of = {name: matmul_ms(shapes, sizes) for name, shapes in cases.items()}
        ms_of["all of a block"] = {part: sum(each[part] for each in ms_of.values()) for part in PARTS}
        cases["all of a block"] = [shape for shapes in cases.values() for shape in shapes]
        for name, shapes in cases.items():
            flops = 2 * sizes.num_tokens * sum(outputs * inputs for outputs, inputs in shapes)
            row: Row = {"t": ways, "matrices": name}
            for part, ms in ms_of[name].items():
                row[f"{part} TFLOP/s"] = flops / ms / 1e9
                row[f"{part} efficiency"] = whole.setdefault((name, part), ms) / ways / ms
            yield row


class Ranks:
    """In place of a process group: so many ranks, all in this process."""

    group_name = "of one process"

    def __init__(self, count: int):
        self.count = count

    def size(self) -> int:
        return self.count


class Arrived(NamedTuple):
    tensor: Tensor

    def arrived(self) -> Tensor:
        return self.tensor


class VirtualRing(Ring):
    """One rank of a ring, with everybody's keys and values beside it in `held`. Its gradients of others' are added to
    `left`; without it they come back as if sent round, which costs the same and means nothing: to be timed."""

    def __init__(self, index: int, held: list[Tensor], left: list[Tensor] | None):
        super().__init__(tokens_of(index, len(held)), window=0)
        self.held, self.left = held, left
        self.num_passed: Counter[int] = Counter()

    def _pass_on(self, tensor: Tensor, tag: int) -> Any:
        turn = self.num_passed[tag] % (self.count - 1) + 1  # that keys come for, or that gradients were made at
        self.num_passed[tag] += 1
        other = (self.index - turn) % self.count
        if tag == RING_TAG:
            return Arrived(self.held[other])
        if self.left is None:
            return Arrived(tensor)
        self.left[other] += tensor
        return Arrived(torch.zeros_like(tensor))


def tokens_of(index: int, count: int) -> TokenSplit:
    return TokenSplit(group=cast(Any, Ranks(count)), index=index, is_folded=True)


def num_blocks(count: int) -> set[tuple[float, ...]]:
    """Of chunk x chunk scores, by turn; the set of what ranks have: one thing if none ever waits."""
    work = set()
    for rank in range(count):
        pieces = [piece_of(rank, (rank - turn) % count, 1) for turn in range(count)]
        work.add(
            tuple(
                (each.queries.stop - each.queries.start) * (each.keys.stop - each.keys.start) / (1 + each.is_causal)
                for each in pieces
            )
        )
    return work


Drawn = tuple[Tensor, Tensor, Tensor]
"""Query, key and value in one tensor, and the gradient of the output."""


def attention_inputs(sizes: Sizes, dtype: torch.dtype) -> Drawn:
    config = sizes.config
    query = (1, config.num_heads, sizes.sequence, config.size_of_head)
    both = (2, 1, config.num_kv_heads, sizes.sequence, config.size_of_head)
    return tuple(drawn(*shape, sizes=sizes, dtype=dtype) for shape in (query, both, query))


def shares(inputs: Drawn, count: int) -> list[Drawn]:
    """Each rank's."""
    every = [tokens_of(rank, count) for rank in range(count)]
    query, both, grad = inputs
    return [(each.own(query, 2), each.own(both, 3), each.own(grad, 2)) for each in every]


def by_virtual_ranks(inputs: Drawn, count: int, documents: Tensor | None = None) -> list[Tensor]:
    """Output and gradients of query, key and value, put together from all ranks'."""
    parts = shares(inputs, count)
    held = [both for _, both, _ in parts]
    left = [torch.zeros_like(both, dtype=torch.promote_types(both.dtype, torch.float32)) for both in held]
    outs, into_queries = [], []
    for rank, (query, both, grad) in enumerate(parts):
        ring = VirtualRing(rank, held, left)
        out, lse = ring.forward(query, both, documents)
        into_query, into_both = ring.backward(grad, query, both, out, lse, documents)
        left[rank] += into_both
        outs.append(out)
        into_queries.append(into_query)
    places = torch.arange(inputs[0].shape[2], device=inputs[0].device)
    back = torch.cat([tokens_of(rank, count).own(places, 0) for rank in range(count)]).argsort()
    into_both = torch.cat(left, 3)[:, :, :, back]
    return [torch.cat(outs, 2)[:, :, back], torch.cat(into_queries, 2)[:, :, back], into_both[0], into_both[1]]


def share_timing(inputs: Drawn, count: int) -> tuple[Timing, Timing]:
    """Forward and backward of the slower of the first rank and the last: one sees only later keys, one only earlier."""
    parts = shares(inputs, count)
    held = [both for _, both, _ in parts]
    found = []
    for rank in sorted({0, count - 1}):
        query, both, grad = parts[rank]
        ring = VirtualRing(rank, held, None)
        out, lse = ring.forward(query, both, None)
        forward = timed(functools.partial(ring.forward, query, both, None))
        found.append((forward, timed(functools.partial(ring.backward, grad, query, both, out, lse, None))))
    return max(forward for forward, _ in found), max(backward for _, backward in found)


def context_in(dtype: torch.dtype, sizes: Sizes) -> Iterator[Row]:
    with torch.device("meta"):
        attend = Attention(sizes.config).attend
    inputs = attention_inputs(sizes, dtype)
    query, key, value = leaves = [each.detach().requires_grad_() for each in (inputs[0], *inputs[1])]
    out = attend(query, key, value, None)
    backward: Run = functools.partial(torch.autograd.grad, out, leaves, inputs[2], retain_graph=True)
    wanted = [out.detach(), *backward()]
    whole = timed(lambda: attend(query, key, value, None)).ms, timed(backward).ms
    kernel = type(out.grad_fn).__name__.removesuffix("Backward0").removeprefix("ScaledDotProduct")
    row = {"dtype": str(dtype).removeprefix("torch."), "forward ms": whole[0], "backward ms": whole[1]}
    yield {"n": f"whole, {kernel}", **row, "efficiency to whole": 1.0}
    one_rank_ms = 0.0
    for count in (1, 2, 4, 8):
        work = num_blocks(count)
        error = error_of(by_virtual_ranks(inputs, count), wanted)
        first, second = share_timing(inputs, count)
        ms = first.ms + second.ms
        one_rank_ms = one_rank_ms or ms
        row |= {"forward ms": first.ms, "backward ms": second.ms, "launch ms": first.host_ms + second.host_ms}
        row |= {"blocks of each rank": sum(next(iter(work)))}
        row |= {"error": error, "equal": error < BOUNDS[dtype] and len(work) == 1}
        yield {
            "n": count,
            **row,
            "efficiency to n = 1": one_rank_ms / count / ms,
            "efficiency to whole": sum(whole) / count / ms,
        }


def documents_in(dtype: torch.dtype, sizes: Sizes) -> Iterator[Row]:
    """Equality alone, where a token sees its own document only: pieces with a mask are another kernel's."""
    with torch.device("meta"):
        attend = Attention(sizes.config).attend
    inputs = attention_inputs(sizes, dtype)
    documents = (torch.arange(sizes.sequence, device=sizes.device) * 3 // sizes.sequence).unsqueeze(0)
    mask = attention_mask(sizes.sequence, 0, documents, documents.device, sizes.config.size_of_head)
    leaves = [each.detach().requires_grad_() for each in (inputs[0], *inputs[1])]
    out = attend(leaves[0], leaves[1], leaves[2], mask)
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, inputs[2])]
    for count in (2, 4):
        error = error_of(by_virtual_ranks(inputs, count, documents), wanted)
        name = f"{count}, documents"
        yield {"n": name, "dtype": str(dtype).removeprefix("torch."), "error": error, "equal": error < BOUNDS[dtype]}


def context(sizes: Sizes) -> Iterator[Row]:
    for dtype in sizes.dtypes:
        yield from context_in(dtype, sizes)
        yield from documents_in(dtype, replace(sizes, sequence=sizes.sequence // 4))
        gc.collect()


def looped(x: Tensor, chosen: Tensor, share: Tensor, weights: list[Tensor]) -> Tensor:
    """What experts are, said plainly."""
    out = torch.zeros_like(x)
    for expert, (gate, up, down) in enumerate(zip(*weights, strict=True)):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        rows = x[token]
        made = (nn.functional.silu(rows @ gate.t()) * (rows @ up.t())) @ down.t()
        out = out.index_add(0, token, made * share[token, place].unsqueeze(1))
    return out


def experts_error(x: Tensor, chosen: Tensor, share: Tensor, weights: list[Tensor], grad: Tensor) -> float:
    leaves = [x, share, *weights]
    ours = [each.detach().requires_grad_() for each in leaves]
    out = through_experts(ours[0], chosen, ours[1], None, (ours[2], ours[3], ours[4]), weights[0].shape[0])
    got = [out.detach(), *torch.autograd.grad(out, ours, grad)]
    plain = [each.detach().float().requires_grad_() for each in leaves]
    out = looped(plain[0], chosen, plain[1], plain[2:])
    return error_of(got, [out.detach(), *torch.autograd.grad(out, plain, grad.float())])


def pair_ms(make: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor) -> tuple[float, float]:
    """Forward and backward."""
    out = make()
    return timed(make).ms, timed(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)).ms


def grouped(rows: Tensor, weights: list[Tensor], counts: Tensor) -> Tensor:
    inner = Gated.apply(GroupedLinear.apply(rows, weights[0], counts), GroupedLinear.apply(rows, weights[1], counts))
    return GroupedLinear.apply(inner, weights[2], counts)


def experts_of(sizes: Sizes, count: int, k: int = 2) -> Row:
    """So many experts, with the rows of all tokens."""
    d, ffn, num_tokens = sizes.config.hidden_size, sizes.expert_ffn, sizes.num_tokens
    x, grad = drawn(num_tokens, d, sizes=sizes).requires_grad_(), drawn(num_tokens, d, sizes=sizes)
    share = torch.rand(num_tokens, k, device=sizes.device).softmax(1).to(x.dtype)
    shapes = [(count, ffn, d), (count, ffn, d), (count, d, ffn)]
    weights = [(drawn(*shape, sizes=sizes) * shape[2] ** -0.5).requires_grad_() for shape in shapes]
    # As many rows as ever: a token that picks the only expert twice stands for tokens of two ranks.
    chosen = torch.rand(num_tokens, max(count, k), device=sizes.device).topk(k).indices % count
    counts = torch.bincount(chosen.flatten(), minlength=count)
    rows, into_rows = x.detach().repeat(k, 1).requires_grad_(), grad.repeat(k, 1)
    gate, up, down = weights
    forward, backward = pair_ms(lambda: grouped(rows, weights, counts), [rows, *weights], into_rows)
    layer = pair_ms(lambda: through_experts(x, chosen, share, None, (gate, up, down), count), [x, gate, up, down], grad)
    flops = 6 * k * num_tokens * d * ffn
    error = experts_error(x, chosen, share, weights, grad)
    return {
        "experts here": count,
        "error": error,
        "equal": error < BOUNDS[x.dtype],
        "forward TFLOP/s": flops / forward / 1e9,
        "backward TFLOP/s": 2 * flops / backward / 1e9,
        "matmuls ms": forward + backward,
        "layer ms": sum(layer),
        "tokens/s": round(num_tokens / sum(layer) * 1e3),
    }


def experts(sizes: Sizes) -> Iterator[Row]:
    whole_ms = 0.0
    for ways in (1, 2, 4, 8):
        row = experts_of(sizes, 8 // ways)
        whole_ms = whole_ms or row["matmuls ms"]
        yield {"e": ways, **row, "efficiency to e = 1": whole_ms / row["matmuls ms"]}


def block_of(
    sizes: Sizes, num_tokens: int, dtype: torch.dtype
) -> tuple[TransformerBlock, Tensor, Callable[[], Tensor]]:
    """A block, what it is given, and its forward."""
    config = sizes.config
    with torch.device(sizes.device):
        block = TransformerBlock(config, SwiGLU(config.hidden_size, config.ffn_size)).to(dtype)
    with torch.no_grad():
        for each in block.parameters():
            each.fill_(1.0) if each.dim() == 1 else each.normal_(std=each.shape[1] ** -0.5)
    x = drawn(1, num_tokens, config.hidden_size, sizes=sizes, dtype=dtype).requires_grad_()
    table = rope_table(config, torch.arange(num_tokens, device=sizes.device), x)
    return block, x, lambda: block(x, *table)


def taken(block: TransformerBlock, x: Tensor) -> list[Tensor]:
    """The gradients; there are none after."""
    found = [cast(Tensor, each.grad) for each in (x, *block.parameters())]
    x.grad = None
    block.zero_grad()
    return found


def halves_of(sizes: Sizes, num_tokens: int, dtype: torch.dtype) -> Row:
    block, x, forward = block_of(sizes, num_tokens, dtype)
    grad = drawn(1, num_tokens, sizes.config.hidden_size, sizes=sizes, dtype=dtype)
    clear = functools.partial(taken, block, x)
    forward_ms = timed(forward).ms
    whole = functools.partial(forward().backward, grad, retain_graph=True)
    whole()
    wanted = taken(block, x)
    whole_ms = timed(whole, before=clear).ms
    later = split_backward([block])
    out = forward()

    def into_input() -> None:
        clear()
        with later.collect("half"):
            out.backward(grad, retain_graph=True)

    into_input()
    later.pay("half")
    error = error_of(taken(block, x), wanted)
    input_ms = timed(into_input).ms
    weight_ms = timed(lambda: later.pay("half"), before=into_input).ms
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": num_tokens,
        "error": error,
        "equal": error < BOUNDS[dtype],
        "forward ms": forward_ms,
        "backward ms": whole_ms,
        "input half ms": input_ms,
        "weight half ms": weight_ms,
        "halves to whole": (input_ms + weight_ms) / whole_ms,
    }


def halves(sizes: Sizes) -> Iterator[Row]:
    yield halves_of(sizes, sizes.num_exact_tokens, torch.float64)
    yield halves_of(sizes, sizes.num_tokens, torch.bfloat16)


SECTIONS: tuple[Callable[[Sizes], Iterator[Row]], ...] = (matmul, context, experts, halves)


def warm_up(seconds: float = 2.0) -> None:
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(10):
            x @ x
        torch.cuda.synchronize()


def told(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < value < 1e-2 else f"{value:.3g}" if value < 100 else f"{value:.0f}"
    return str(value)


def print_table(name: str, rows: list[Row]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, *([told(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    print(f"\n{name}")
    for line in lines:
        print("  " + "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def run_section(section: Callable[[Sizes], Iterator[Row]], sizes: Sizes) -> Row:
    start = time.perf_counter()
    rows: list[Row] = []
    found: Row = {"rows": rows}
    try:
        rows.extend(section(sizes))
    except Exception as error:  # what fails is a result too, and the next must still run
        found["failed"] = f"{type(error).__name__}: {str(error)[:500]}"
        print(found["failed"], file=sys.stderr)
    found["seconds"] = round(time.perf_counter() - start, 1)
    if rows:
        print_table(f"{section.__name__} ({found['seconds']} s)", rows)
    sys.stdout.flush()
    return found


def is_well(found: Row) -> bool:
    return "failed" not in found and all(row.get("equal", True) for row in found["rows"])


def run(output: Path | None, tiny: bool) -> int:
    """1: a piece is not equal to the whole."""
    sizes = TINY if tiny else FULL
    torch.manual_seed(0)
    if sizes.device == "cuda":
        warm_up()
    device = torch.cuda.get_device_name() if sizes.device == "cuda" else "cpu"
    result: Row = {"device": device, "torch": torch.__version__}
    for section in SECTIONS:
        result[section.__name__] = run_section(section, sizes)
        if sizes.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        if output:
            output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(is_well(result[section.__name__]) for section in SECTIONS) else 1
