"""Where a rank's piece of a tensor lies in the whole: what checkpoints, initialisation and parity agree on."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Box:
    """`size` elements from `offset` on, in each dim of a tensor of `shape`."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.size, strict=True))

    @property
    def is_empty(self) -> bool:
        return 0 in self.size

    def chunk(self, dim: int, index: int, count: int) -> Box:
        """The index-th of `count` pieces along `dim`: equal but for the last ones, as `torch.chunk` cuts."""
        step = -(-self.size[dim] // count)
        start = min(index * step, self.size[dim])
        length = min(step, self.size[dim] - start)
        offset, size = list(self.offset), list(self.size)
        offset[dim] += start
        size[dim] = length
        return replace(self, offset=tuple(offset), size=tuple(size))

    def overlap(self, other: Box) -> Box | None:
        """The part both hold, or None."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )
        size = tuple(h - lo for h, lo in zip(high, low, strict=True))
        return None if any(length <= 0 for length in size) else Box(self.shape, low, size)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Slices of this box in the coordinates of `outer`'s own piece."""
        return tuple(
            slice(a - b, a - b + length) for a, b, length in zip(self.offset, outer.offset, self.size, strict=True)
        )
