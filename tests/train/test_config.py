"""Settings: files, overrides, presets with changes, and what is refused."""

from pathlib import Path

import pytest

from layerwise.errors import SpecError
from layerwise.train.config import TrainConfig, load_config

DEMO = Path(__file__).parents[2] / "examples" / "demo.yaml"


def test_demo_config_resolves_and_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(DEMO, [])
    assert config.cluster.num_ranks == 16
    (tmp_path / "resolved.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "resolved.yaml", []) == config


def test_overrides_reach_nested_keys_and_numbers_of_a_preset() -> None:
    config = load_config(DEMO, ["optimizer.learning_rate=1e-4", "cluster.num_nodes=1", "data.overlong=truncate"])
    base = load_config(DEMO, [])
    assert config.optimizer.learning_rate == 1e-4
    assert config.data.overlong == "truncate"
    assert config.cluster == base.cluster.model_copy(update={"num_nodes": 1})


def test_replacements_win_over_file_and_overrides() -> None:
    assert load_config(DEMO, ["strategy=static"], strategy="repack", num_steps=None).strategy == "repack"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optimizer.learning_rat=1",
            r"unknown option 'optimizer.learning_rat'; legal here: betas, clip_grad_norm, learning_rate",
        ),
        ("num_step=3", r"unknown option 'num_step'; legal here: .*num_steps"),
        ("num_steps=0", r"num_steps.*greater than or equal to 1 \(got 0\)"),
        ("optimizer.betas=[0.9, 1]", r"optimizer.betas.1: .*less than 1 \(got 1\)"),
        ("optimizer.betas=[-0.1, 0.9]", r"optimizer.betas.0: .*greater than or equal to 0 \(got -0.1\)"),
        ("timeout_s=1e7", r"timeout_s.*less than or equal to 1000000 \(got 10000000.0\)"),
        ("seed=9223372036854775808", r"seed: .*less than 9223372036854775808 \(got 9223372036854775808\)"),
        ("data.planning_window_steps=1025", r"planning_window_steps.*less than or equal to 1024 \(got 1025\)"),
        ("dtype=float16", r"dtype.*'float32', 'float64' or 'bfloat16'"),
        ("cluster.num_nodes=two", r"cluster.num_nodes.*\(got 'two'\)"),
        ("model=nonesuch", r"'nonesuch': no such file; presets are .*demo"),
        ("num_steps.x=1", r"'num_steps' is a single value"),
        ("num_steps", r"expected key=value"),
        ("=3", r"'=3': expected key=value"),
        ("seed=[", r"'seed=\[': the value is not valid YAML"),
        ("num_steps=true", r"num_steps: got True, which is legal for yes/no"),
        ("model.num_kv_heads=3", r"num_kv_heads=3.*legal num_kv_heads: \[1, 2, 4, 8\]"),
    ],
)
def test_what_is_refused(override: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_config(DEMO, [override])


def test_without_a_config_file_the_message_says_so() -> None:
    with pytest.raises(SpecError, match=r"no --config FILE given\): model: Field required"):
        load_config(None, ["cluster=demo"])


def test_model_files_and_mappings_start_from_a_base(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text("base: demo\nhidden_size: 96\n")
    config = load_config(DEMO, [f"model={tmp_path / 'm.yaml'}", "model.num_layers=8"])
    assert config.model == load_config(DEMO, []).model.model_copy(update={"hidden_size": 96, "num_layers": 8})
    (tmp_path / "m.yaml").write_text("base: demo\nhiden_size: 96\n")
    with pytest.raises(SpecError, match=r"m\.yaml: unknown option 'hiden_size'"):
        load_config(DEMO, [f"model={tmp_path / 'm.yaml'}"])


def test_dense_model_with_a_balance_coefficient_is_refused() -> None:
    dense = {
        **load_config(DEMO, []).model.model_dump(),
        "num_experts": 0,
        "experts_per_token": 0,
        "intermediate_size": 8,
    }
    dense |= {"moe_intermediate_size": 0, "shared_intermediate_size": 0}
    with pytest.raises(SpecError, match="balance_coef has no effect"):
        load_config(DEMO, ["balance_coef=0.1"], model=dense)
    assert isinstance(load_config(DEMO, [], model=dense), TrainConfig)


@pytest.mark.parametrize("text", ["a: [", "- 1", "x: 1", "seed: 1\nseed: 2", "seed: .inf"])
def test_bad_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(SpecError, match=r"c\.yaml"):
        load_config(tmp_path / "c.yaml", [])
    with pytest.raises(SpecError, match="cannot be read"):
        load_config(tmp_path / "missing.yaml", [])
