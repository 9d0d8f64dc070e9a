"""The examples: their losses do not depend on the strategy, the number of ranks or who runs the loop."""

from __future__ import annotations

import copy
import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from layerwise import LocalWorld, solo_world
from tests.hf.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = runpy.run_path(str(EXAMPLES / "hf_finetune.py"))


def test_losses_are_those_of_one_process() -> None:
    model, finetune = EXAMPLE["build_model"](), EXAMPLE["finetune"]
    alone = finetune(copy.deepcopy(model), solo_world(), "dynamic", 2)
    assert alone[-1] < alone[0] - 0.1
    for strategy in ("dynamic", "repack+parents"):
        ranks = LocalWorld(4, 2).run(lambda world, s=strategy: finetune(copy.deepcopy(model), world, s, 2))
        assert all(losses == ranks[0] for losses in ranks)
        assert ranks[0] == pytest.approx(alone, abs=1e-4)


@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_sixteen_ranks_have_the_losses_of_one_with_either_strategy() -> None:
    script, steps = EXAMPLES / "hf_finetune.py", ("--steps", 2)
    expected = numbers("loss", run_ranks(1, script, *steps))
    assert len(expected) == 2
    for strategy in ("dynamic", "repack+parents"):
        assert numbers("loss", run_ranks(16, script, *steps, "--strategy", strategy)) == pytest.approx(
            expected, abs=1e-4
        )


def numbers(name: str, text: str) -> list[float]:
    """The numbers printed after a name."""
    return [float(value) for value in re.findall(rf"\b{name}\b'?:? +'?([0-9.]+)", text)]


TRAINER, ACCELERATE = EXAMPLES / "hf_trainer.py", EXAMPLES / "hf_accelerate.py"
FOUR_STEPS = ("--steps", 4, "--save-steps", 2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Trainer on one rank: the folder with the model, and what it printed."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("alone")
    return folder, run_ranks(1, TRAINER, *FOUR_STEPS, "--out", folder)


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_trainer_on_four_ranks_trains_evaluates_and_resumes_as_on_one(tmp_path: Path, alone: tuple[Path, str]) -> None:
    """Gradient norms tell a wrong scale of the gradients, which Adam would hide."""
    four = run_ranks(4, TRAINER, "--steps", 2, "--save-steps", 2, "--out", tmp_path)
    four += run_ranks(4, TRAINER, *FOUR_STEPS, "--resume", "--out", tmp_path)
    for name, count in (("loss", 4), ("grad_norm", 4), ("eval_loss", 2)):
        expected = numbers(name, alone[1])
        assert len(expected) == count
        assert numbers(name, four) == pytest.approx(expected, abs=2e-3)
    assert_plain_checkpoints_alike(tmp_path, alone[0])


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_trainer_with_fsdp2_trains_evaluates_and_resumes_as_on_one_rank(
    tmp_path: Path, alone: tuple[Path, str]
) -> None:
    """Parameters, gradients and optimizer sharded over four ranks; the file's name says that FSDP wrote it."""
    four = run_ranks(4, TRAINER, "--fsdp", "--steps", 2, "--save-steps", 2, "--out", tmp_path)
    four += run_ranks(4, TRAINER, "--fsdp", *FOUR_STEPS, "--resume", "--out", tmp_path)
    assert (tmp_path / "checkpoint-4" / "pytorch_model_fsdp.bin").exists()
    for name, count in (("loss", 4), ("grad_norm", 4), ("eval_loss", 2)):
        expected = numbers(name, alone[1])
        assert len(expected) == count
        assert numbers(name, four) == pytest.approx(expected, abs=2e-3)
    assert_plain_checkpoints_alike(tmp_path, alone[0])


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_accelerate_with_fsdp2_trains_as_trainer_does(tmp_path: Path, alone: tuple[Path, str]) -> None:
    """Same samples, learning rate and clipping, another strategy, and parameters sharded over four ranks."""
    sharded = run_ranks(4, ACCELERATE, "--steps", 4, "--strategy", "dynamic", "--out", tmp_path)
    assert "sharded: True" in sharded
    assert numbers("loss", sharded) == pytest.approx(numbers("loss", alone[1]), abs=2e-3)
    assert numbers("gradient norm", sharded) == pytest.approx(numbers("grad_norm", alone[1]), abs=2e-3)
    assert_plain_checkpoints_alike(tmp_path, alone[0])


def assert_plain_checkpoints_alike(one: Path, other: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (one, other))
    assert ours.keys() == theirs.keys()
    # Adam's first steps magnify rounding where a gradient is almost zero.
    assert all(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) < 0.05 for name in ours)
