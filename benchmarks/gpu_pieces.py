"""The pieces that splits leave to one GPU: are they equal to the whole, and how much of its speed do they keep?

    python -m benchmarks.gpu_pieces [-o RESULT.json]

matmul    1/t of a Llama-8B block's matrices, as `tensor` cuts them: forward and both halves of backward
context   a ring of n virtual ranks: each rank's attention by the ring's own code, others' keys taken from beside it
experts   1/e of the experts with as many rows, as `expert` leaves them: grouped matmuls
halves    a block's backward in two halves, as `pipeline` schedules split it
tests     the CUDA cases of tests/ops/test_attention.py

Times are the GPU's own (events, with work queued ahead), medians; nothing is sent, so what `context` and `experts` lose
here they lose before any link is slow. Docs: docs/gpu.md.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.gpu_context import context
from benchmarks.gpu_timing import BOUNDS, FULL, TINY, Row, Run, Sizes, drawn, error_of, timed
from meshwright.models.presets import DecoderConfig
from meshwright.ops.routing import Gated, GroupedLinear, through_experts
from meshwright.ops.split_backward import _weight_gradient, split_backward
from meshwright.zoo.layers import SwiGLU, TransformerBlock, linear, rope_table

ROOT = Path(__file__).parents[1]
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
        lambda: [linear(x, weight) for weight in weights],
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


def tests(sizes: Sizes) -> Iterator[Row]:
    if importlib.util.find_spec("pytest") is None:
        yield {"summary": "not run: there is no pytest here"}
        return
    where = ["tests/ops/test_attention.py", "-k", sizes.device, "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *where], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
    failed = [line for line in lines if line.startswith("FAILED")]
    yield {"equal": done.returncode == 0, "summary": "; ".join([*failed, *lines[-1:]])}


SECTIONS: tuple[Callable[[Sizes], Iterator[Row]], ...] = (matmul, context, experts, halves, tests)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = TINY if arguments.tiny else FULL
    if sizes.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here, and these are measurements of one.", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    if sizes.device == "cuda":
        warm_up()
    device = torch.cuda.get_device_name() if sizes.device == "cuda" else "cpu"
    result: Row = {"device": device, "torch": torch.__version__}
    sections = SECTIONS if sizes.device == "cuda" else SECTIONS[:-1]  # other tests' cases are run by them
    for section in sections:
        result[section.__name__] = run_section(section, sizes)
        if sizes.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        if arguments.output:
            arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(is_well(result[section.__name__]) for section in sections) else 1


if __name__ == "__main__":
    sys.exit(main())
