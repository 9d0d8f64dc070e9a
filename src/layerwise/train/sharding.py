"""Weights, gradients and optimizer state spread over the ranks by torch's own FSDP2, and experts by expert parallelism.

A DeviceMesh says how: its dimensions are, in this order, "replicate" (copies), "shard" (parts of every weight) and
"ep" (parts of the experts); "shard" is the only one that must be there. Weights that are not experts are sharded over
"shard" and "ep" together. Nothing here depends on the plan: a rank's tokens may be of any sample.

Gradients are summed, never averaged, because the loss is divided by the tokens of the whole step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from layerwise.errors import SpecError
from layerwise.exchange import GroupComm
from layerwise.groups import share_timeout
from layerwise.model import HybridLM
from layerwise.model.moe import Experts
from layerwise.traffic import Block

Sharding = Literal["replicate", "fsdp", "hsdp"]
REPLICATE, SHARD, EXPERT_PARALLEL = "replicate", "shard", "ep"
_DIMS = (REPLICATE, SHARD, EXPERT_PARALLEL)


def build_mesh(
    sharding: Literal["fsdp", "hsdp"], *, num_ranks: int, ranks_per_node: int, expert_parallel: int, device_type: str
) -> DeviceMesh:
    """The mesh of all ranks: fsdp shards over all of them, hsdp within each node. Every rank calls this.

    `expert_parallel` consecutive ranks share the experts. Raises SpecError where it does not divide what is sharded.
    """
    sharded = num_ranks if sharding == "fsdp" else ranks_per_node
    if sharded % expert_parallel:
        legal = [n for n in range(1, sharded + 1) if sharded % n == 0]
        raise SpecError(
            f"expert_parallel={expert_parallel} must divide the {sharded} ranks that sharding={sharding} shards over; "
            f"legal values: {legal}"
        )
    dims = {REPLICATE: num_ranks // sharded, SHARD: sharded // expert_parallel, EXPERT_PARALLEL: expert_parallel}
    needed = (
        {SHARD} | ({REPLICATE} if sharding == "hsdp" else set()) | ({EXPERT_PARALLEL} if expert_parallel > 1 else set())
    )
    names = tuple(name for name in _DIMS if name in needed)
    mesh = init_device_mesh(device_type, tuple(dims[name] for name in names), mesh_dim_names=names)
    for name in names:
        share_timeout(mesh.get_group(name))
    return mesh


def shard_model(model: HybridLM, mesh: DeviceMesh, *, param_dtype: torch.dtype | None = None) -> None:
    """Shard a model in place, over a mesh that the caller may use for other things too.

    A model on the meta device is best: `model.materialize(device)` then makes this rank's parts only.
    param_dtype: of the gathered weights, e.g. bfloat16; gradients are summed in float32 or better in any case.
    Raises SpecError for a mesh with other dimensions, and for experts that do not divide over its "ep".
    """
    names = mesh.mesh_dim_names or ()
    if SHARD not in names or list(names) != [name for name in _DIMS if name in names]:
        raise SpecError(f"the mesh has dimensions {names}; expected {_DIMS} in this order, of which 'shard' is a must")
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=torch.promote_types(model.options.dtype, torch.float32),
        # Angles of positions must not be rounded; hidden states have the right dtype from the start.
        cast_forward_inputs=False,
    )
    dense_mesh, expert_mesh = _meshes(mesh, names)
    for layer in model.layers:
        if expert_mesh is not None:
            for experts in [module for module in layer.modules() if isinstance(module, Experts)]:
                _shard_experts(experts, mesh[EXPERT_PARALLEL], expert_mesh, policy)
        fully_shard(layer, mesh=dense_mesh, mp_policy=policy)
    fully_shard(model, mesh=dense_mesh, mp_policy=policy)
    sum_gradients(model)


def sum_gradients(model: nn.Module) -> None:
    """Let what torch's fully_shard has sharded in a model sum gradients over ranks, as token_loss needs; FSDP averages.

    To be called after the last fully_shard. Weights that stay whole need `reduce_gradients`.
    Raises SpecError for a model in which nothing is sharded.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise SpecError(f"nothing in this {type(model).__name__} is sharded: call fully_shard first")
    for module in sharded:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # by default a scaled sum, which gloo does not have


def _meshes(mesh: DeviceMesh, names: tuple[str, ...]) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The meshes that shard other weights and experts; None for the latter where both are the same."""
    copies = (REPLICATE,) if REPLICATE in names else ()
    if EXPERT_PARALLEL not in names:
        return mesh[(*copies, SHARD)], None
    together = f"{SHARD}_{EXPERT_PARALLEL}"
    flat = mesh[SHARD, EXPERT_PARALLEL]._flatten(together)
    share_timeout(flat.get_group())
    return DeviceMesh._concatenate([mesh[REPLICATE], flat]) if copies else flat, mesh[(*copies, SHARD)]


def _shard_experts(
    experts: Experts, ep_mesh: DeviceMesh, expert_mesh: DeviceMesh, policy: MixedPrecisionPolicy
) -> None:
    if experts.num_experts % ep_mesh.size():
        legal = [n for n in range(1, experts.num_experts + 1) if experts.num_experts % n == 0]
        raise SpecError(
            f"{experts.num_experts} experts do not divide over expert_parallel={ep_mesh.size()} ranks; legal values "
            f"are the divisors of the experts: {legal}"
        )
    num_shards = expert_mesh[SHARD].size()
    for name, weight in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(distribute_tensor(weight.data, ep_mesh, [Shard(0)], src_data_rank=None)))

    def placement(weight: nn.Parameter) -> Shard:
        # Not dim 0, which expert parallelism divides.
        dims = [dim for dim in (1, 2) if weight.shape[dim] % num_shards == 0]
        if not dims:
            raise SpecError(
                f"experts of shape {tuple(weight.shape)} cannot be sharded over {num_shards} ranks, which divide "
                "neither hidden_size nor moe_intermediate_size; choose another expert_parallel or sharding"
            )
        return Shard(dims[0])

    fully_shard(experts, mesh=expert_mesh, mp_policy=policy, shard_placement_fn=placement)
    ranks = ep_mesh.mesh.tolist()
    if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        raise SpecError(f"ranks {ranks} along mesh dimension 'ep' are not consecutive; make it the innermost one")
    experts.comm = GroupComm(Block(ranks[0], ranks[-1] + 1), ep_mesh.get_local_rank(), ep_mesh.get_group())


def sync_gradients_at(model: nn.Module, is_last: bool) -> None:
    """Sum gradients over ranks in this backward, or add them up on each rank until the last micro-batch's."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that the norm of all of them, over all ranks, is at most `max_norm`; the norm before that.

    The norm is the one that a single process with whole gradients has.
    """
    by_mesh: defaultdict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for p in parameters:
        if p.grad is not None:
            by_mesh[p.grad.device_mesh if isinstance(p.grad, DTensor) else None].append(p)
    norms = [_whole(get_total_norm([p.grad for p in group if p.grad is not None])) for group in by_mesh.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for group in by_mesh.values():
        clip_grads_with_norm_(group, max_norm, norm)
    return norm


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
