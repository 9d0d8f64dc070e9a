"""The model of hf_finetune.py trained with Accelerate: parameters, gradients and optimizer sharded by FSDP2.

torchrun --nproc-per-node 4 examples/hf_accelerate.py --strategy repack+parents

On CPUs Accelerate leaves FSDP out and runs DDP, so the first line printed says what it did.
Lines that differ from any other Accelerate loop are marked with a star.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from hf_finetune import build_loader, build_model
from torch.distributed.tensor import DTensor

import layerwise as lw
import layerwise.hf as lwhf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="repack+parents")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, help="folder for the trained model")
    options = parser.parse_args()
    shard = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GptOssDecoderLayer"],
        state_dict_type="FULL_STATE_DICT",
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=shard)
    num_ranks = accelerator.num_processes
    world = lw.ProcessWorld(max(1, num_ranks // 2)) if num_ranks > 1 else lw.solo_world()  # *
    model = build_model()
    loader = build_loader(model, world, options.strategy, options.steps)  # *
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    accelerator.print(f"sharded: {isinstance(next(model.parameters()), DTensor)}")
    total = torch.zeros(())
    for batch in lwhf.batches(loader):  # *
        with batch.routes():  # *
            loss = lwhf.loss(model, batch)  # *
        accelerator.backward(loss * num_ranks)  # * FSDP averages over ranks, and these losses are to be summed
        total += loss.detach()
        if batch.ends_step:
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            value = accelerator.reduce(total, "sum").item()
            accelerator.print(f"step {batch.step.index:2d}  loss {value:.5f}  gradient norm {float(norm):.4f}")
            total = torch.zeros(())
    if options.out is not None:
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).save_pretrained(options.out, state_dict=state)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
