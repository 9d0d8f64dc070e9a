"""transformers.Trainer over planned steps: one of its batches is a whole optimizer step, of all its micro-batches.

Trainer takes a fixed number of micro-batches per step, and DDP and FSDP average gradients over ranks. A plan has as
many micro-batches as it needs, the same on every rank, and its losses are sums: so `training_step` runs them all, and
multiplies each by the number of ranks. All else is Trainer's own: optimizer, schedule, clipping, logs, checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
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

# Training arguments that would have no effect, or a wrong one, unless they are left at their defaults.
_BY_THE_LOADER = "the loader's steps say which samples go together, so it would have no effect"
_REFUSED = {
    "auto_find_batch_size": "plans keep to max_tokens_per_rank; lower that",
    "dataloader_num_workers": "PlannedLoader plans ahead on a thread of its own",
    "deepspeed": "it was not compared; use DDP or fsdp",
    "gradient_accumulation_steps": "each step has the micro-batches that its plan needs",
    "label_smoothing_factor": "the loss is layerwise.hf.loss",
    "neftune_noise_alpha": "its noise goes by the length of a row, which holds parts of several samples",
    "parallelism_config": "ranks share samples by the plan",
    "per_device_eval_batch_size": _BY_THE_LOADER,
    "per_device_train_batch_size": _BY_THE_LOADER,
    "torch_compile": "it was not compared in a Trainer",
    "train_sampling_strategy": _BY_THE_LOADER,
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
        _check_arguments(args)
        if others.get("data_collator") is not None:
            raise UnsupportedError("data_collator is refused: PlannedLoader makes the batches; leave it out")
        if isinstance(eval_dataset, dict):
            eval_steps: Any = {name: _PlannedSteps.of(loader, args, None) for name, loader in eval_dataset.items()}
        else:
            eval_steps = _PlannedSteps.of(eval_dataset, args, None)
        train_steps = _PlannedSteps.of(train_dataset, args, args.max_steps)
        super().__init__(model=model, args=args, train_dataset=train_steps, eval_dataset=eval_steps, **others)
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

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """What Trainer's speed metrics call samples are steps here, as in evaluation."""
        return 1

    def get_train_dataloader(self) -> Any:
        """Planned steps, not divided over ranks: every rank takes its own part of each."""
        return _one_by_one(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """As `get_train_dataloader`; a name picks one of several loaders."""
        known: Any = self.eval_dataset
        if eval_dataset is None:
            return _one_by_one(known)
        return _one_by_one(
            _PlannedSteps.of(known[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset, self.args, None)
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
        if not any(self._evaluated_labels):
            raise DataError(
                f"the evaluation has no label in {len(self._evaluated_labels)} steps, so it has no loss: give it "
                "samples of two tokens or more whose labels are not all -100"
            )
        mean_labels = sum(self._evaluated_labels) / len(self._evaluated_labels)
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


def _check_arguments(args: TrainingArguments) -> None:
    """Raise UnsupportedError for training arguments that would have no effect, or a wrong one."""
    for setting in fields(args):
        given = getattr(args, setting.name)
        if setting.name in _REFUSED and given != setting.default:
            raise UnsupportedError(
                f"{setting.name}={given} is refused: {_REFUSED[setting.name]}; leave it at {setting.default}"
            )
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"n_gpu={args.n_gpu} is refused: start one process per device with torchrun; legal: 0, 1"
        )


class _PlannedSteps(Dataset[dict[str, Any]]):
    """A loader's steps by number. Asked for in order, they are planned ahead; elsewhere it starts anew from there."""

    def __init__(self, loader: PlannedLoader, num_steps: int) -> None:
        self._loader, self._num_steps = loader, num_steps
        self._steps: Iterator[Step] = iter(())
        self._next = -1

    @classmethod
    def of(cls, loader: Any, args: TrainingArguments, max_steps: int | None) -> _PlannedSteps | None:
        """The steps of a loader; None for None. Raises SpecError for what cannot be trained on in this run.

        max_steps: how many steps are taken of a loader without a known end; below 1 or None: none may be.
        """
        if loader is None or isinstance(loader, cls):
            return loader
        if not isinstance(loader, PlannedLoader):
            raise SpecError(f"PlannedTrainer trains on and evaluates a PlannedLoader, got {type(loader).__name__}")
        if loader.world.num_ranks != args.world_size:
            raise SpecError(
                f"the loader is for {loader.world.num_ranks} ranks and the run has {args.world_size}: make its world "
                "with layerwise.ProcessWorld, after TrainingArguments"
            )
        loader = replace(loader, device=args.device)
        steps = loader.steps
        known = len(steps) if isinstance(steps, Sized) else getattr(steps, "num_steps", None)
        if known is not None:
            return cls(loader, known - loader.first_step)
        if max_steps is None:
            raise SpecError(
                "an evaluation needs a loader with a known end: give it steps= with a length, such as a list"
            )
        if max_steps < 1:
            raise SpecError("the loader's steps have no known end, so max_steps must be set in TrainingArguments")
        return cls(loader, max_steps)

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
