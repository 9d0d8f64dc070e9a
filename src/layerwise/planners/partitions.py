"""Ways to divide the ranks of a cluster into groups: aligned blocks that cover every rank once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np

from layerwise.cost import Floats
from layerwise.plan import Ints
from layerwise.planners.problem import StepProblem, degree_ladder

# A sample gets the smallest group in which its seconds per rank stay below this multiple of the mean over ranks.
WORK_SHARES = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0, np.inf)
# Up to this many ranks every partition is tried (36 of 16 ranks); beyond, those that the samples suggest.
EXHAUSTIVE_RANKS = 16


class Partition(NamedTuple):
    """Groups of ranks [first[i], first[i] + size[i]), int64 [groups] each, that cover the cluster in order."""

    first: Ints
    size: Ints


def partitions(problem: StepProblem, samples: Ints, ladder: Sequence[int]) -> list[Partition]:
    """Partitions worth a try for these samples, each once; `ladder` are the degrees allowed, ascending."""
    cluster = problem.cluster
    counts = [(degree,) * (cluster.num_ranks // degree + 1) for degree in ladder]
    if cluster.num_ranks <= EXHAUSTIVE_RANKS:
        counts += _all_degrees(cluster.num_ranks, tuple(reversed(ladder)))
    else:
        for share in WORK_SHARES:
            groups = _groups_filled(problem, samples, ladder, share)
            counts += [tuple(_group_degrees(groups, ladder, round_up)) for round_up in (True, False)]
    found = {}
    for degrees in dict.fromkeys(counts):
        partition = tile_cluster(degrees, cluster.num_ranks, cluster.ranks_per_node)
        found[partition.size.tobytes()] = partition
    return list(found.values())


@lru_cache(maxsize=1024)
def tile_cluster(degrees: tuple[int, ...], num_ranks: int, ranks_per_node: int) -> Partition:
    """Groups of these degrees, given in descending order, as long as ranks last; then single ranks."""
    parts, cursor = [], 0
    for degree in sorted(set(degrees), reverse=True):
        first, end = aligned_blocks(degree, num_ranks, ranks_per_node)
        begin = int(np.searchsorted(first, cursor))
        chosen = slice(begin, begin + degrees.count(degree))
        parts.append((first[chosen], end[chosen] - first[chosen]))
        cursor = int(end[chosen][-1]) if len(end[chosen]) else cursor
    rest = np.arange(cursor, num_ranks)
    parts.append((rest, np.ones_like(rest)))
    return Partition(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


@lru_cache(maxsize=256)
def aligned_blocks(degree: int, num_ranks: int, ranks_per_node: int) -> tuple[Ints, Ints]:
    """First ranks and ends of all aligned blocks of `degree` ranks; shorter where a node or the cluster ends."""
    if degree >= ranks_per_node:
        first = np.arange(0, num_ranks, degree)
        return first, np.minimum(first + degree, num_ranks)
    within = np.arange(0, ranks_per_node, degree)
    node = np.arange(0, num_ranks, ranks_per_node)[:, None]
    return (node + within).reshape(-1), (node + np.minimum(within + degree, ranks_per_node)).reshape(-1)


def _all_degrees(ranks: int, degrees: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every descending sequence of `degrees` that adds up to `ranks`."""
    if not degrees or ranks == 0:
        return [()] if ranks == 0 else []
    largest, rest = degrees[0], degrees[1:]
    return [
        (largest,) * count + tail
        for count in range(ranks // largest, -1, -1)
        for tail in _all_degrees(ranks - count * largest, rest)
    ]


def _groups_filled(problem: StepProblem, samples: Ints, ladder: Sequence[int], share: float) -> Floats:
    """How many groups of each size the samples that ask for it fill, float64 [sizes]."""
    work, sizes = problem.work_s[samples], np.array(ladder)
    mean = work.sum() / problem.cluster.num_ranks
    by_tokens = np.searchsorted(sizes * problem.max_tokens_per_rank, problem.lengths[samples])
    by_work = np.searchsorted(sizes * share * mean, work * (1 - 1e-9))
    asked = np.minimum(np.maximum(by_tokens, by_work), len(sizes) - 1)
    return np.asarray(np.bincount(asked, weights=work, minlength=len(sizes)) / (sizes * mean))


def _group_degrees(groups: Floats, ladder: Sequence[int], round_up: bool) -> Iterator[int]:
    """The sizes of whole groups, widest first; ranks alone are what is left."""
    for degree, count in zip(reversed(ladder[1:]), groups[:0:-1].tolist(), strict=True):
        if count > 0:
            yield from [degree] * max(1, ceil(count) if round_up else int(count))


def widths_allowed(problem: StepProblem, max_sp_degree: int | None) -> list[int]:
    """Degrees of groups on this cluster, ascending, none wider than `max_sp_degree`."""
    return [d for d in degree_ladder(problem.cluster) if d <= (max_sp_degree or problem.cluster.num_ranks)]
