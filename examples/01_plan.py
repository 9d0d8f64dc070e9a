"""Plan one step without torch: who holds which tokens, who computes which attention, and what it is predicted to cost.

python examples/01_plan.py
"""

from layerwise import load_cluster, load_model, plan_step

cluster, model = (
    load_cluster("demo"),
    load_model("demo"),
)  # 2 nodes x 8 ranks; one full layer per three sliding ones
lengths = [9000, 2100, 1800, 1700, 900, 800, 750, 700, 600, 400, 350, 300, 120, 60, 20]

for strategy in ("dynamic", "repack+parents"):
    plan = plan_step(lengths, cluster=cluster, model=model, strategy=strategy, max_tokens_per_rank=2048)
    microbatch = plan.microbatches[0]
    tokens = microbatch.tokens_per_rank(plan.num_ranks)
    holders = sorted({shard.rank for shard in microbatch.shards if shard.sample == 0})
    print(
        f"{strategy}: tokens per rank {tokens.min()} to {tokens.max()}; the 9000-token sample lives on ranks {holders}"
    )
