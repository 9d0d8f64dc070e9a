"""verl-style: static sequence-parallel groups, samples balanced over them by Karmarkar-Karp.

verl balances a batch over data-parallel ranks, and micro-batches within each, by the largest differencing method on
tokens or on `24576 L + L^2` (its workload for a 7B model). Here both workloads and every static width are tried, and
the best by our cost model counts: more than verl does, where the width is set once by hand.
"""

from __future__ import annotations

import heapq

import numpy as np

from benchmarks.peers.task import Groups, Task, parents_from
from layerwise.plan import Ints, StepPlan

# verl, utils/seqlen_balancing.py: FLOPs of a 7B model are proportional to LINEAR_TOKENS * L + L^2.
LINEAR_TOKENS = 24576
MORE_MICROBATCHES = 4


def plan_static_kk(task: Task) -> StepPlan | None:
    """The best width and workload, each balanced by Karmarkar-Karp."""
    workloads = (task.lengths, LINEAR_TOKENS * task.lengths + task.lengths**2)
    found = [_groups(task, degree, work) for degree in task.degrees for work in workloads]
    return task.fastest([microbatches for microbatches in found if microbatches is not None])


def _groups(task: Task, degree: int, work: Ints) -> list[Groups] | None:
    """Micro-batches of equal groups: as few as keep the budget. None where many do not."""
    capacity, num_groups = degree * task.max_tokens_per_rank, task.num_ranks // degree
    if int(task.lengths.max()) > capacity:
        return None
    for num_microbatches in range(task.fewest_microbatches, task.fewest_microbatches + MORE_MICROBATCHES):
        parts = karmarkar_karp(work, num_groups * num_microbatches)
        if max(int(task.lengths[part].sum()) for part in parts) <= capacity:
            break
    else:
        return None
    # Parts of like work run at the same time, as in verl, where micro-batches are sorted by workload.
    parts.sort(key=lambda part: -int(work[part].sum()))
    ranks = [(group * degree, degree) for group in range(num_groups)]
    return [parents_from(ranks, parts[i : i + num_groups]) for i in range(0, len(parts), num_groups)]


def karmarkar_karp(work: Ints, num_parts: int) -> list[list[int]]:
    """Items in `num_parts` parts of level work, by the largest differencing method; int64 [items] of work.

    Every item starts as a partition of its own, whose other parts are empty. The two partitions with the largest spread
    merge, the fullest part of one with the emptiest of the other, until one is left. A part is a node of a binary tree:
    0 is empty, 1 .. items are the items, later ones join two nodes.
    """
    num_items = len(work)
    joined = np.zeros((1 + num_items + (num_items - 1) * num_parts, 2), dtype=np.int64)
    heap: list[tuple[int, int, Ints, Ints]] = []  # (minus the spread, serial number, sums descending, nodes)
    for item, value in enumerate(work.tolist()):
        sums, nodes = np.zeros((2, num_parts), dtype=np.int64)
        sums[0], nodes[0] = value, 1 + item
        heap.append((-value, item, sums, nodes))
    heapq.heapify(heap)
    for first in range(1 + num_items, len(joined), num_parts):
        (_, _, sums_a, nodes_a), (_, _, sums_b, nodes_b) = heapq.heappop(heap), heapq.heappop(heap)
        sums = sums_a + sums_b[::-1]
        order = np.argsort(-sums, kind="stable")
        joined[first : first + num_parts] = np.stack([nodes_a, nodes_b[::-1]], axis=1)[order]
        sums = sums[order]
        heapq.heappush(heap, (int(sums[-1] - sums[0]), first, sums, first + np.arange(num_parts)))
    return [_items(joined, num_items, node) for node in heap[0][3].tolist()]


def _items(joined: Ints, num_items: int, root: int) -> list[int]:
    """The items below a node."""
    items, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        if node > num_items:
            waiting += joined[node].tolist()
        elif node > 0:
            items.append(node - 1)
    return items
