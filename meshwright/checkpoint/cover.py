"""Do these boxes hold every element of a tensor exactly once?

Cut the tensor along every edge of every box, and mark the cells each box takes. Pieces of a mesh are a grid,
so there are about as many cells as boxes; the work is bounded for any input, unlike comparing all pairs.

     +----+--+        edges 0 4 6 across, 0 2 5 down: 4 cells
     | A  |  |        A takes cell (0,0), C both cells of the second column
     +----+ C|        and so each must be marked once
     | B  |  |
     +----+--+
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from meshwright.core.box import Box

MAX_CELLS = 1 << 22


def cover_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """None, or what is wrong: overlap, or elements that no box holds. Boxes lie within the shape."""
    boxes = [box for box in boxes if not box.is_empty]
    total, held = math.prod(shape), sum(math.prod(box.size) for box in boxes)
    if held < total:
        return f"its pieces hold {held} of its {total} elements."
    if held > total:
        return f"its pieces overlap: they hold {held} elements, it has {total}."
    if len(boxes) < 2:
        return None
    return _overlap_of_equal_volume(len(shape), boxes)


def _overlap_of_equal_volume(num_dims: int, boxes: Sequence[Box]) -> str | None:
    index_of_edge = [
        {edge: index for index, edge in enumerate(sorted({e for box in boxes for e in _edges(box, dim)}))}
        for dim in range(num_dims)
    ]
    sizes = [len(index) - 1 for index in index_of_edge]
    if math.prod(sizes) > MAX_CELLS:
        return f"its {len(boxes)} pieces are cut too irregularly to check ({math.prod(sizes)} cells)."
    spans = [
        tuple(slice(*(index_of_edge[dim][edge] for edge in _edges(box, dim))) for dim in range(num_dims))
        for box in boxes
    ]
    # Counted before they are marked, so that marking never costs more than one visit to each cell.
    if sum(math.prod(s.stop - s.start for s in span) for span in spans) != math.prod(sizes):
        return "its pieces overlap."
    cells = np.zeros(sizes, dtype=bool)
    for span in spans:
        cells[span] = True
    return None if cells.all() else "its pieces overlap."


def _edges(box: Box, dim: int) -> tuple[int, int]:
    return box.offset[dim], box.offset[dim] + box.size[dim]
