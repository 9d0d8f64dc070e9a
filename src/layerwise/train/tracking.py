"""Metrics to Weights & Biases, for runs whose config asks for it; the package is an extra."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import ModuleType

from layerwise.errors import UnsupportedError
from layerwise.train.config import TrainConfig

RUN_ID_FILE = "wandb-run-id"


def load_wandb() -> ModuleType:
    """The package. Raises UnsupportedError where it is missing."""
    try:
        import wandb
    except ImportError:
        raise UnsupportedError(
            "the setting `wandb` needs the package `wandb`: pip install 'layerwise[wandb]', or leave the setting out"
        ) from None
    module: ModuleType = wandb
    return module


class WandbRun:
    """One run of a project. A training that goes on adds to the run that it began, whose id its folder keeps."""

    def __init__(self, config: TrainConfig, folder: Path, first_step: int) -> None:
        assert config.wandb is not None
        id_file = folder / RUN_ID_FILE
        goes_on = first_step > 0 and id_file.exists()
        if not goes_on:
            id_file.write_text(uuid.uuid4().hex)
        self._run = load_wandb().init(
            project=config.wandb.project,
            name=config.wandb.name,
            mode=config.wandb.mode,
            dir=str(folder),
            id=id_file.read_text(),
            resume="allow",
            config=config.model_dump(mode="json"),
        )

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Numbers of one step, by name."""
        self._run.log(scalars, step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
