"""The exact optimum of what the planners' estimates (planners/estimate.py) say, by CP-SAT.

A choice puts one sample on a parent block of ranks, which computes its full attention, and on an owner block, which
holds its tokens in every layer. Without repacking both are the same block. The solver chooses a partition of the ranks
into aligned parents, which parents repack, and the choice of every sample, all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from layerwise.cost import CostModel
from layerwise.plan import MicrobatchPlan, Parent, StepPlan
from layerwise.planners.estimate import GroupClass, group_base, group_loads
from layerwise.planners.layout import Placement, lay_out
from layerwise.spec import FULL, ClusterSpec
from layerwise.traffic import Block
from tests.exact.instances import Instance

Floats = NDArray[np.float64]

# Seconds become whole units of (all work on one rank) / UNITS. A sample's load in a dimension is off by half a unit at
# most, so two answers that CP-SAT holds for equal differ by less than 1e-5 of the optimum on these instances.
UNITS = 10**8
LARGEST = 10 * UNITS
# In CP-SAT's deterministic time, which is near seconds and the same on every machine; no instance needs a tenth of it.
TIME_LIMIT = 60.0


@dataclass(frozen=True)
class Choice:
    """Where one sample goes: `parent` computes its full attention, `owner` holds its tokens."""

    parent: Block
    owner: Block
    repacked: bool = False


@cache
def aligned_blocks(cluster: ClusterSpec) -> tuple[Block, ...]:
    """Every block that a group may be, widest first: powers of two inside a node, or of nodes, or all ranks."""
    node, blocks = cluster.ranks_per_node, {Block(0, cluster.num_ranks)}
    for exponent in range(cluster.num_ranks.bit_length()):
        size = 1 << exponent
        for first in range(0, cluster.num_ranks, node):
            blocks |= {Block(first + lo, first + min(lo + size, node)) for lo in range(0, node, size)}
        blocks |= {
            Block(lo, min(lo + size * node, cluster.num_ranks)) for lo in range(0, cluster.num_ranks, size * node)
        }
    return tuple(sorted(blocks, key=lambda block: (-block.size, block.lo)))


def group_choices(instance: Instance) -> list[Choice]:
    """`dynamic`: one layout for all layers."""
    return [Choice(block, block) for block in aligned_blocks(instance.cluster)]


def repack_choices(instance: Instance) -> list[Choice]:
    """`repack+parents`: groups as above, or children inside the nodes of groups wider than a node."""
    blocks, node_ranks = aligned_blocks(instance.cluster), instance.cluster.ranks_per_node
    return group_choices(instance) + [
        Choice(parent, owner, repacked=True)
        for parent in blocks
        for owner in blocks
        if parent.size > node_ranks >= owner.size and parent.lo <= owner.lo and owner.hi <= parent.hi
    ]


class Estimate:
    """Seconds that choices put on ranks, by the closed forms of planners/estimate.py."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.num_ranks = instance.cluster.num_ranks
        self.lengths = np.array(instance.lengths, dtype=np.int64)
        # One row per layer kind and one for the head, whatever the cluster's sync.
        by_layer = instance.cluster.model_copy(update={"sync": "layer"})
        self.cost = CostModel(cluster=by_layer, model=instance.model)
        self.kinds = [layer.kind for layer in self.cost.layers]

    def added(self, choice: Choice) -> Floats:
        """What each sample adds to every rank, float64 [rows, samples, ranks]."""
        owner = self._on(choice.owner, self._loads(choice.owner.size))
        if not choice.repacked:
            return owner
        wide = self._on(choice.parent, self._loads(choice.parent.size))
        linear = np.stack([layer.num_layers * layer.token_s * self.lengths for layer in self.cost.layers])
        for row in (i for i, kind in enumerate(self.kinds) if kind == FULL):
            on_parent = self._on(choice.parent, linear[[row]] / choice.parent.size)[0]
            owner[row] = wide[row] - on_parent + self._on(choice.owner, linear[[row]] / choice.owner.size)[0]
        return owner

    def parent_base(self, choice: Choice) -> Floats:
        """What the parent's messages cost its ranks, float64 [rows, ranks]; of full layers only where repacked."""
        group = GroupClass(choice.parent.size, choice.repacked)
        return self._on(choice.parent, group_base(self.cost, [group]))[:, 0]

    def child_base(self, owner: Block) -> Floats:
        """What a child's messages cost its ranks, float64 [rows, ranks]; blocks nest, so the widest one counts."""
        base = group_base(self.cost, [GroupClass(owner.size)])
        base[[i for i, kind in enumerate(self.kinds) if kind == FULL]] = 0.0
        return self._on(owner, base)[:, 0]

    def dims(self, rows: Floats) -> Floats:
        """Rows that are waited for one by one, or their sum: float64 [dims, ...]."""
        return rows if self.instance.cluster.sync == "layer" else rows.sum(axis=0, keepdims=True)

    def rank_loads(self, chosen: dict[int, Choice]) -> Floats:
        """Seconds of every rank in a micro-batch of these samples, float64 [rows, ranks]."""
        loads = np.zeros((len(self.kinds) + 1, self.num_ranks))
        for sample, choice in chosen.items():
            loads += self.added(choice)[:, sample]
        for parent in {Choice(c.parent, c.parent, c.repacked) for c in chosen.values()}:
            loads += self.parent_base(parent)
        children = [self.child_base(owner) for owner in {c.owner for c in chosen.values() if c.repacked}]
        return loads + np.max(children, axis=0) if children else loads

    def step_s(self, microbatches: Iterable[dict[int, Choice]]) -> float:
        """Seconds of a step, as CostModel.step_s adds them up."""
        loads = np.stack([self.dims(self.rank_loads(chosen)) for chosen in microbatches])
        if self.instance.cluster.sync == "layer":
            return float(loads.max(axis=2).sum())
        return float(loads.sum(axis=0).max())

    def _loads(self, degree: int) -> Floats:
        return group_loads(self.cost, self.lengths, [GroupClass(degree)]).loads

    def _on(self, block: Block, columns: Floats) -> Floats:
        """float64 [rows, items] or [rows, items, 1] spread over the ranks of a block."""
        table = np.zeros((*columns.shape[:2], self.num_ranks))
        table[:, :, block.lo : block.hi] = columns.reshape(*columns.shape[:2], 1)
        return table


