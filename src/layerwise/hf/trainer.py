"""transformers.Trainer over planned steps: one of its batches is a whole optimizer step, of all its micro-batches.

Trainer takes a fixed number of micro-batches per step, and DDP and FSDP average gradients over ranks. A plan has as
many micro-batches as it needs, the same on every rank, and its losses are sums: so `training_step` runs them all, and
multiplies each by the number of ranks. All else is Trainer's own: optimizer, schedule, clipping, logs, checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from layerwise.data.loader import PlannedLoader, Step
from layerwise.errors import DataError, SpecError, UnsupportedError
from layerwise.hf.batches import batches
from layerwise.hf.loss import loss

# Training arguments that would have no effect, or a wrong one, and the largest value at which that does not matter.
_REFUSED = {
    "gradient_accumulation_steps": (1, "each step has the micro-batches that its plan needs"),
    "label_smoothing_factor": (0, "the loss is layerwise.hf.loss"),
    "dataloader_num_workers": (0, "PlannedLoader plans ahead on a thread of its own"),
    "n_gpu": (1, "start one process per device with torchrun or accelerate launch"),
}


class PlannedTrainer(Trainer):
    """transformers.Trainer whose `train_dataset` and `eval_dataset` are PlannedLoaders, of a model after `apply`.

    Its losses, also of evaluation, are means over all labels of a step or of the evaluation, whatever the ranks hold.
    An epoch is all `steps` of the train loader; endless ones need `max_steps`. Resuming plans no step that was trained.
    Raises UnsupportedError for arguments that would have no effect, and SpecError for loaders of another world.
    """

    def __init__(
        self, *, model: Any, args: TrainingArguments, train_dataset: Any = None, eval_dataset: Any = None, **others: Any
    ) -> None:
        if isinstance(eval_dataset, dict):
            eval_steps: Any = {name: _PlannedSteps.of(loader, args) for name, loader in eval_dataset.items()}
        else:
            eval_steps = _PlannedSteps.of(eval_dataset, args)
        train_steps = _PlannedSteps.of(train_dataset, args)
        super().__init__(model=model, args=args, train_dataset=train_steps, eval_dataset=eval_steps, **others)
        for name, (most, reason) in _REFUSED.items():
            given = getattr(self.args, name)
            if given > most:
                raise UnsupportedError(f"{name}={given} is refused: {reason}; set it to {most}")
        if self.args.fsdp:
            self._check_fsdp()
        for name in ("compute_loss_func", "compute_metrics"):
            if getattr(self, name) is not None:
                raise UnsupportedError(f"{name} is refused: only losses are computed, by layerwise.hf.loss")
        self._evaluated_labels: list[int] = []

    def _check_fsdp(self) -> None:
        if not self.is_fsdp_enabled:
            raise UnsupportedError(
                "fsdp is refused: Accelerate leaves it out on CPUs, and every rank would hold all parameters; leave it "
                "out of TrainingArguments, or run on GPUs"
            )
        version = self.accelerator.state.fsdp_plugin.fsdp_version
        if version != 2:
            raise UnsupportedError(f"FSDP version {version} is refused: it was not compared; legal: 2 (fsdp_config)")

    def get_train_dataloader(self) -> Any:
        """Planned steps, not divided over ranks: every rank takes its own part of each."""
        return _one_by_one(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """As `get_train_dataloader`; a name picks one of several loaders."""
        known: Any = self.eval_dataset
        if eval_dataset is None:
            return _one_by_one(known)
        return _one_by_one(
            _PlannedSteps.of(known[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset, self.args)
        )

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Raises UnsupportedError: predictions would lie in pieces on the ranks."""
        raise UnsupportedError(
            "predict() is refused: logits lie in pieces on the ranks; use the model without layerwise"
        )

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of every micro-batch; the mean over ranks of what it returns is the step's loss."""
        model.train()
        switch_mode = getattr(self.optimizer, "train", None)  # schedule-free optimizers have two modes
        if callable(switch_mode):
            switch_mode()
        total = torch.zeros((), device=self.args.device)
        for batch in batches([inputs["step"]]):
            # DDP would reduce after every micro-batch. FSDP2 may, since it holds whole gradients otherwise.
            held_back: AbstractContextManager[Any] = nullcontext()
            if not batch.ends_step and hasattr(model, "no_sync"):
                held_back = model.no_sync()
            with held_back:
                with batch.routes(), self.compute_loss_context_manager():
                    part = loss(model, batch) * self.args.world_size
                self.accelerator.backward(part)
            total += part.detach()
        return total

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The step's loss times its labels; its mean over ranks is their sum."""
        step: Step = inputs["step"]
        self._evaluated_labels.append(step.num_valid_tokens)
        total = torch.zeros((), device=self.args.device)
        for batch in batches([step]):
            with torch.no_grad(), batch.routes(), self.compute_loss_context_manager():
                total += loss(model, batch) * self.args.world_size * step.num_valid_tokens
        return total, None, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Trainer's, with a loss that is the mean over all labels and not over steps."""
        self._evaluated_labels.clear()
        output = super().evaluation_loop(*args, **kwargs)
        mean_labels = max(sum(self._evaluated_labels), 1) / len(self._evaluated_labels)
        metrics = output.metrics or {}
        loss_name = f"{kwargs.get('metric_key_prefix', 'eval')}_loss"
        return output._replace(metrics=metrics | {loss_name: metrics[loss_name] / mean_labels})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """As `from_pretrained` loads. Trainer's own leaves experts untouched: their names in a checkpoint differ."""
        target = self.model if model is None else model
        if self.is_fsdp_enabled or not isinstance(target, PreTrainedModel):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        loaded = type(target).from_pretrained(resume_from_checkpoint, dtype=target.dtype)
        target.load_state_dict(loaded.state_dict())
        return None

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        if load_result.unexpected_keys:
            raise UnsupportedError(
                f"the checkpoint has {load_result.unexpected_keys[:3]}, which the model calls otherwise, so Trainer "
                "would leave these weights as they are; load it with from_pretrained (load_best_model_at_end=False)"
            )
        super()._issue_warnings_after_load(load_result)


