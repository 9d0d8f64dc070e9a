"""Your model, your loop: the lines that layerwise needs are marked with a star.

torchrun --nproc-per-node 4 examples/02_own_loop.py

An even number of ranks is seen as nodes of two; plain `python examples/02_own_loop.py` runs one rank.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerwise as lw

VOCAB = 64
MODEL = lw.ModelSpec(
    num_layers=2,
    layer_types=("full_attention", "sliding_attention"),
    sliding_window=16,
    hidden_size=32,
    vocab_size=VOCAB,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
)


class Block(nn.Module):
    """A decoder layer on packed rows: no batch dimension, no mask, no padding."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.RMSNorm(32)
        self.qkv = nn.Linear(32, (4 + 2 + 2) * 8, bias=False)
        self.out = nn.Linear(32, 32, bias=False)
        self.mlp = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(len(x), 8, 8).split([4, 2, 2], dim=1)
        x = x + self.out(lw.attention(q, k, v, kind=self.kind).flatten(1))  # *
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, 32), nn.Embedding(512, 32)
        self.blocks = nn.Sequential(Block("full_attention"), Block("sliding_attention"))
        self.head = nn.Linear(32, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(input_ids) + self.position(position_ids)))


def counting_dataset() -> list[list[int]]:
    """Samples of 8 to 400 tokens that count upwards, so there is something to learn."""
    make = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 64, (60,), generator=make).tolist()
    return [[(3 * i + t) % VOCAB for t in range(length)] for i, length in enumerate([*lengths, 400, 350, 300, 250])]


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        world = lw.ProcessWorld(ranks_per_node=2)  # *
    else:
        world = lw.solo_world()
    dataset = counting_dataset()
    cluster = lw.ClusterSpec(num_nodes=world.num_ranks // world.ranks_per_node, ranks_per_node=world.ranks_per_node)
    planner = lw.Planner(strategy="repack+parents", cluster=cluster, model=MODEL, max_tokens_per_rank=512)  # *
    steps = lw.StepSampler([len(sample) for sample in dataset], tokens_per_step=800, num_steps=30)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in lw.PlannedLoader(dataset=dataset, planner=planner, world=world, steps=steps, vocab_size=VOCAB):  # *
        total = torch.zeros(())
        for microbatch in step.microbatches:
            with microbatch.routes():  # *
                logits = model(microbatch.input_ids, microbatch.position_ids)
                loss = lw.token_loss(logits, microbatch.shift_labels, step.num_valid_tokens)  # *
            loss.backward()
            total += loss.detach()
        lw.reduce_gradients(model.parameters(), world)  # *
        optimizer.step()
        optimizer.zero_grad()
        world.all_reduce(total)
        if world.rank == 0 and step.index % 10 in (0, 9):
            print(f"step {step.index:2d}  loss {total.item():.3f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
