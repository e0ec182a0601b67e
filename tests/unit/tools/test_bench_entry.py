"""`python -m tools.bench NAME`: every benchmark that is listed has a file with options of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_task import make_tiny_task
from tools.bench.__main__ import _BENCHES, main


@pytest.mark.parametrize("name", _BENCHES)
def test_a_listed_benchmark_explains_its_options(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: tools.bench {name} " in capsys.readouterr().out


def test_a_name_that_is_not_listed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["rollouts"])
    assert ended.value.code == 2
    assert "'rollouts' (choose from" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rollout", "speculation", "step"])
def test_a_fresh_clone_is_told_what_to_make(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([name])
    assert ended.value.code == 2
    assert "no model there; `make drafter` makes build/tiny_policy" in capsys.readouterr().err


def test_bytes_of_graphs_are_written_with_their_ratios(tmp_path: Path) -> None:
    out = tmp_path / "graphs.json"
    main(["roofline", "--out", str(out)])
    result = json.loads(out.read_text())["graph_pool_bytes"]
    figures = result["paper"]
    assert figures["naive_over_pool"] == figures["naive"] / figures["pool"]
    assert figures["pool"] < figures["single"] < figures["naive"]


def test_the_benchmark_of_a_language_model_measures_any_policy_folder(tmp_path: Path) -> None:
    config, out = make_tiny_task(tmp_path), tmp_path / "llm.json"
    policy = ("--config", str(config), "--policy", str(tmp_path / "model"))
    folders = (*policy, "--drafter", str(tmp_path / "drafter"), "--out", str(out))
    strategy = "speculation.strategies=['2_1_2']"
    main(["llm", "--quick", "--parts", "cost", "engine", "decode", *folders, strategy])
    result = json.loads(out.read_text())
    for dtype in ("bfloat16", "float32"):
        assert result["draft_step_fraction"][dtype]["8/0"]["median"] > 0
        assert result["noise_fraction"][dtype]["48/1"]["search_share"]["median"] > 0
        assert 0 <= result["mismatch_per_token"][dtype] <= 1
        assert result["decode_speedup"][dtype]["2_1_2"]["median"] > 0
        invariant = result["batch_invariant_price"][dtype]
        assert "refused" in invariant or set(invariant["mismatch_per_token"]) == {"1", "8", "64"}
        assert result["embedded_over_transformers"][dtype]["ratio"]["median"] > 0
    assert result["accept_length_by_training_s"][0]["training_s"] == 0.0
    assert len(result["accept_length_by_training_s"]) == 2
    assert (tmp_path / "drafter" / "config.json").is_file()
