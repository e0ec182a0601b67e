"""`tlt evaluate` on a finished run: the command line, and what the run that it starts leaves
behind.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.tiny_task import metric_rows, run, run_forked
from tlt_megatron.cli import run_tool
from tlt_megatron.config.load import dump_config, load_config
from tools.commands.evaluate import evaluation_command

pytestmark = pytest.mark.e2e


def evaluate(given: list[str], out: Path) -> dict:
    """What `tlt evaluate` with these words writes into `out`."""
    command = evaluation_command([*given, f"--out={out}"])
    start = next(i for i, word in enumerate(command) if word.endswith("pretrain_rl.py"))
    ((code, stderr),) = run_forked(1, *command[start + 1 :])
    assert code == 0, stderr
    return json.loads((out / "evaluation.json").read_text())


def test_a_finished_run_is_evaluated_with_its_settings(config: Path, tmp_path: Path) -> None:
    trained, data = tmp_path / "trained", config.parent / "train.jsonl"
    held_out = config.parent / "eval.jsonl"
    settings = ("eval.num_samples=2", "eval.num_prompts=6", "run.num_steps=1")
    critic = shutil.copytree(config.parent / "model", tmp_path / "critic")
    ppo = ("algorithm.advantage=gae", f"critic.path={critic}")
    run(1, config, trained, *settings, *ppo, f"data.eval=[{held_out}, {data}]")
    shutil.rmtree(critic)  # an evaluation of PPO needs no critic
    for row in (row for row in metric_rows(trained) if "eval/accuracy" in row):
        for name in ("accuracy", "pass@1", "pass@2", "maj@2", "response_length/mean"):
            parts = (row[f"eval/eval/{name}"], row[f"eval/train/{name}"])
            assert row[f"eval/{name}"] == pytest.approx(sum(parts) / 2)
        for name in ("eval", "train"):
            assert row[f"val-core/{name}/reward/mean@2"] == row[f"eval/{name}/mean_reward"]
    given = f"{trained} --trust-run --data {data} --samples 4 run.seed=7".split()
    result = evaluate(given, tmp_path / "result")
    assert (result["model"], result["data"]) == (str(trained / "hf"), str(data))
    assert (result["num_samples"], result["seed"]) == (4, 7)
    (row,) = metric_rows(tmp_path / "result")
    metrics = result["metrics"]
    assert metrics["avg@4"] == row["eval/accuracy"]
    assert metrics["pass@1"] <= metrics["pass@2"] <= metrics["pass@4"]
    assert 0 <= metrics["maj@4"] <= 1
    assert not (tmp_path / "result" / "hf").exists()
    assert not list((tmp_path / "result").glob("checkpoints/iter_*"))


def test_a_model_is_evaluated_on_several_files(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """A file without data sources gives its prompts its own name. A setting may follow the
    files.
    """
    row = {"prompt": "e1=", "label": "5"}
    for name, more in (("one", {}), ("two", {"data_source": "sums"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test.jsonl").write_text(json.dumps(row | more) + "\n")
    files = [str(tmp_path / name / "test.jsonl") for name in ("one", "two")]
    given = [str(config.parent / "model"), "--data", *files]
    given += [f"reward.function={config.parent}/reward.py:compute_score"]
    given += ["rollout.max_new_tokens=24", "data.max_prompt_tokens=16", "--samples=3"]
    result = evaluate(given, tmp_path / "result")
    assert result["data"] == files
    one, two = result["data_sets"]["one-test"], result["data_sets"]["two-test"]
    metrics = result["metrics"]
    assert metrics["avg@3"] == pytest.approx((one["avg@3"] + two["avg@3"]) / 2)
    assert metrics["val-core/one-test/reward/mean@3"] == one["mean_reward"]
    assert metrics["val-core/sums/reward/mean@3"] == two["mean_reward"]
    printed = capfd.readouterr().out
    assert "6 of 6 responses of rank 0 | ETA 0:00:00" in printed
    names = re.findall(r"^ *(data set|one-test|two-test|mean) .*\d", printed, re.MULTILINE)
    assert names == ["data set", "one-test", "two-test", "mean"]
    with pytest.raises(ValueError, match=r"data\.eval=.*must be files with different names"):
        evaluation_command([str(config.parent / "model"), "--data", files[0], files[0]])


def test_a_run_without_an_exported_policy_is_told_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ValueError, match=r"tlt convert --from .* --to .*/hf makes"):
        evaluation_command([str(tmp_path), "--data", "test.jsonl"])


def test_what_only_training_needs_is_off_in_an_evaluation(tmp_path: Path) -> None:
    settings = ("speculation.enabled=true", "spot.enabled=true")
    trained = load_config(None, settings)
    (tmp_path / "config.yaml").write_text(dump_config(trained))
    (tmp_path / "hf").mkdir()
    given = [str(tmp_path), "--data", "a.jsonl"]
    command = evaluation_command(given)
    assert f"model.path={tmp_path}/hf" in command
    assert "speculation.enabled=true" not in command
    drafted = evaluation_command([*given, "--drafter", "own"])
    assert drafted.index("speculation.enabled=false") < drafted.index("speculation.enabled=true")
    assert "speculation.drafter=own" in drafted


CODE = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()
"""


