"""How to go back through a chain of equal blocks with room for few of their inputs (Griewank & Walther 2000).

Going back takes a block's input; one that was not kept is made again from the nearest kept one before it. With c slots
and n blocks whose first input has one of them, the best is to run j blocks, put the next input into a second slot, go
back through the n - j blocks after it with c - 1 slots, and then through the first j with all c:

    again(n, 1) = n (n - 1) / 2        again(n, c) = min over j of  j + again(n - j, c - 1) + again(j, c)

In the first forward those j blocks run anyway, so there the first term is nothing. Counted are forwards made only to
reach an input; the replay that every block has in any case comes on top.
"""

from __future__ import annotations

from functools import cache

import numpy as np

Table = np.ndarray


@cache
def tables(slots: int, most: int) -> tuple[Table, Table, Table, Table]:
    """For 0 to `most` blocks: forwards run again where the blocks before are run for it, and after the first forward;
    and for either the j at which the next input gets a slot (the number of blocks: none does)."""
    blocks = np.arange(most + 1)
    again = first = blocks * (blocks - 1) // 2
    split = first_split = blocks.copy()
    for _ in range(1, slots):
        fewer, fewer_first = again, first
        again, first, split, first_split = (np.zeros(most + 1, dtype=int) for _ in range(4))
        split[1:2] = first_split[1:2] = 1
        for count in range(2, most + 1):
            tried = blocks[1:count]
            total = tried + fewer[count - tried] + again[tried]
            split[count] = 1 + int(total.argmin())
            again[count] = total.min()
            total = fewer_first[count - tried] + again[tried]
            first_split[count] = 1 + int(total.argmin())
            first[count] = total.min()
    return again, first, split, first_split


def forwards_again(slots: int, most: int) -> Table:
    """Forwards run again in a step's backward, for chains of 0 to `most` blocks."""
    return tables(slots, most)[1]


def places_kept(slots: int, count: int, *, is_first: bool = True) -> tuple[int, ...]:
    """Which of `count` blocks store their input on the way to the last block; the first input is stored already."""
    kept, start = [0], 0
    while slots > 1 and count > 1:
        split = tables(slots, count)[3 if is_first else 2]
        step = int(split[count])
        start, count, slots = start + step, count - step, slots - 1
        kept.append(start)
    return tuple(kept)
