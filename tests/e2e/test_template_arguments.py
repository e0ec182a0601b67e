"""What a chat template writes besides the messages: the date of the run, and its arguments."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from tests.tiny_task import check_same_run, metric_rows, rollouts, run, run_ending
from tlt_megatron import Engine
from tlt_megatron.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.e2e

TEMPLATE = (
    "{{ strftime_now('%d%m') }}{% if mode is defined %}{{ mode }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}="
)


@pytest.fixture
def chat(config: Path, tmp_path: Path) -> Path:
    """The config of a task with chat prompts, whose template writes day and month."""
    folder = shutil.copytree(config.parent, tmp_path / "task")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"prompt": [{"role": "user", "content": f"t{i}"}], "label": "5"} for i in range(24)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = (folder / "config.yaml").read_text().replace(str(config.parent), str(folder))
    (folder / "config.yaml").write_text(text)
    return folder / "config.yaml"


def prompts(run_dir: Path) -> set[str]:
    """Return the begin of each prompt, whose characters the tokenizer may separate by spaces."""
    return {row["prompt"].replace(" ", "")[:6] for row in rollouts(run_dir)}


def evaluations(run_dir: Path) -> list[dict[str, float]]:
    """Return the results of each evaluation."""
    rows = [{k: v for k, v in row.items() if k.startswith("eval/")} for row in metric_rows(run_dir)]
    return [row for row in rows if row]


def check_model_left(run_dir: Path, model: Path) -> None:
    """Check that every server, and transformers itself, writes the run's prompts by default."""
    asked = [{"role": "user", "content": "t1"}]
    exported = run_dir.with_name("exported")
    convert = [f"--from={run_dir}", f"--to={exported}", f"--model={model}", "--verify"]
    # In a process of its own: --verify leaves threads of gloo behind, which break later forks.
    subprocess.run([sys.executable, "-m", "tlt_megatron.cli", "convert", *convert], check=True)
    for folder in (run_dir / "hf", exported):
        hf = AutoTokenizer.from_pretrained(folder)
        render = partial(hf.apply_chat_template, asked, tokenize=False)
        assert (render(), render(mode="8")) == ("26077t1=", "26078t1=")
        engine = Engine(folder, max_tokens=64)
        assert engine.encode([asked]) == [load_tokenizer(folder).encode("26077t1=")]
        engine.close()
        later = load_tokenizer(folder, "2025-01-02")  # for a run that trains this model further
        assert later.render(asked, {"mode": "x"}) == "0201xt1="
        again = shutil.copytree(folder, folder.with_name(f"{folder.name} again"))
        later.pin_template(again, {"mode": [1, "}}"]})
        assert load_tokenizer(again).render(asked) == "0201[1, '}}']t1="


def test_a_run_keeps_its_date_and_another_one_is_named(chat: Path, tmp_path: Path) -> None:
    """So do evaluations and responses that a later step continues."""
    run_dir, rows = tmp_path / "run", f"{chat.parent}/chat.jsonl"
    data = (f"data.train={rows}", f"data.eval={rows}", "eval.num_prompts=4", "eval.interval=1")
    data += ("rollout.partial_rollout_tokens=6", "algorithm.tis_cap=2", "logging.trackers=[]")
    data += ("rollout.num_prompts=3", "rollout.over_sampling_prompts=6")
    mode = "data.chat_template_kwargs.mode=7"
    first = (*data, "data.template_date=2024-07-26", mode)
    run(1, chat, run_dir, *first, "run.num_steps=1")
    assert prompts(run_dir) == {"26077t"}
    config = run_dir / "config.yaml"
    assert yaml.safe_load(config.read_text())["data"]["template_date"] == "2024-07-26"
    later = ("run.num_steps=2", "checkpoint.resume=auto", mode)
    run(1, chat, run_dir, *data, *later)  # on another day
    assert prompts(run_dir) == {"26077t"}
    assert sum(row.get("rollout/carried_responses", 0) for row in metric_rows(run_dir)) > 0
    straight = tmp_path / "straight"
    run(1, chat, straight, *first, "run.num_steps=2")
    check_same_run(run_dir, straight)
    assert evaluations(run_dir) == evaluations(straight) != []
    check_model_left(run_dir, chat.parent / "model")
    other = (*data, "run.num_steps=3", "checkpoint.resume=auto")
    for settings, message in (
        (
            ("data.template_date=2024-07-27", mode),
            "): data.template_date ('2024-07-26' -> '2024-07-27') must be the same",
        ),
        (
            ("data.chat_template_kwargs.mode=8",),
            "): data.chat_template_kwargs ({'mode': 7} -> {'mode': 8}) must be the same",
        ),
    ):
        assert message in run_ending(2, 1, chat, run_dir, *other, *settings)
