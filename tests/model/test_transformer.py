"""HybridLM against the one-sample-at-a-time reference, with attention that needs no routes of a plan."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from layerwise import runtime
from layerwise.errors import SpecError
from layerwise.kernels import Segments, varlen_attention
from layerwise.model import HybridLM, ModelOptions
from layerwise.model.transformer import rotate
from layerwise.plan import HOME
from layerwise.spec import ModelSpec
from tests.reference import Sample, reference_loss

F64 = ModelOptions(dtype=torch.float64, init_std=0.3, seed=1)
BASE = {
    "num_layers": 2,
    "layer_types": ("full_attention", "sliding_attention"),
    "hidden_size": 16,
    "vocab_size": 11,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "sliding_window": 3,
}
DENSE = ModelSpec(**BASE, intermediate_size=10)
MOE = ModelSpec(
    **BASE,
    num_experts=5,
    experts_per_token=2,
    moe_intermediate_size=6,
    shared_intermediate_size=4,
    tie_embeddings=False,
)
CHUNKED = ModelSpec(
    **{**BASE, "layer_types": ("full_attention", "chunked_attention"), "sliding_window": None},
    attention_chunk_size=4,
    intermediate_size=10,
    v_head_dim=4,
    kv_heads_by_kind={"chunked_attention": 4},
    head_dim_by_kind={"chunked_attention": 8},
)


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch):
    """After local(spec, lengths) the local rows are these whole samples; returns their position_ids."""

    def install(spec: ModelSpec, lengths: list[int]) -> Tensor:
        def attention(q: Tensor, k: Tensor, v: Tensor, *, kind: str, window: int | None) -> Tensor:
            chunk = spec.attention(kind).chunk
            pieces = [min(chunk or n, n - lo) for n in lengths for lo in range(0, n, chunk or n)]
            segments = Segments(tuple(pieces), tuple(pieces))
            return varlen_attention(q, k, v, segments, window=window, backend="reference")

        index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
        position_ids = torch.cat([torch.arange(0), *(torch.arange(n) for n in lengths)])
        tokens = runtime.routes.LocalTokens(position_ids=position_ids, piece_index=index)
        routes = SimpleNamespace(
            tokens_at=lambda kind: tokens, place_of=lambda kind: HOME, reached={HOME}, moves={}, num_pieces=len(lengths)
        )
        monkeypatch.setattr(runtime, "attention", attention)
        for module in (runtime, runtime.routes):
            monkeypatch.setattr(module, "current_routes", lambda: routes)
        return position_ids

    return install


def random_ids(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 11, (n,), generator=generator) for n in lengths]


def packed_loss(model: HybridLM, samples: list[Sample], position_ids: Tensor, balance_coef: float) -> Tensor:
    """The step loss from one packed forward, with every sample a piece of its own."""
    output = model(torch.cat([s.input_ids for s in samples]), position_ids)
    targets = torch.cat([torch.cat([s.targets, torch.tensor([-100])]) for s in samples])
    loss = torch.nn.functional.cross_entropy(output.logits, targets)
    if output.router is None:
        return loss
    lengths = torch.tensor([len(s.input_ids) for s in samples])[:, None]
    chosen = output.router.counts / (lengths * model.spec.experts_per_token)
    balance = model.spec.num_experts * (chosen * output.router.prob_sums).sum() / lengths.sum()
    return loss + balance_coef * balance / model.spec.num_layers


@pytest.mark.parametrize("spec", [DENSE, MOE, CHUNKED], ids=["dense-tied", "moe-untied", "chunked"])
def test_loss_and_gradients_equal_the_reference(local, spec: ModelSpec) -> None:
    model = HybridLM(spec, F64)
    masked = torch.tensor([3, -100, 5, 1, -100, 2, 0])
    ids = random_ids(9, 7, 1)
    samples = [Sample(ids[0]), Sample(ids[1], masked), Sample(ids[2])]

    expected = reference_loss(model, samples, balance_coef=0.5)
    expected_grads = torch.autograd.grad(expected, list(model.parameters()))
    actual = packed_loss(model, samples, local(spec, [9, 7, 1]), balance_coef=0.5)
    grads = torch.autograd.grad(actual, list(model.parameters()))

    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=0)
    for (name, _), grad, expected_grad in zip(model.named_parameters(), grads, expected_grads, strict=True):
        error = (grad - expected_grad).norm() / expected_grad.norm()
        assert error <= 1e-10, f"{name}: relative error {error}"


def test_a_rank_without_tokens_gets_zero_gradients_for_every_parameter(local) -> None:
    model = HybridLM(MOE, F64)
    output = model(torch.zeros(0, dtype=torch.int64), local(MOE, []))
    assert output.logits.shape == (0, 11)
    assert output.router.counts.shape == output.router.prob_sums.shape == (2, 0, 5)
    (output.logits.sum() + output.router.prob_sums.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_rows_depend_on_true_positions_not_on_the_place_in_the_shard() -> None:
    generator = torch.Generator().manual_seed(0)
    model = HybridLM(DENSE, F64)
    x = torch.randn(12, 4, 6, generator=generator, dtype=torch.float64)
    whole = rotate(x, model._rope_table("full_attention", torch.arange(12)))
    shard = rotate(x[5:9], model._rope_table("full_attention", torch.arange(5, 9)))
    assert torch.equal(shard, whole[5:9])
    assert not torch.allclose(rotate(x[5:9], model._rope_table("full_attention", torch.arange(4))), whole[5:9])


def test_scores_depend_on_distance_alone_far_into_a_sample() -> None:
    model = HybridLM(DENSE, ModelOptions(dtype=torch.float32))
    q, k = torch.randn(2, 1, 1, 6, generator=torch.Generator().manual_seed(0))
    near, far = (
        [
            rotate(x, model._rope_table("full_attention", torch.tensor([position])))
            for x, position in ((q, start + 7), (k, start))
        ]
        for start in (0, 1_000_000)
    )
    torch.testing.assert_close((near[0] * near[1]).sum(), (far[0] * far[1]).sum(), rtol=1e-5, atol=1e-6)


def test_router_sums_count_every_choice_in_its_piece(local) -> None:
    model = HybridLM(MOE, F64)
    router = model(torch.cat(random_ids(6, 4)), local(MOE, [6, 4])).router
    assert router.counts.sum(-1).tolist() == [[12, 8], [12, 8]]
    torch.testing.assert_close(router.prob_sums.sum(-1), torch.tensor([[6.0, 4], [6, 4]]).double())
    assert router.prob_sums.requires_grad


def test_weights_depend_on_the_seed_alone_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = HybridLM(MOE, F64).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    again = HybridLM(MOE, F64).state_dict()
    other = HybridLM(MOE, ModelOptions(dtype=torch.float64, init_std=0.3, seed=2)).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    low = HybridLM(MOE, ModelOptions(init_std=0.3, seed=1)).state_dict()
    assert all(torch.equal(first[name].float(), low[name]) for name in first)


def test_nothing_uninitialised_reaches_the_output(local) -> None:
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    try:
        model = HybridLM(MOE, F64)
        output = model(torch.cat(random_ids(6, 4)), local(MOE, [6, 4]))
        output.logits.square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert output.logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_checkpointing_wraps_each_layer_and_changes_nothing(local, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = []
    monkeypatch.setattr(runtime, "checkpoint", lambda fn, *args: wrapped.append(fn) or fn(*args))
    position_ids, ids = local(MOE, [6]), random_ids(6)[0]
    plain = HybridLM(MOE, F64)
    saving = HybridLM(MOE, ModelOptions(dtype=torch.float64, init_std=0.3, seed=1, activation_checkpointing=True))
    assert torch.equal(saving(ids, position_ids).logits, plain(ids, position_ids).logits)
    assert wrapped == list(saving.layers)


def test_it_learns_a_repeating_text(local) -> None:
    model = HybridLM(MOE)
    ids, position_ids = torch.arange(33) % 4, local(MOE, [32])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(model(ids[:-1], position_ids).logits, ids[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 2.0 > 0.5 > losses[-1]


@pytest.mark.parametrize("shape", [(1, 4), (5,)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match="without a batch dimension"):
        HybridLM(DENSE)(torch.zeros(shape, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))


def test_odd_head_dim_is_refused() -> None:
    with pytest.raises(SpecError, match="head_dim=5 of full_attention"):
        HybridLM(ModelSpec(**{**BASE, "head_dim": 5}, intermediate_size=4))


def test_a_forward_outside_routes_is_refused() -> None:
    with pytest.raises(SpecError, match="routes"):
        HybridLM(DENSE)(torch.zeros(4, dtype=torch.int64), torch.arange(4))
