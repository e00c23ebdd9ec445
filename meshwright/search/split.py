"""How many blocks each stage gets, so that the slowest is as fast as can be.

The first stage also has the first layer and the last stage the last one (for a decoder the vocabulary matmul and the
loss), counted in blocks by their flops.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.core.profile import Layer, Profile


def balanced_stages(profile: Profile, num_stages: int, sequence: int) -> tuple[int, ...]:
    """Blocks of each stage, at least one each."""
    block = max(_flops(layer, sequence) for layer in profile.layers if layer.is_block)
    first, last = (
        0.0 if layer.is_block else _flops(layer, sequence) / block for layer in (profile.layers[0], profile.layers[-1])
    )
    return _balanced(profile.num_blocks, num_stages, first, last)


def _flops(layer: Layer, sequence: int) -> float:
    return float(sum(op.flops(1, sequence) + op.backward_flops(1, sequence) for op in layer.ops))


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