@pytest.mark.parametrize(
    ("setting", "again"),
    [
        ("reward.function={0}:f", "reward.function=math"),
        ("reward.function={{math: 1.0, {0}:f: 0.5}}", "reward.function=exact"),
        ("rollout.environment={0}:f", "rollout.environment="),
        ("rollout.tools=[python, {0}:f]", "rollout.tools=[python]"),
        ("rollout.tools=[mcp:server --all]", "rollout.tools=[]"),
        ("rollout.tools=[python_without_sandbox]", "rollout.tools=[python]"),
        ("algorithm.advantage={0}:f", "algorithm.advantage=grpo"),
        ("algorithm.loss=os:system", "algorithm.loss=ppo"),
        ("speculation.selector={0}:f", "speculation.selector=fixed"),
        ("logging.trackers=[tensorboard, {0}:f]", "logging.trackers=[]"),
        ("rollout.engine={0}:f", "rollout.engine=embedded"),
        ("sglang.engine_args.trust_remote_code=true", "sglang.engine_args={{}}"),
    ],
)
def test_code_that_a_run_folder_names_runs_only_if_the_user_trusts_it(
    setting: str, again: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the command: it becomes the run only with --trust-run, or if the setting is given."""
    file = tmp_path / "theirs.py"
    file.write_text(CODE)
    settings = [setting.format(file)]
    if setting.startswith("sglang"):
        settings.append("rollout.engine=sglang")
    (tmp_path / "config.yaml").write_text(dump_config(load_config(None, settings)))
    (tmp_path / "hf").mkdir()
    words, started = ["evaluate", str(tmp_path), "--data", "a.jsonl"], []
    monkeypatch.setattr("os.execv", lambda *command: started.append(command))
    monkeypatch.setenv("TLT_MEGATRON_PROGRAM", "any")  # so that it is restored
    key = setting.partition("=")[0].removesuffix(".trust_remote_code")
    refusal = rf"names code outside of the package: {key}=.*--trust-run"
    for more in ([], ["reward.num_workers=2"], [f"{key}.more=1"][: key.count("args")]):
        with pytest.raises(ValueError, match=refusal):
            run_tool("evaluate", [*words[1:], *more])
    assert not started
    run_tool("evaluate", [*words[1:], "--trust-run"])
    run_tool("evaluate", [*words[1:], again.format()])
    run_tool(
        "evaluate", [*words[1:], "--config", str(tmp_path / "config.yaml")]
    )  # named by the user
    assert len(started) == 3
    assert not file.with_suffix(".ran").exists()


def test_top_k_of_one_is_greedy_in_an_evaluation(config: Path, tmp_path: Path) -> None:
    """By default the rollout's, or its own."""
    found = []
    for number, settings in enumerate(
        (["eval.temperature=0"], ["rollout.top_k=1"], ["rollout.top_k=5", "eval.top_k=1"])
    ):
        run_dir = tmp_path / str(number)
        run(1, config, run_dir, "run.num_steps=0", "eval.num_samples=3", *settings)
        (row,) = metric_rows(run_dir)
        names = ("eval/accuracy", "eval/pass@3", "eval/response_length/mean")
        found.append([row[name] for name in names])
    assert found[0] == found[1] == found[2]


def test_prompts_that_are_left_out_are_counted(config: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1" * n + "=", "label": "5"} for n in (3, 40, 5, 41)]
    data = tmp_path / "test.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [str(config.parent / "model"), "--data", str(data), "--samples=1"]
    given += ["reward.function=exact", "rollout.max_new_tokens=8", "data.max_prompt_tokens=16"]
    result = evaluate(given, tmp_path / "result")
    assert result["prompts_left_out"] == {"test": 2}
    log = next((tmp_path / "result" / "logs").rglob("rank_00000.log")).read_text()
    assert "2 of 4 prompts are longer" in log
    assert "is data.train" not in log
