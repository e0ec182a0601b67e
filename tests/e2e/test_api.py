"""The Python API, as a user's script calls it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from ast import literal_eval
from pathlib import Path

import psutil
import pytest

from tests.ranks import LIMIT_S
from tests.tiny_task import REPO, python, rollouts

SCRIPT = """
import math
import sys
from collections.abc import Mapping

from digits import digits_of
from tlt_megatron import Drafter, Engine, Trainer

LIMIT, PARTS, floor = 5, 4, object()
print("the script runs")


def round(digits, limit):  # a function of Python has this name, and would refuse the limit
    return sum(int(c) < limit for c in digits) / max(1, len(digits))


def my_reward(data_source, solution_str, ground_truth, extra_info: Mapping = None, parts=PARTS):
    share = round(digits_of(solution_str), LIMIT)
    return math.floor(parts * share) / parts


config, model, folder = sys.argv[1:]
overrides = {"run.dir": folder + "/run", "run.num_steps": 2}
run = Trainer(config, reward=my_reward, overrides=overrides, ranks=2).train()
print("rewards", [row["critic/rewards/mean"] for row in run.metrics[1:]], run.summary["num_steps"])

rows = [{"prompt": f"{i}+{i}=", "label": "5"} for i in range(4)]
sizes = {"data.max_prompt_tokens": 16, "rollout.num_prompts": 2, "rollout.max_new_tokens": 8}
small = {**sizes, "run.dir": folder + "/small", "run.num_steps": 1, "mcore.micro_batch_tokens": 64}
print("without a file", Trainer(model=model, data=rows, reward=my_reward, overrides=small).train().summary["num_steps"])

drafter = Drafter.train(run.policy, ["12+7=", "3*4=", "9-5="] * 8, minutes=0.02, out=folder + "/drafter")
print("accept length", drafter.accept_length)
print("exported", sorted(p.name for p in drafter.export(folder + "/served").iterdir()))

prompts = ["12+7=", Engine(run.policy).tokenizer.encode("3*4=")]
for options in ({}, {"drafter": drafter}, {"strategies": ["ngram_4"]}):
    engine = Engine(run.policy, dtype="float64", max_tokens=64, **options)
    answers = engine.generate(prompts, max_new_tokens=24, num_samples=2, seed=3)
    print("tokens", [(a.prompt_index, a.sample_index, a.token_ids) for a in answers])
    print("fields", answers[0].finish_reason, len(answers[0].logprobs), bool(answers[0].accept_lengths))
"""


def run_script(folder: Path, text: str, *arguments: object) -> tuple[int, list[str]]:
    """Run `text` as a script in `folder`. Return the exit code and what it printed."""
    script = folder / "script.py"
    script.write_text(text)
    done = python(script, *arguments, cwd=folder)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_a_script_trains_and_generates(config: Path, tmp_path: Path) -> None:
    beside = "def digits_of(text):\n    return [c for c in text if c.isdigit()]\n"
    (tmp_path / "digits.py").write_text(beside)
    code, lines = run_script(tmp_path, SCRIPT, config, config.parent / "model", tmp_path)
    assert code == 0, "\n".join(lines)
    assert lines.count("the script runs") == 1, "a rank or a reward worker ran the script"
    found = {line.partition(" ")[0]: line for line in lines}
    assert {row["reward"] for row in rollouts(tmp_path / "run")} <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert found["rewards"].endswith("] 2")
    assert found["without"] == "without a file 1"
    assert float(found["accept"].rpartition(" ")[2]) >= 1.0
    assert "model.safetensors" in found["exported"]
    tokens = [line for line in lines if line.startswith("tokens")]
    assert len(tokens) == 3
    assert len(set(tokens)) == 1, "speculation changed a token"
    fields = [line.split() for line in lines if line.startswith("fields")]
    assert [line[3] for line in fields] == ["False", "True", "True"]


BAD = {  # each line of a script, and the error of which it says one line
    "Engine('no/where')": "ValueError: model='no/where': ",
    "Engine(MODEL, drafter='no/drafter')": "ValueError: drafter='no/drafter': ",
    "Engine(MODEL, strategies=['4_1'])": "ValueError: strategy='4_1': ",
    "Engine(MODEL, strategies=['4_1_4'])": "ValueError: strategy=4_1_4 needs a learned drafter",
    "Engine(MODEL, max_tokens=8).generate(['1234567890'], max_new_tokens=4)": "prompts[0] has ",
    "Engine(MODEL).generate([''])": "prompts[0] has 0 tokens, and its response up to ",
    "Trainer(CONFIG, reward=1.0)": "ValueError: reward=1.0: must be a function or another",
    "Trainer(CONFIG, reward=locked)": "ValueError: reward=locked: uses what cannot be copied",
    "Trainer(CONFIG, overrides={'a.b': 1}).train()": "ValueError: pretrain_rl: a={'b': 1}: unknown key",
}
BAD_SCRIPT = """
import threading

from tlt_megatron import Engine, Trainer

LOCK = threading.Lock()


def locked(**_):
    return LOCK.locked()


def broken(**arguments):
    raise KeyError("my mistake")


for line in LINES:
    try:
        eval(line)
    except Exception as error:
        print([line, f"{type(error).__name__}: {error}"])
Trainer(CONFIG, reward=broken).train()
"""


def test_bad_input_is_said_in_one_error(config: Path, tmp_path: Path) -> None:
    """Each in turn, and at last one that ends the script."""
    given = {"CONFIG": str(config), "MODEL": str(config.parent / "model"), "LINES": [*BAD]}
    names = "".join(f"{name} = {value!r}\n" for name, value in given.items())
    code, lines = run_script(tmp_path, names + BAD_SCRIPT)
    assert code == 1
    found = dict(literal_eval(line) for line in lines if line.startswith("['") or line[:2] == '["')
    assert found.keys() == BAD.keys(), "\n".join(lines[-5:])
    for line, error in BAD.items():
        assert error in found[line]
    assert "Error: " in lines[-1]
    assert "my mistake" in lines[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_a_run_is_saved_when_its_script_is_stopped(
    config: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    settings = {"run.dir": str(run_dir), "run.num_steps": 10_000}
    script = tmp_path / "script.py"
    script.write_text(
        f"from tlt_megatron import Trainer\nTrainer({str(config)!r}, overrides={settings}, ranks=2).train()\n"
    )
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, script],
            env=os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            # A test run in the background of a shell ignores it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert process.poll() is None, (tmp_path / "output").read_text()
        time.sleep(0.1)
    (launcher,) = psutil.Process(process.pid).children()
    family = [launcher, *launcher.children(recursive=True)]
    if number == signal.SIGTERM:  # the machine tells the run
        launcher.terminate()
        assert process.wait(LIMIT_S) == 1
        last = (tmp_path / "output").read_text().splitlines()[-1]
        assert re.search(r"RunStopped: .*/run: stopped on request after step \d+ and saved", last)
    else:
        process.send_signal(number)
        code = process.wait(LIMIT_S)
        assert code == -number or number == signal.SIGINT
    _, alive = psutil.wait_procs(family, timeout=LIMIT_S)
    assert not alive
    assert any((run_dir / "checkpoints").iterdir()), (tmp_path / "output").read_text()
