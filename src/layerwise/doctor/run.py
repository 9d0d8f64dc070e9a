"""An examination from start to diagnosis, on ranks of its own or on those that torchrun started."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from layerwise.doctor import judge
from layerwise.doctor.check import Check, Diagnosis, ok, wrong
from layerwise.doctor.clock import measure_offsets
from layerwise.doctor.facts import Facts, own_facts, rank_facts
from layerwise.doctor.folders import look_at_folder
from layerwise.doctor.links import BETWEEN, INSIDE, check_links
from layerwise.doctor.words import gather_texts
from layerwise.errors import LayerwiseError
from layerwise.groups import World
from layerwise.kernels import check_backend, choose_backend
from layerwise.model import HybridLM, ModelOptions
from layerwise.spec import FULL
from layerwise.train.config import TrainConfig
from layerwise.train.launch import launch, under_torchrun
from layerwise.train.loop import DTYPES
from layerwise.train.run import checkpoint_folder

# A float32 weight and its two moments of AdamW.
_BYTES_PER_WEIGHT = 12


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What to look over. config: of the run to come; None: only what every run needs. out: as of that run.

    ranks_per_node: local ranks to start where torchrun has not started any. timeout_s: how long ranks wait.
    """

    config: TrainConfig | None
    out: Path
    ranks_per_node: int
    device: str = "auto"
    timeout_s: float = 60.0


def examine(options: DoctorOptions) -> Diagnosis:
    """Look over this installation; under torchrun every rank calls this, and all get the same.

    Ranks that do not meet, or fail, are a finding and no error.
    """
    local_ranks = _local_ranks(options)
    num_ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else local_ranks
    # Hosts with different numbers of ranks have no nodes; that is found before nodes are needed.
    ranks_per_node = local_ranks if num_ranks % local_ranks == 0 else 1
    with tempfile.TemporaryDirectory(prefix="layerwise-doctor-") as name:
        folder = Path(name)

        def rank_main(world: World, device: torch.device) -> None:
            diagnosis = _examine_rank(options, world, device, local_ranks)
            (folder / str(world.rank)).write_text(diagnosis.model_dump_json())

        try:
            launch(
                rank_main,
                num_ranks=num_ranks,
                ranks_per_node=ranks_per_node,
                device=options.device,
                timeout_s=options.timeout_s,
            )
        except (LayerwiseError, RuntimeError) as error:
            return _without_ranks(options, error)
        return Diagnosis.model_validate_json((folder / os.environ.get("RANK", "0")).read_text())


def _local_ranks(options: DoctorOptions) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if under_torchrun() else options.ranks_per_node


def _examine_rank(options: DoctorOptions, world: World, device: torch.device, local_ranks: int) -> Diagnosis:
    config = options.config
    cluster = config.cluster if config else None
    local_rank = int(os.environ.get("LOCAL_RANK", world.rank))
    mine = rank_facts(device, local_rank, local_ranks, config.data if config else None)
    facts = [Facts.model_validate_json(text) for text in gather_texts(world, mine.model_dump_json())]
    shape = judge.judge_shape(facts, cluster)
    checks = [
        judge.judge_versions(facts),
        shape,
        judge.judge_devices(facts, cluster),
        judge.judge_network(facts),
        judge.judge_clocks(facts, measure_offsets(world)),
    ]
    if shape.status == "wrong":
        checks += [ok(name, "not measured: the ranks are wrong") for name in (INSIDE, BETWEEN)]
    else:
        checks += check_links(world, device, cluster)
    checks += _check_folders(options, world, facts)
    if config is not None:
        checks += [judge.judge_data(facts), _check_attention(config, device)]
    return Diagnosis(checks=tuple(checks))


def _check_folders(options: DoctorOptions, world: World, facts: list[Facts]) -> list[Check]:
    config = options.config
    saves = config is not None and config.checkpoint.every_steps is not None
    folders = {"--out": options.out}
    if config is not None and saves:
        folders["checkpoints"] = checkpoint_folder(config, options.out)
    return [
        judge.judge_folder(
            name,
            facts,
            look_at_folder(world, folder),
            needed_bytes=_checkpoint_bytes(config) if config is not None and name == "checkpoints" else 0,
            must_be_shared=saves,
        )
        for name, folder in folders.items()
    ]


def _checkpoint_bytes(config: TrainConfig) -> int:
    """Of all checkpoints that are there at once: those kept, and the one being written."""
    model = HybridLM(config.model, ModelOptions(), device="meta")
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    return (config.checkpoint.keep + 1) * _BYTES_PER_WEIGHT * num_weights


def _check_attention(config: TrainConfig, device: torch.device) -> Check:
    """The kernel of full attention, which "auto" chooses by device, dtype and head size."""
    name, backend, spec = "attention", config.attention_backend, config.model.attention(FULL)
    try:
        check_backend(backend)
    except LayerwiseError as error:
        return wrong(name, str(error), "install it, or set attention_backend=auto")
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else DTYPES[config.dtype]
    q, v = (torch.empty(0, 1, dim, dtype=dtype, device=device) for dim in (spec.head_dim, spec.v_head_dim))
    return ok(
        name, f"attention_backend={backend}, which runs {choose_backend(q, v, None)}" if backend == "auto" else backend
    )


def _without_ranks(options: DoctorOptions, error: Exception) -> Diagnosis:
    """What one process can say when the ranks did not meet, or one of them failed."""
    facts = [own_facts(options.device if options.device != "cuda" or torch.cuda.is_available() else "cpu")]
    advice = "all hosts must start the same command, reach the rendezvous, and have the interface that is named below"
    return Diagnosis(
        checks=(
            wrong("ranks", str(error), advice),
            judge.judge_versions(facts),
            judge.judge_network(facts),
        ),
        ranks_met=False,
    )
