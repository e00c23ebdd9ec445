"""Where a rank's piece of a tensor lies in the whole: what checkpoints, initialisation and parity agree on."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Box:
    """`size` elements from `offset` on, in each dim of a tensor of `shape`."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    order: tuple[int, tuple[int, ...], int] | None = None
    """(dim, groups, count): offsets along `dim` count in an order in which the first of `count` equal chunks of every
    group comes first, then the second ones, and so on. None: in the order of the tensor."""

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

    def grouped(self, dim: int, groups: tuple[int, ...], count: int) -> Box:
        """The same whole tensor in an order in which the pieces of `count` ranks, a chunk of each group, are runs."""
        assert self == Box.whole(self.shape), "only a whole tensor can be ordered by groups"
        return replace(self, order=(dim, groups, count))

    def in_order(self) -> tuple[Box, ...]:
        """The boxes of the tensor as it lies that make up this piece, one after the other along `order`'s dim."""
        if self.order is None:
            return (self,)
        dim, groups, count = self.order
        first, last = self.offset[dim], self.offset[dim] + self.size[dim]
        boxes, at = [], 0
        for chunk in range(count):
            start = 0
            for group in groups:
                low, high = max(at, first), min(at + group // count, last)
                if low < high:
                    offset, size = list(self.offset), list(self.size)
                    offset[dim], size[dim] = start + chunk * (group // count) + low - at, high - low
                    boxes.append(Box(self.shape, tuple(offset), tuple(size)))
                at, start = at + group // count, start + group
        return tuple(boxes) or (replace(self, order=None),)

    def without(self, dim: int) -> Box:
        """The box of what remains when a dim (counted from the end: below 0) is summed over."""
        dim, order = dim % len(self.shape), self.order
        if order is not None:
            order = None if order[0] == dim else (order[0] - (order[0] > dim), *order[1:])
        shape, offset, size = ((*each[:dim], *each[dim + 1 :]) for each in (self.shape, self.offset, self.size))
        return Box(shape, offset, size, order)

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
