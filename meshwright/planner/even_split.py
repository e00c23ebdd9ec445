"""How many blocks each stage gets, so that the slowest is as fast as can be.

The first stage also has the first layer and the last stage the last one (for a decoder the vocabulary matmul and the
loss), counted in blocks by their flops. Blocks of one kind are dealt out by counting; of several, the smallest time
into which a greedy filling fits is searched for.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.core.profile import Layer, Profile


def balanced_stages(profile: Profile, num_stages: int, sequence: int) -> tuple[int, ...]:
    """Blocks of each stage, at least one each."""
    kinds = profile.block_layers
    block = max(_flops(layer, sequence) for layer in kinds) or 1.0
    first, last = (
        0.0 if layer.is_block else _flops(layer, sequence) / block for layer in (profile.layers[0], profile.layers[-1])
    )
    if len(kinds) == 1:
        return _balanced(profile.num_blocks, num_stages, first, last)
    costs = tuple(_flops(layer, sequence) / block for layer in kinds for _ in range(layer.repeat))
    return _filled((costs[0] + first, *costs[1:-1], costs[-1] + last), num_stages)


def _flops(layer: Layer, sequence: int) -> float:
    return float(sum(op.flops(1, sequence) + op.backward_flops(1, sequence) for op in layer.ops))


@lru_cache(maxsize=512)
def _filled(costs: tuple[float, ...], num_stages: int) -> tuple[int, ...]:
    """Neighbours together so that the costliest stage is as cheap as can be: every sum of neighbours is a limit that
    might be the least one, and halving between the trivial limits finds it to a part in a million."""

    def fill(limit: float) -> tuple[int, ...] | None:
        stages: list[int] = []
        held, size = 0, 0.0
        for index, cost in enumerate(costs):
            must_leave = len(costs) - index == num_stages - len(stages) - 1  # one block for each stage to come
            if held and (size + cost > limit or must_leave):
                stages.append(held)
                held, size = 0, 0.0
            held, size = held + 1, size + cost
        stages.append(held)
        return tuple(stages) if len(stages) == num_stages and size <= limit else None

    low, high = max(costs), sum(costs)
    best = fill(high)
    for _ in range(20):
        middle = (low + high) / 2
        found = fill(middle)
        low, high, best = (low, middle, found) if found else (middle, high, best)
    assert best is not None, f"{num_stages} stages for {len(costs)} blocks"
    return best


@lru_cache(maxsize=512)
def _balanced(blocks: int, num_stages: int, first: float, last: float) -> tuple[int, ...]:
    if num_stages == 1:
        return (blocks,)
    best: tuple[float, float, tuple[int, ...]] | None = None
    for at_end in range(1, blocks - num_stages + 2):
        rest, extra = divmod(blocks - at_end, num_stages - 1)
        # One more for the later ones: the earlier a stage, the more microbatches it holds.
        stages = tuple(rest + (i >= num_stages - 1 - extra) for i in range(num_stages - 1))
        slowest = max(stages[0] + first, *stages[1:], at_end + last)
        # Of equals the one whose ends are nearest to the middle: memory follows blocks.
        key = (slowest, abs(at_end - rest), (*stages, at_end))
        best = key if best is None else min(best, key)
    assert best is not None, f"{num_stages} stages for {blocks} blocks"
    return best[2]
