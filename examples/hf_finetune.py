"""Fine-tune a Hugging Face model of hybrid attention; the lines that layerwise needs are marked with a star.

torchrun --nproc-per-node 16 examples/hf_finetune.py --strategy repack+parents

An even number of ranks is seen as two nodes; plain `python examples/hf_finetune.py` runs one rank, to the same losses.
The model is a tiny gpt-oss of random weights (windows, sinks, experts); with your own, use from_pretrained.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import layerwise as lw
import layerwise.hf as lwhf  # *
from layerwise.groups import World

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "eos_token_id": None,
}


def texts() -> list[list[int]]:
    """The bytes of this file, in samples of very different lengths."""
    data = Path(__file__).read_bytes()
    lengths = [400, *torch.randint(8, 60, (60,), generator=torch.Generator().manual_seed(0)).tolist()]
    starts = [sum(lengths[:i]) % (len(data) - 400) for i in range(len(lengths))]
    return [list(data[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


def build_model() -> PreTrainedModel:
    """Random weights, the same on every rank."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **CONFIG))
    lwhf.apply(model)  # *
    return model


def build_loader(
    model: PreTrainedModel, world: World, strategy: str, num_steps: int, seed: int = 0
) -> lw.PlannedLoader:
    """Planned steps of the texts."""
    dataset = texts()
    cluster = lw.ClusterSpec(
        num_nodes=world.num_ranks // world.ranks_per_node,
        ranks_per_node=world.ranks_per_node,
        peak_flops_per_s=1e9,  # so slow that wide groups pay even for this model
    )
    planner = lw.Planner(
        strategy=strategy,
        cluster=cluster,
        model=lwhf.model_spec(model.config),
        max_tokens_per_rank=16 + 512 // world.num_ranks,
    )  # *
    lengths = [len(sample) for sample in dataset]
    steps = lw.StepSampler(lengths, tokens_per_step=600, num_steps=num_steps, seed=seed)
    return lw.PlannedLoader(dataset=dataset, planner=planner, world=world, steps=steps, vocab_size=256)


def finetune(model: PreTrainedModel, world: World, strategy: str, num_steps: int) -> list[float]:
    """Train on this rank; the losses of all steps, the same on every rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, total = [], torch.zeros(())
    for batch in lwhf.batches(build_loader(model, world, strategy, num_steps)):  # *
        with batch.routes():  # *
            loss = lwhf.loss(model, batch)  # *
        loss.backward()
        total += loss.detach()
        if batch.ends_step:
            lw.reduce_gradients(model.parameters(), world)  # *
            optimizer.step()
            optimizer.zero_grad()
            world.all_reduce(total)
            losses.append(total.item())
            total = torch.zeros(())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="repack+parents")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, help="folder for the trained model")
    args = parser.parse_args()
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        dist.init_process_group("gloo")
    world = lw.ProcessWorld(max(1, num_ranks // 2)) if num_ranks > 1 else lw.solo_world()
    model = build_model()
    losses = finetune(model, world, args.strategy, args.steps)
    if world.rank == 0:
        for step, loss in enumerate(losses):
            print(f"step {step:2d}  loss {loss:.5f}")
        if args.out is not None:
            model.save_pretrained(args.out)  # a plain checkpoint, which loads without layerwise
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