class _Microbatch:
    """The variables of one micro-batch: which groups are formed, who goes where, which owner blocks are used."""

    def __init__(self, model: cp_model.CpModel, instance: Instance, choices: Sequence[Choice]) -> None:
        self.choices, samples = choices, range(len(instance.lengths))
        self.formed = {(c.parent, c.repacked): model.new_bool_var("") for c in choices}
        self.uses = {c.owner: model.new_bool_var("") for c in choices if c.repacked}
        self.takes = {(i, c): model.new_bool_var("") for c in choices for i in samples}
        for rank in range(instance.cluster.num_ranks):
            model.add_exactly_one(var for (block, _), var in self.formed.items() if block.lo <= rank < block.hi)
        for (_, c), var in self.takes.items():
            model.add_implication(var, self.formed[c.parent, c.repacked])
            if c.repacked:
                model.add_implication(var, self.uses[c.owner])
        self._limit_tokens(model, instance)

    def _limit_tokens(self, model: cp_model.CpModel, instance: Instance) -> None:
        """A group holds its ranks' budget; where samples have owners of their own, each rank does."""
        for c in (c for c in self.choices if not c.repacked):
            held = sum(length * self.takes[i, c] for i, length in enumerate(instance.lengths))
            model.add(held <= c.parent.size * instance.budget)
        children = [c for c in self.choices if c.repacked]
        for rank in range(instance.cluster.num_ranks) if children else ():
            here = [c for c in children if c.owner.lo <= rank < c.owner.hi]
            parts = (
                -(-length // c.owner.size) * self.takes[i, c] for c in here for i, length in enumerate(instance.lengths)
            )
            model.add(sum(parts) <= instance.budget)

    def loads(self, units: _Units, dim: int, rank: int) -> list[Any]:
        """What the rank's load is not below; one expression, or one for each child block with messages of its own."""
        terms = [int(units.added[c][dim, i, rank]) * var for (i, c), var in self.takes.items()]
        load: Any = sum(terms + [int(units.base[group][dim, rank]) * var for group, var in self.formed.items()])
        children = ((int(units.child_base[owner][dim, rank]), var) for owner, var in self.uses.items())
        return [load, *(load + base * var for base, var in children if base)]


class _Units:
    """An estimate in whole units."""

    def __init__(self, estimate: Estimate, choices: Sequence[Choice]) -> None:
        single = Block(0, 1)
        self.unit_s = float(estimate.dims(estimate.added(Choice(single, single))).sum()) / UNITS
        self.added = {c: self._round(estimate.dims(estimate.added(c))) for c in choices}
        self.base = {(c.parent, c.repacked): self._round(estimate.dims(estimate.parent_base(c))) for c in choices}
        owners = {c.owner for c in choices if c.repacked}
        self.child_base = {owner: self._round(estimate.dims(estimate.child_base(owner))) for owner in owners}
        self.num_dims = len(next(iter(self.added.values())))

    def _round(self, seconds: Floats) -> Any:
        return np.rint(seconds / self.unit_s).astype(np.int64)


def solve(instance: Instance, choices: Sequence[Choice], num_microbatches: int = 1) -> list[dict[int, Choice]]:
    """The best choice of every sample, proven, in at most `num_microbatches` micro-batches; those that hold samples."""
    model = cp_model.CpModel()
    parts = [_Microbatch(model, instance, choices) for _ in range(num_microbatches)]
    for i in range(len(instance.lengths)):
        model.add_exactly_one(part.takes[i, c] for part in parts for c in choices)
    _minimise(model, Estimate(instance), choices, parts)
    solver = solved(model, repr(instance))
    found = [{i: c for (i, c), var in part.takes.items() if solver.boolean_value(var)} for part in parts]
    return [chosen for chosen in found if chosen]


def solved(model: cp_model.CpModel, what: str) -> cp_model.CpSolver:
    """The solver after it has proven an optimum; `what` names the problem if it could not."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = TIME_LIMIT
    status = solver.solve(model)
    assert status == cp_model.OPTIMAL, f"{what}: {solver.status_name(status)} within {TIME_LIMIT} units"
    return solver


def _minimise(model: cp_model.CpModel, estimate: Estimate, choices: Sequence[Choice], parts: list[_Microbatch]) -> None:
    """The sum over dimensions of the highest rank; where ranks wait once a step, of all micro-batches together."""
    units, ranks = _Units(estimate, choices), range(estimate.num_ranks)
    highest = []
    if estimate.instance.cluster.sync == "layer":
        for part in parts:
            for dim in range(units.num_dims):
                top = model.new_int_var(0, LARGEST, "")
                highest.append(top)
                for load in (load for rank in ranks for load in part.loads(units, dim, rank)):
                    model.add(load <= top)
    else:
        highest.append(model.new_int_var(0, LARGEST, ""))
        for rank in ranks:
            tops = [model.new_int_var(0, LARGEST, "") for _ in parts]
            model.add(sum(tops) <= highest[0])
            for part, top in zip(parts, tops, strict=True):
                for load in part.loads(units, 0, rank):
                    model.add(load <= top)
    model.minimize(sum(highest))


def lay_out_choices(instance: Instance, chosen: dict[int, Choice]) -> MicrobatchPlan:
    """The micro-batch of these choices."""
    members: dict[tuple[Block, bool], list[int]] = {}
    for sample, choice in chosen.items():
        members.setdefault((choice.parent, choice.repacked), []).append(sample)
    parents, children = [], {}
    for (block, repacked), samples in members.items():
        parent = Parent(first_rank=block.lo, sp_degree=block.size, samples=tuple(samples))
        parents.append(parent)
        if repacked:
            owners = [chosen[sample].owner for sample in samples]
            columns = (samples, [o.lo for o in owners], [o.size for o in owners])
            children[parent] = Placement(*(np.array(column, dtype=np.int64) for column in columns))
    lengths = np.array(instance.lengths, dtype=np.int64)
    return lay_out(lengths, instance.cost.attention, parents, children)


def read_choices(plan: StepPlan) -> list[dict[int, Choice]]:
    """The choices that a plan made, for each micro-batch."""
    found = []
    for microbatch in plan.microbatches:
        sample, rank = microbatch.shards.column("sample"), microbatch.shards.column("rank")
        chosen = {}
        for parent in microbatch.parents:
            block = Block(parent.first_rank, parent.first_rank + parent.sp_degree)
            for i in parent.samples:
                ranks = rank[sample == i]
                owner = Block(int(ranks.min()), int(ranks.max()) + 1) if parent.repacked else block
                chosen[i] = Choice(block, owner, parent.repacked)
        found.append(chosen)
    return found