class _PlannedSteps(Dataset[dict[str, Any]]):
    """A loader's steps by number. Asked for in order, they are planned ahead; elsewhere it starts anew from there."""

    def __init__(self, loader: PlannedLoader, num_steps: int) -> None:
        self._loader, self._num_steps = loader, num_steps
        self._steps: Iterator[Step] = iter(())
        self._next = -1

    @classmethod
    def of(cls, loader: Any, args: TrainingArguments) -> _PlannedSteps | None:
        """The steps of a loader; None for None. Raises SpecError for what cannot be trained on in this run."""
        if loader is None or isinstance(loader, cls):
            return loader
        if not isinstance(loader, PlannedLoader):
            raise SpecError(f"PlannedTrainer trains on and evaluates a PlannedLoader, got {type(loader).__name__}")
        if loader.world.num_ranks != args.world_size:
            raise SpecError(
                f"the loader is for {loader.world.num_ranks} ranks and the run has {args.world_size}: make its world "
                "with layerwise.ProcessWorld, after TrainingArguments"
            )
        steps = loader.steps
        known = len(steps) if isinstance(steps, Sized) else getattr(steps, "num_steps", None)
        if known is None and args.max_steps < 1:
            raise SpecError("the loader's steps have no known end, so max_steps must be set in TrainingArguments")
        return cls(loader, args.max_steps if known is None else known - loader.first_step)

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index != self._next:
            self._steps = iter(replace(self._loader, first_step=self._loader.first_step + index))
        step = next(self._steps, None)
        if step is None:
            raise DataError(f"the loader ends before step {index} of {self._num_steps}: lower max_steps")
        self._next = index + 1
        return {"input_ids": torch.cat([microbatch.input_ids for microbatch in step.microbatches]), "step": step}


def _one_by_one(steps: Any) -> DataLoader[Any]:
    if steps is None:
        raise SpecError("there is no PlannedLoader to take steps from: give train_dataset or eval_dataset")
    return DataLoader(steps, batch_size=1, collate_fn=_the_one)


def _the_one(steps: list[dict[str, Any]]) -> dict[str, Any]:
    return steps[0]
