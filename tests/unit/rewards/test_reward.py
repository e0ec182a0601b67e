from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tlt_megatron.config.extensions import load_extension
from tlt_megatron.rewards.reward import read_result
from tlt_megatron.rewards.workers import RewardPool
from tlt_megatron.types import Prompt

REPOSITORY = Path(__file__).parents[3]
EXAMPLE = REPOSITORY / "examples" / "custom_reward.py"
SIGNATURE = "(data_source, solution_str, ground_truth, extra_info=None)"


def write_module(folder: Path, text: str, name: str = "rewards_of_mine.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text,message",
    [
        ("grade = 5\n", "has no .grade. that can be called"),
        ("def grade(a, b): ...\n", r"has parameters \(a, b\), must accept"),
        ("def grade(data_source, solution_str, ground_truth): ...\n", "must accept .*'extra_info'"),
        (f"def grade{SIGNATURE[:-1]}, *, more): ...\n", "must accept .*'more'"),
        ("def grade(:\n", "fails to load: SyntaxError"),
    ],
)
def test_files_that_cannot_serve_are_refused(tmp_path: Path, text: str, message: str) -> None:
    spec = f"{write_module(tmp_path, text)}:grade"
    with pytest.raises(ValueError, match=message) as caught:
        load_extension("reward.function", spec)
    assert f"reward.function={spec!r}" in str(caught.value)


@pytest.mark.parametrize(
    "spec,message",
    [
        (
            "maths",
            "must be one of math, exact, environment, none, path/to/file.py:name or package.module:name",
        ),
        ("", "must be one of math"),
        ("file.py:", "must be one of math"),
        (":grade", "must be one of math"),
        ("nowhere/file.py:grade", "no such file: .*nowhere/file.py"),
        ("no.such.module:grade", "no.such.module fails to load: .*No module named 'no'"),
        ("json:no_such_function", "json has no 'no_such_function'"),
    ],
)
def test_specs_that_name_nothing_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_extension("reward.function", spec)
    assert repr(spec) in str(caught.value)


@pytest.mark.parametrize("result", [1, 1.0, True, {"score": 1.0, "why": None}, {"score": 1}])
def test_scores_that_are_read(result: object) -> None:
    assert read_result(result) == (1.0, {})


@pytest.mark.parametrize(
    ("result", "key"),
    [
        *(
            (result, "score")
            for result in (None, "1.0", b"1", float("nan"), float("inf"), [1.0], {})
        ),
        *(({"score": result}, "score") for result in (None, 2e6)),
        # 1e200 has a variance that overflows: advantages and gradients would be 0 without a word
        *((result, "score") for result in (1e200, -1e7, 10**400, {"reward": 1})),
        *(
            ({"score": 1.0, "acc": value}, "acc")
            for value in (float("nan"), [1.0], {"a": 1.0}, 10**400)
        ),
    ],
)
def test_what_is_no_number_of_a_sensible_size_is_refused_by_name(result: object, key: str) -> None:
    limit = r"1e[+]06" if key == "score" else r"1[.]79769e[+]308"
    expected = rf"^{key}=.*: must be a finite number from -{limit} to {limit}|has no '{key}'"
    with pytest.raises(ValueError, match=expected):
        read_result(result)


def test_further_numbers_of_a_result_are_read_and_text_is_skipped() -> None:
    result = {"score": True, "acc": 1, "pred": "42", "length": 10**9, "tool": None, "ok": False}
    with pytest.warns(match="the entry 'pred' of a reward is text, so it is no metric"):
        assert read_result(result) == (1.0, {"acc": 1.0, "length": 1e9, "ok": 0.0})


SEVERAL = f"""
def right{SIGNATURE}:
    return {{"score": 1.0, "digits": 3}}
async def polite{SIGNATURE}:
    if solution_str == "boom":
        return {{"score": 0.5, "pleases": [1]}}
    return {{"score": 0.5, "pleases": 2}}
score = right
"""


def test_the_one_of_several_that_fails_is_named(tmp_path: Path) -> None:
    path = write_module(tmp_path, SEVERAL)
    weights = {f"{path}:score": 1.0, f"{path}:polite": 0.5}
    row = Prompt(prompt_id="row 7", draw_index=0, token_ids=(1,))
    with RewardPool(weights, num_workers=1, timeout_s=120.0, on_error="raise") as pool:
        pool.submit("kept", row, "fine")
        [kept] = (pool.collect() or {}).values()
        assert kept.score == 1.25
        assert kept.details == {
            **{"score": 1.0, "score/digits": 3.0},
            **{"polite": 0.5, "polite/pleases": 2.0},
        }
        pool.submit("lost", row, "boom")
        with pytest.raises(RuntimeError) as caught:
            pool.collect()
    for text in (
        "reward.function={",
        "prompt_id='row 7'",
        "pleases=[1]: must be a finite number",
        f"the result of '{path}:polite'",
    ):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "response,reward",
    [("<answer>4</answer>", 1.0), ("it is 4", 0.9), ("<answer>5</answer>", 0.0), ("no", 0.0)],
)
def test_example_of_a_custom_reward(response: str, reward: float) -> None:
    result = load_extension("reward.function", f"{EXAMPLE}:compute_score")("sums", response, "4")
    assert read_result(result)[0] == reward


def test_async_example_of_a_custom_reward() -> None:
    function = load_extension("reward.function", f"{EXAMPLE}:compute_score_async")
    assert asyncio.run(function("sums", "it is 4", "4")) == 1.0
    assert asyncio.run(function("sums", "it is 5", "4")) == 0.0


def test_workers_and_pool_import_no_torch() -> None:
    program = (
        "import sys, tlt_megatron.rewards.worker_main, tlt_megatron.rewards.workers\n"
        "import tlt_megatron.rewards.builtin\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY).returncode == 0
