"""Chooses few of many cases such that any two values that meet in some case still meet."""

import heapq
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations_with_replacement
from zlib import crc32


def covering(cases: Sequence[Mapping[str, Hashable]], together: int = 2) -> list[int]:
    """Indices, in order, of cases that still contain every pair of values that occurs in some case.

    Greedy: the case with the most pairs that are new; of those, one in no order, so that all values are taken about
    equally often. The pairs that are new only ever become fewer, so that it is enough to look at the top of a heap.

    Args:
        cases: The values of each case, by the names of their parameters. Any cases do, not only full products.
        together: How many values are to meet, instead of two; with one, each value is in some case.
    """
    pairs = [set(combinations_with_replacement(sorted(case.items(), key=_name), together)) for case in cases]
    missing, taken = set().union(*pairs), []
    waiting = [(-len(pairs[i]), crc32(str(i).encode()), i) for i in range(len(cases))]
    heapq.heapify(waiting)
    while missing:
        most, shuffled, i = waiting[0]
        new = len(pairs[i] & missing)
        if new < -most:
            heapq.heapreplace(waiting, (-new, shuffled, i))
        else:
            heapq.heappop(waiting)
            missing -= pairs[i]
            taken.append(i)
    return sorted(taken) or [0][: len(cases)]  # cases without parameters are all alike


def _name(item: tuple[str, Hashable]) -> str:
    return item[0]
