"""`python -m tools.bench NAME`: every benchmark that is listed has a file with options of its
own.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.tiny_task import make_tiny_task
from tools.bench.__main__ import _BENCHES, main
from tools.bench.measure import write_json
from tools.commands import warmup_drafter


@pytest.mark.parametrize("name", _BENCHES)
def test_a_listed_benchmark_explains_its_options(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: tools.bench {name} " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["rollout", "speculation", "step"])
def test_a_fresh_clone_is_told_what_to_make(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([name])
    assert ended.value.code == 2
    assert "no model there; `make drafter` makes build/tiny_policy" in capsys.readouterr().err


def test_the_benchmarks_of_a_language_model_measure_any_policy_folder(tmp_path: Path) -> None:
    config, out = make_tiny_task(tmp_path), tmp_path / "out.json"
    model, drafter = str(tmp_path / "model"), str(tmp_path / "drafter")
    few = ("--steps", "1", "--num-prompts", "4", "--num-eval-prompts", "2", "--strategy", "2_1_2")
    warmup_drafter.main(["--config", str(config), "--out", drafter, *few])

    def measured(*arguments: str) -> dict:
        main([*arguments, "--out", str(out)])
        return json.loads(out.read_text())

    sizes = ("--vocab-sizes", "48", "--num-ids", "0", "--batch-sizes", "1", "--rounds", "1")
    found = measured("costs", "--model", model, *sizes)
    assert found["draft_step"]["48/1"]["0"]["share"]["median"] > 0
    assert found["noise"]["48/1"]["search"]["share"]["median"] > 0
    requests = "--num-requests 4 --num-samples 2 --max-new-tokens 8 --rounds 1 --hf-batch-sizes 4"
    prompts = ("--prompts", str(tmp_path / "eval.jsonl"), "--ignore-stops", *requests.split())
    assert measured("rollout", "--model", model, *prompts)["ratio"]["median"] > 0
    folders = ("--config", str(config), "--policy", model, "--drafter", drafter)
    strategy = "speculation.strategies=['2_1_2']"
    few = ("--rounds", "1", "--num-requests", "4", "--num-tokens", "8")
    result = measured("llm", "--parts", "decode", *few, *folders, strategy)
    for dtype in ("bfloat16", "float32"):
        assert 0 <= result["mismatch_per_token"][dtype] <= 1
        assert result["decode_speedup"][dtype]["2_1_2"]["median"] > 0
        invariant = result["batch_invariant_price"][dtype]
        assert "refused" in invariant or set(invariant["mismatch_per_token"]) == {"1", "8", "64"}
    assert [row["steps"] for row in result["accept_length_by_training_s"]] == [0, 1]
    short = ("--strategy", "2_1_2", "--batch-sizes", "2", "--num-tokens", "8", "--rounds", "1")
    pair = ("--model", model, "--drafter", drafter, "--prompts", str(tmp_path / "eval.jsonl"))
    result = measured("beside", *pair, *short)
    assert set(result["seconds_over_resting"]) == {"plain/2", "2_1_2/2"}


def test_a_measure_that_is_missing_is_null_in_the_json(tmp_path: Path) -> None:
    write_json(tmp_path / "out.json", {"kl": [math.nan, 0.5], "of": {"one": (math.nan,)}})
    found = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert (found["kl"], found["of"]) == ([None, 0.5], {"one": [None]})
