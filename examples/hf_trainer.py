"""The model of hf_finetune.py trained by transformers.Trainer: no loop of ours, DDP or FSDP2 over the ranks.

torchrun --nproc-per-node 4 examples/hf_trainer.py --strategy repack+parents

With `--fsdp` parameters, gradients and optimizer are sharded, on GPUs: Accelerate has no FSDP on CPUs.
Trainer logs, evaluates, saves and resumes as ever; `--resume` goes on from the last checkpoint in --out.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from hf_finetune import build_loader, build_model
from transformers import TrainingArguments

import layerwise as lw
import layerwise.hf as lwhf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="repack+parents")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save-steps", type=int, default=4)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/hf_trainer"))
    options = parser.parse_args()
    args = TrainingArguments(  # starts torch.distributed under torchrun
        output_dir=str(options.out),
        max_steps=options.steps,
        save_steps=options.save_steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=options.save_steps,
        use_cpu=not torch.cuda.is_available(),
        fsdp=options.fsdp,
        fsdp_config={"transformer_layer_cls_to_wrap": ["GptOssDecoderLayer"]} if options.fsdp else None,
        report_to="none",
        disable_tqdm=True,
    )
    world = lw.ProcessWorld(max(1, args.world_size // 2)) if args.world_size > 1 else lw.solo_world()
    model = build_model()  # lwhf.apply is called there
    trainer = lwhf.PlannedTrainer(
        model=model,
        args=args,
        train_dataset=build_loader(model, world, options.strategy, options.steps),
        eval_dataset=build_loader(model, world, options.strategy, num_steps=3, seed=1),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model()  # a plain checkpoint, which loads without layerwise
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
