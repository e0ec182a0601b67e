"""Functions of the user, in files outside the package, through the program itself."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.tiny_task import (
    make_tiny_task,
    metric_rows,
    rollouts,
    run,
    run_ending,
    write_environment,
)
from tlt_megatron.runtime.log import encodable

pytestmark = pytest.mark.e2e

MINE = '''"""An advantage, a loss and rewards whose values in the metrics are known, and an engine that leaves a file."""

import torch

from tlt_megatron.trainer.build_embedded import build_embedded_engine


def constant(rewards, level=3.0):
    return [[torch.full(reward_T.shape, level) for reward_T in group] for group in rewards]


def plain(logprobs, old_logprobs, batch, section, *, scale):
    ratio = (logprobs - old_logprobs).exp()
    return -scale * ratio * batch.advantages, torch.ones_like(logprobs)


def one(data_source, solution_str, ground_truth, extra_info=None):
    return 1


two = three = one


def engine(config, device, run_dir, world):
    (run_dir / f"engine_of_{world.rank}").touch()
    return build_embedded_engine(config, device, run_dir, world)
'''


def test_a_users_advantage_loss_rewards_and_engine_train(config: Path, tmp_path: Path) -> None:
    """The sum of the weights is 1 up to rounding, so a response with all scores 1 is right."""
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    functions = (f"algorithm.advantage={mine}:constant", f"algorithm.loss={mine}:plain")
    functions += ("algorithm.advantage_args.level=1.5", "algorithm.loss_args={scale: 2.0}")
    functions += (f"rollout.engine={mine}:engine",)
    functions += ("reward.function=math",)
    functions += (f"reward.function={{{mine}:one: 0.7, {mine}:two: 0.2, {mine}:three: 0.1}}",)
    run(2, config, tmp_path / "run", *functions, "run.num_steps=2", "eval.num_samples=2")
    evaluation, *rows, _ = metric_rows(tmp_path / "run")
    assert [evaluation[f"eval/{name}"] for name in ("accuracy", "pass@2", "maj@2")] == [1, 1, 1]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["actor/pg_loss"] == pytest.approx(-3.0, rel=1e-5)
        assert row["actor/pg_clipfrac"] == 1
        assert (row["rollout/solve_all"], row["rollout/solve_none"]) == (1, 0)
    assert len(rollouts(tmp_path / "run")) == 2 * 4 * 4
    assert len(list((tmp_path / "run").glob("engine_of_*"))) == 2


STRANGE = '''"""A reward and a tool whose results only some places take."""


def half(data_source, solution_str, ground_truth, extra_info=None):
    raise ValueError("half of a pair: \\ud83d")


def named(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str), "half \\ud83d": 2.0}


def refused(messages, data_source, ground_truth, extra_info):
    return [{"role": "judge", "content": "12+"}], False
'''
# also writes what a random policy ends its turns with
CHAT = """{% for m in messages %}{% if m.role == 'judge' %}{{ raise_exception('no judges') }}{% endif %}
{{- m.role[0] }}:{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}
{%- if add_generation_prompt %}a:{% endif %}"""


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task of chats, with the file strange.py beside its config."""
    config = make_tiny_task(tmp_path_factory.mktemp("strange"))
    write_environment(config.parent)  # turns end early
    (config.parent / "strange.py").write_text(STRANGE)
    (config.parent / "model" / "chat_template.jinja").write_text(CHAT)
    rows = [{"prompt": [{"role": "user", "content": f"{i}="}], "label": "5"} for i in range(8)]
    (config.parent / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return config


SMALL = ("run.num_steps=1", "data.eval=", "rollout.num_prompts=4", "rollout.num_samples=2")


@pytest.mark.parametrize("function", ["half", "named"])
def test_half_of_a_surrogate_pair_goes_everywhere_as_its_escape(
    strange: Path, tmp_path: Path, function: str
) -> None:
    reward = f"reward.function={strange.parent}/strange.py:{function}"
    code = 1 if function == "half" else 0
    said = run_ending(code, 2, strange, tmp_path / "run", *SMALL, reward)
    if function == "named":
        assert metric_rows(tmp_path / "run")[0]["reward/unknown/half \\ud83d/mean"] == 2.0
    else:
        assert "\\ud83d (traceback: " in encodable(said)  # as a terminal prints it
        assert "is gone" not in said


@pytest.mark.parametrize("on_error", ["zero", "raise"])
def test_an_observation_that_the_chat_template_refuses_is_a_failure_of_the_environment(
    strange: Path, tmp_path: Path, on_error: str
) -> None:
    own = (*SMALL, f"reward.on_error={on_error}", "rollout.max_observation_tokens=80")
    own += (f"rollout.environment={strange.parent}/strange.py:refused",)
    code = 1 if on_error == "raise" else 0
    said = run_ending(code, 2, strange, tmp_path / "run", *own)
    line = "failed on prompt_id=.* cannot be encoded: the chat template of .* no judges"
    assert re.search(line, said)
    if on_error == "zero":
        found = rollouts(tmp_path / "run")
        [row] = metric_rows(tmp_path / "run")
        assert {r["reward"] for r in found if r["finish_reason"] == "stop"} == {0.0}
        assert row["rollout/tool_errors"] == sum(r["finish_reason"] == "stop" for r in found) > 0
