"""The fine-tuning example: its losses do not depend on the strategy or the number of ranks."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from layerwise import LocalWorld, solo_world

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "hf_finetune.py"))


def test_losses_are_those_of_one_process() -> None:
    model, finetune = EXAMPLE["build_model"](), EXAMPLE["finetune"]
    alone = finetune(copy.deepcopy(model), solo_world(), "dynamic", 2)
    assert alone[-1] < alone[0] - 0.1
    for strategy in ("dynamic", "repack+parents"):
        ranks = LocalWorld(4, 2).run(lambda world, s=strategy: finetune(copy.deepcopy(model), world, s, 2))
        assert all(losses == ranks[0] for losses in ranks)
        assert ranks[0] == pytest.approx(alone, abs=1e-4)
