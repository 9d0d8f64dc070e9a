"""The step loss by definition: one sample at a time, dense masks, one expert at a time, plain torch.

Shares no code with the runtime: it only reads a model's parameters, `model.spec` and `model.options`. Meant
for float64 and small inputs.

Conventions: a sample is token ids int64 [L] with 0 <= id < spec.vocab_size; labels are int64 [L] aligned with
the ids (the logits at t are scored against labels[t + 1]), -100 where not scored, None for the ids
themselves. Linear weights are [out, in]; expert weights are [E, in, out]; `gate_up` holds gate, then up.

    loss = sum over samples of cross-entropies / valid labels of all samples
         + balance_coef * mean over MoE layers of sum over samples of L_s / (sum of L) * E * sum_e f_se * P_se
    f_se = choices of expert e in sample s / (L_s * k)       P_se = mean router probability of e in sample s

A step without any valid label has cross-entropy 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class Sample:
    """Token ids int64 [L], and labels int64 [L] or None (predict the ids themselves)."""

    input_ids: Tensor
    labels: Tensor | None = None

    @property
    def targets(self) -> Tensor:
        """What the logits at each but the last position are scored against, int64 [L - 1]."""
        return (self.input_ids if self.labels is None else self.labels)[1:]


def reference_loss(model: torch.nn.Module, samples: Sequence[Sample], balance_coef: float = 0.0) -> Tensor:
    """The loss of a step of these samples, a scalar that is differentiable in model.parameters()."""
    spec = model.spec
    num_valid = sum(int((s.targets != IGNORED).sum()) for s in samples)
    num_tokens = sum(len(s.input_ids) for s in samples)
    loss = torch.zeros((), dtype=next(model.parameters()).dtype)
    for sample in samples:
        logits, router_probs = reference_forward(model, sample.input_ids)
        valid = sample.targets != IGNORED
        log_probs = logits[:-1].log_softmax(-1)[valid]
        loss = loss - log_probs.gather(1, sample.targets[valid, None]).sum() / max(num_valid, 1)
        for probs in router_probs:
            balance = _balance(probs, spec.experts_per_token) * len(sample.input_ids) / num_tokens
            loss = loss + balance_coef * balance / spec.num_layers
    return loss


def reference_forward(model: torch.nn.Module, input_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits [L, V] of one whole sample, and the router probabilities [L, E] of each MoE layer."""
    spec, options, state = model.spec, model.options, dict(model.named_parameters())
    kinds = [spec.layer_types[i % len(spec.layer_types)] for i in range(spec.num_layers)]
    x = state["embed.weight"][input_ids]
    router_probs = []
    for index, kind in enumerate(kinds):
        layer = {k.removeprefix(f"layers.{index}."): v for k, v in state.items() if k.startswith(f"layers.{index}.")}
        x = x + _attention(_rms_norm(x, layer["attention_norm.weight"], options.norm_eps), layer, spec, options, kind)
        h = _rms_norm(x, layer["mlp_norm.weight"], options.norm_eps)
        if spec.num_experts:
            output, probs = _moe(h, layer, spec)
            router_probs.append(probs)
        else:
            output = _swiglu(h, layer["mlp.gate_up.weight"].T, layer["mlp.down.weight"].T)
        x = x + output
    x = _rms_norm(x, state["norm.weight"], options.norm_eps)
    return x @ state["embed.weight" if spec.tie_embeddings else "head.weight"].T, router_probs


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _attention(x: Tensor, layer: dict[str, Tensor], spec, options, kind: str) -> Tensor:
    length, num_heads = len(x), spec.num_heads
    num_kv_heads = spec.kv_heads_by_kind.get(kind, spec.num_kv_heads)
    head_dim = spec.head_dim_by_kind.get(kind, spec.head_dim)
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    visible = j <= i
    if kind == "sliding_attention":
        visible &= i - j < spec.sliding_window
    if kind == "chunked_attention":
        visible &= i // spec.attention_chunk_size == j // spec.attention_chunk_size
    q = _rope((x @ layer["attention.q_proj.weight"].T).view(length, num_heads, head_dim), options.rope_theta)
    k = _rope((x @ layer["attention.k_proj.weight"].T).view(length, num_kv_heads, head_dim), options.rope_theta)
    v = (x @ layer["attention.v_proj.weight"].T).view(length, num_kv_heads, -1)
    heads = []
    for head in range(num_heads):
        kv_head = head * num_kv_heads // num_heads
        scores = (q[:, head] @ k[:, kv_head].T / head_dim**0.5).masked_fill(~visible, -torch.inf)
        heads.append(scores.softmax(-1) @ v[:, kv_head])
    return torch.cat(heads, dim=-1) @ layer["attention.o_proj.weight"].T


def _rope(x: Tensor, theta: float) -> Tensor:
    """Dims i and i + D/2 as one complex number, times exp(1j * position * theta^(-2 i / D))."""
    length, _, head_dim = x.shape
    half = head_dim // 2
    speed = torch.tensor([theta ** (-2 * i / head_dim) for i in range(half)], dtype=torch.float64)
    angle = torch.arange(length, dtype=torch.float64)[:, None, None] * speed
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


def _swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    width = gate_up.shape[1] // 2
    gate, up = x @ gate_up[:, :width], x @ gate_up[:, width:]
    return (gate * gate.sigmoid() * up) @ down


def _moe(x: Tensor, layer: dict[str, Tensor], spec) -> tuple[Tensor, Tensor]:
    probs = (x @ layer["mlp.router.weight"].T).softmax(-1)
    chosen = probs >= probs.sort(-1, descending=True).values[:, spec.experts_per_token - 1, None]
    weights = probs * chosen
    weights = weights / weights.sum(-1, keepdim=True)
    output = torch.zeros_like(x)
    for expert in range(spec.num_experts):
        run = _swiglu(x, layer["mlp.experts.gate_up"][expert], layer["mlp.experts.down"][expert])
        output = output + weights[:, expert, None] * run
    if spec.shared_intermediate_size:
        output = output + _swiglu(x, layer["mlp.shared.gate_up.weight"].T, layer["mlp.shared.down.weight"].T)
    return output, probs


def _balance(probs: Tensor, experts_per_token: int) -> Tensor:
    """E * sum_e f_e * P_e of one sample and layer (arXiv 2412.19437, section 2.1.2)."""
    length, num_experts = probs.shape
    chosen = probs >= probs.sort(-1, descending=True).values[:, experts_per_token - 1, None]
    fraction = chosen.sum(0) / (length * experts_per_token)
    return num_experts * (fraction.detach() * probs.mean(0)).sum()
