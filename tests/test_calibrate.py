"""Calibration: fits of synthetic timings, what is timed, the file that comes out, and one small run on real ranks."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layerwise.calibrate import kernels, links
from layerwise.calibrate.effort import EFFORTS, Effort
from layerwise.calibrate.kernels import AttentionRates, Probe, attention_sizes, measure_attention, measure_linear
from layerwise.calibrate.links import LinkRate, fit_link, measure_fast, measure_slow, spans_hosts
from layerwise.calibrate.preset import Measurements, number, preset_text, round_up
from layerwise.errors import DataError, SpecError
from layerwise.groups import LocalWorld, World
from layerwise.kernels import varlen_attention
from layerwise.spec import AttentionSpec, EfficiencyTable, load_cluster
from tests.planners.builders import make_model
from tests.train.cli import environment

CPU = torch.device("cpu")
SIZES = (1 << 10, 1 << 14, 1 << 20)
EFFORT = Effort(
    repeats=1, linear_flops=1e5, attention_flops=1e6, sample_flops=1e7, max_tokens=1024, message_bytes=(8, 64, 512)
)


def _seconds(messages: int, latency_s: float, bytes_per_s: float) -> np.ndarray:
    return messages * (latency_s + np.array(SIZES) / bytes_per_s)


@pytest.mark.parametrize("messages", [1, 7])
@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(1e-5, 1e11), (1e-3, 1e8), (0.0, 1e8)])
def test_a_link_is_found_again(messages: int, latency_s: float, bytes_per_s: float) -> None:
    fit = fit_link(messages, SIZES, _seconds(messages, latency_s, bytes_per_s))
    assert fit.latency_s == pytest.approx(latency_s, rel=1e-6, abs=1e-12)
    assert fit.bytes_per_s == pytest.approx(bytes_per_s)


def test_noise_moves_both_numbers_by_as_much() -> None:
    rng = np.random.default_rng(0)
    fits = [fit_link(7, SIZES, _seconds(7, 1e-4, 1e9) * rng.uniform(0.9, 1.1, 3)) for _ in range(50)]
    assert all(abs(fit.latency_s / 1e-4 - 1) < 0.15 and abs(fit.bytes_per_s / 1e9 - 1) < 0.15 for fit in fits)


def test_a_latency_below_zero_is_zero() -> None:
    """Seconds fall faster than bytes: the best line through the origin of relative errors, by hand."""
    fit = fit_link(1, (100, 200), (0.9, 2.1))
    x = np.array([100 / 0.9, 200 / 2.1])
    assert fit == LinkRate(latency_s=0.0, bytes_per_s=pytest.approx((x**2).sum() / x.sum()))


def test_times_that_do_not_grow_are_refused() -> None:
    with pytest.raises(DataError, match=r"1024 bytes in 2\.00e-01 s.*idle machine"):
        fit_link(1, SIZES, (0.2, 0.2, 0.1))


def _fake_clock(log: list[list[int]]) -> Callable[..., float]:
    """Each message takes half a second and a second per 100 bytes; the splits of every call go to the log."""

    def median_s(call: partial[Any], device: torch.device, repeats: int, before: Callable[[], object]) -> float:
        before()
        call()
        log.append(call.args[2])
        return sum(0.5 + size / 100 for size in call.args[2] if size)

    return median_s


@pytest.mark.parametrize(
    ("measure", "peers"),
    [(measure_fast, [[0, 1], [1, 0]]), (measure_slow, [[0, 0, 1, 1], [1, 1, 0, 0]])],
)
def test_links_are_timed_between_the_right_ranks(
    monkeypatch: pytest.MonkeyPatch, measure: Callable[[World, Effort, torch.device], LinkRate], peers: list[list[int]]
) -> None:
    log: list[list[int]] = []
    monkeypatch.setattr(links, "median_s", _fake_clock(log))
    rates = LocalWorld(4, 2).run(lambda world: measure(world, EFFORT, CPU))
    for rate in rates:
        assert (rate.latency_s, rate.bytes_per_s) == (pytest.approx(0.5), pytest.approx(100))
    assert sorted(log) == sorted([[size * talks for talks in row] for size in (8, 64, 512) for row in peers * 2])


def test_one_rank_has_no_link() -> None:
    with pytest.raises(SpecError, match="ranks_per_node=1 has no link"):
        LocalWorld(2, 1).run(lambda world: measure_fast(world, EFFORT, CPU))


@pytest.mark.parametrize(("hosts", "several"), [("aaaa", False), ("aabb", True)])
def test_nodes_may_share_a_machine(hosts: str, several: bool) -> None:
    assert LocalWorld(4, 2).run(lambda world: spans_hosts(world, hosts[world.rank])) == [several] * 4
    assert not any(LocalWorld(4, 2).run(spans_hosts))


def test_a_node_may_not_span_machines() -> None:
    with pytest.raises(SpecError, match="ranks_per_node=2, but the ranks of node 1 are on several machines"):
        LocalWorld(4, 2).run(lambda world: spans_hosts(world, "aabc"[world.rank]))


def test_sizes_of_attention_grow_until_one_sample_is_too_much() -> None:
    spec = AttentionSpec(num_heads=32, num_kv_heads=16, head_dim=64, v_head_dim=64)
    lengths, heads = attention_sizes(spec, EFFORTS["cuda", False])
    assert heads == (1, 2, 8, 32)
    assert lengths == (128, 512, 2048, 8192, 32768)
    small = replace(EFFORT, sample_flops=3.5 * 256 * 32 * (512 * 513 // 2))
    assert attention_sizes(spec, small)[0] == (128, 512)
    assert attention_sizes(spec, replace(small, sample_flops=small.sample_flops - 1))[0] == (128,)


class _SecondsProbe(Probe):
    """Runs each call once and says that it took two seconds."""

    def seconds(self, call: Callable[[], object]) -> float:
        call()
        return 2.0


PROBE = _SecondsProbe(device=CPU, dtype=torch.float32, effort=EFFORT)


@pytest.mark.parametrize(
    ("mask", "pairs", "pieces"),
    [
        ({}, 128 * 129 // 2, (128,)),
        ({"window": 3}, 1 + 2 + 126 * 3, (128,)),
        ({"chunk": 50}, 2 * 50 * 51 // 2 + 28 * 29 // 2, (50, 50, 28)),
    ],
)
def test_attention_runs_and_counts_as_in_the_cost_model(
    monkeypatch: pytest.MonkeyPatch, mask: dict[str, int], pairs: int, pieces: tuple[int, ...]
) -> None:
    called = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Any, *, window: int | None) -> torch.Tensor:
        called.append((q.shape[1], k.shape[1], segments.q_lens, segments.k_lens, window))
        return varlen_attention(q, k, v, segments, window=window)

    monkeypatch.setattr(kernels, "varlen_attention", attend)
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=4, v_head_dim=6, **mask)
    rates = measure_attention(spec, replace(PROBE, effort=replace(EFFORT, max_tokens=128)))
    assert (rates.lengths, rates.heads) == ((128,), (1, 2, 4))
    flops_per_head = 3.5 * 2 * (4 + 6) * pairs
    assert rates.flops_per_s == (tuple(heads * flops_per_head / 2 for heads in (1, 2, 4)),)
    assert called == [(h, k, pieces, pieces, mask.get("window")) for h, k in ((1, 1), (2, 1), (4, 2))]


def test_short_samples_are_packed_to_fill_a_call() -> None:
    spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=4, v_head_dim=4)
    flops = 3.5 * 16 * (128 * 129 // 2)
    for effort, samples in ((replace(EFFORT, attention_flops=3.5 * flops), 3), (replace(EFFORT, max_tokens=300), 2)):
        rates = measure_attention(spec, replace(PROBE, effort=replace(effort, sample_flops=1)))
        assert rates.flops_per_s == ((samples * flops / 2,),)


def test_a_linear_layer_is_three_products() -> None:
    model = make_model(hidden_size=10, intermediate_size=20)
    effort = replace(EFFORT, linear_flops=100 * 6 * 10 * 20)
    assert measure_linear(model, replace(PROBE, effort=effort)) == 100 * 6 * 10 * 20 / 2


RATES = AttentionRates(lengths=(128, 512), heads=(1, 4), flops_per_s=((1e9, 2e9), (3e9, 4e9)))
FOUND = Measurements(
    num_nodes=2,
    ranks_per_node=4,
    where="8 ranks",
    model="demo",
    element_bytes=4,
    memory_bytes=None,
    fast=LinkRate(latency_s=2e-5, bytes_per_s=1.4e9),
    slow=None,
    linear_flops_per_s=5e9,
    full=RATES,
    windowed=None,
)


def _write(tmp_path: Path, found: Measurements, peak: float | None = None) -> tuple[str, Any]:
    path = tmp_path / "mine.yaml"
    path.write_text(preset_text(found, name="mine", ratio=7.0, peak_flops_per_s=peak))
    return path.read_text(), load_cluster(path)


def test_between_nodes_nothing_is_faster_than_inside(tmp_path: Path) -> None:
    slow = LinkRate(latency_s=3e-5, bytes_per_s=3e9)
    text, cluster = _write(tmp_path, replace(FOUND, slow=slow))
    assert "slow_bytes_per_s: 1.40e+9  # measured between nodes (3.00e+9, but" in text
    assert (cluster.fast_bytes_per_s, cluster.slow_bytes_per_s, cluster.message_latency_s) == (1.4e9, 1.4e9, 3e-5)


def test_the_file_holds_what_was_measured(tmp_path: Path) -> None:
    text, cluster = _write(tmp_path, FOUND)
    assert "slow_bytes_per_s: 2.00e+8  # not measured, all ranks share a machine: fast / 7" in text
    assert (cluster.name, cluster.num_nodes, cluster.ranks_per_node) == ("mine", 2, 4)
    assert (cluster.fast_bytes_per_s, cluster.slow_bytes_per_s, cluster.message_latency_s) == (1.4e9, 2e8, 2e-5)
    assert (cluster.peak_flops_per_s, cluster.linear_efficiency, cluster.element_bytes) == (5e9, 1.0, 4)
    assert cluster.attention_efficiency == EfficiencyTable(
        lengths=(128, 512), heads=(1, 4), efficiency=((0.2, 0.4), (0.6, 0.8))
    )
    assert (cluster.window_efficiency, cluster.memory_bytes) == (None, None)


def test_a_measured_slow_link_and_a_known_peak_are_kept(tmp_path: Path) -> None:
    slow = LinkRate(latency_s=3e-5, bytes_per_s=5e8)
    text, cluster = _write(tmp_path, replace(FOUND, slow=slow, windowed=RATES, memory_bytes=80_000_000_000), peak=1e10)
    assert "measured between nodes" in text
    assert (cluster.slow_bytes_per_s, cluster.message_latency_s) == (5e8, 3e-5)
    assert (cluster.peak_flops_per_s, cluster.linear_efficiency) == (1e10, 0.5)
    assert cluster.window_efficiency.efficiency == ((0.1, 0.2), (0.3, 0.4))
    assert cluster.memory_bytes == 8e10


def test_no_kernel_is_faster_than_the_peak(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--peak-flops-per-s 4\.9e\+09: a kernel ran at 5e\+09 FLOP/s"):
        _write(tmp_path, FOUND, peak=4.9e9)


def test_numbers_have_three_digits_that_yaml_reads() -> None:
    assert [number(value) for value in (1.2345e9, 0.04, 999.9)] == ["1.23e+9", "4.00e-2", "1.00e+3"]
    assert [round_up(value) for value in (1.231e9, 1.239e9, 2e9)] == pytest.approx([1.24e9, 1.24e9, 2e9])


def _calibrate(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "import typer; from layerwise.commands.calibrate import calibrate; typer.run(calibrate)"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=100)


@pytest.mark.ranks
def test_two_ranks_calibrate_this_machine(tmp_path: Path) -> None:
    out = tmp_path / "here.yaml"
    done = _calibrate("--out", out, "--quick", "--num-nodes", 1, "--ranks-per-node", 2, "--ratio", 4)
    assert done.returncode == 0, done.stderr
    assert "link inside a node" in done.stdout
    cluster = load_cluster(out)
    assert (cluster.name, cluster.num_ranks, cluster.element_bytes) == ("here", 2, 4)
    assert cluster.fast_bytes_per_s / cluster.slow_bytes_per_s == pytest.approx(4, rel=0.02)
    assert 1e5 < cluster.fast_bytes_per_s < 1e12
    assert 0 <= cluster.message_latency_s < 1
    assert 1e7 < cluster.peak_flops_per_s < 1e13
    assert cluster.window_efficiency.heads == cluster.attention_efficiency.heads == (1, 2, 8)
    again = _calibrate("--out", out)
    assert (again.returncode, "is there already" in again.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "legal values are auto, cpu and cuda"),
        (["--ratio", 0], "--ratio 0 must be a number above 0"),
        (["--model", "nonesuch"], "no such file; presets are"),
    ],
)
def test_bad_options_end_before_anything_is_measured(tmp_path: Path, arguments: list[object], message: str) -> None:
    from layerwise.commands.calibrate import calibrate

    settings: dict[str, Any] = {"out": tmp_path / "a.yaml", "model": "demo", "num_nodes": 1, "ranks_per_node": 2}
    settings |= {"ratio": None, "peak_flops_per_s": None, "device": "auto", "quick": True, "overwrite": False}
    key, value = arguments
    with pytest.raises(SpecError, match=message):
        calibrate(**settings | {str(key).removeprefix("--"): value})
    assert not list(tmp_path.iterdir())
