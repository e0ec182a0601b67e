"""The recipes of examples/datasets: a made sample of each source is converted, and a step trains on
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.datasets.convert import SOURCES, main
from tests.tiny_task import REPO, metric_rows, run
from tlt_megatron.config.load import load_config

pytestmark = pytest.mark.e2e

DATASETS = REPO / "examples" / "datasets"
SAMPLES = DATASETS / "samples"
RECIPES = sorted(path.stem for path in DATASETS.glob("*.yaml"))  # named as what they train on
LABELS = {
    "gsm8k": ["43", "1260", "6", "11"],
    "dapo_math": ["100", "9", "1", "29"],  # the source repeats a prompt
    "aime": ["19", "29"],
}


def converted(source: str, folder: Path, *options: str) -> list[dict]:
    out = folder / f"{source}.jsonl"
    main([source, str(SAMPLES / f"{source}.jsonl"), "--out", str(out), *options])
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("source", SOURCES)
def test_a_sample_is_converted(tmp_path: Path, source: str) -> None:
    rows = converted(source, tmp_path)
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(row["prompt"][0]["role"] == "user" for row in rows)
    assert {row["data_source"] for row in rows} == {source}
    if source == "mbpp":
        assert all(json.loads(row["label"])["tests"][0].startswith("assert") for row in rows)
        chosen = converted(source, tmp_path, "--ids", "602-603")
        assert [row["id"] for row in chosen] == ["602", "603"]
    else:
        assert [row["label"] for row in rows] == LABELS[source]


AIME = {"ID": "2024-I-1", "Problem": "1+1?", "Answer": 2}


@pytest.mark.parametrize(
    ("source", "text", "options", "message"),
    [
        ("aime", AIME, ["--ids", "1-5"], "--ids: ids of aime are no numbers: '2024-I-1'"),
        ("aime", AIME, ["--ids", "1-x"], "'1-x': expected an id such as 7, or ids such as 601-974"),
        ("aime", AIME | {"Answer": "x"}, [], "rows row 1: Answer='x': must be an integer"),
        ("aime", {"ID": "1"}, [], "rows row 1: lacks Answer"),
        ("gsm8k", AIME, [], "rows row 1: lacks answer"),
        ("dapo_math", {"prompt": []}, [], "rows row 1: "),
        ("mbpp", "{", [], "rows row 1: is no JSON: "),
        ("mbpp", [1], [], "rows row 1: is a list, must be an object"),
        ("mbpp", None, [], "No such file"),
    ],
)
def test_what_cannot_be_converted_is_said_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    source: str,
    text: Any,
    options: list[str],
    message: str,
) -> None:
    file = tmp_path / "rows"
    if text is not None:
        file.write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(SystemExit) as ended:
        main([source, str(file), "--out", str(tmp_path / "out.jsonl"), *options])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert message in last
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_a_step(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    monkeypatch.chdir(REPO)  # the recipes name files of the repository
    settings = load_config(DATASETS / f"{recipe}.yaml")
    held_out = "aime" if recipe == "dapo_math" else recipe
    for source in (recipe, held_out):
        converted(source, tmp_path, "--text")  # the tiny tokenizer has no chat template
    own = [
        *("run.num_steps=1", "rollout.num_prompts=2", "rollout.num_samples=2"),
        *("rollout.max_new_tokens=16", "data.max_prompt_tokens=480", "reward.num_workers=1"),
        *("reward.timeout_s=120", "reward.overlong_tokens=0", "algorithm.num_minibatches=1"),
        *("algorithm.max_num_gen_batches=1", "eval.interval=0", "eval.num_samples=1"),
        *("eval.num_prompts=2", "logging.trackers=[]"),
        "checkpoint.export_hf=false",
        f"data.train={tmp_path}/{recipe}.jsonl",
        f"data.eval={tmp_path}/{held_out}.jsonl",
    ]
    run(1, config, tmp_path / "run", "--config", DATASETS / f"{recipe}.yaml", *own)
    rows = metric_rows(tmp_path / "run")
    (step,) = (row for row in rows if "timing_s/step" in row)
    assert 0 <= step["critic/rewards/mean"] <= 1
    assert any(f"val-core/{held_out}/reward/mean@1" in row for row in rows)
    assert settings.reward.function in (tmp_path / "run" / "config.yaml").read_text()
    if recipe == "mbpp":
        assert step["reward/mbpp/has_code/mean"] == 0  # the tiny tokenizer has no "`"
