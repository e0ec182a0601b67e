"""The reward for code of examples/datasets: what passes its tests scores 1, and nothing else
does.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from examples.datasets.code_reward import compute_score

LABEL = json.dumps({"setup": "LIMIT = 3", "tests": ["assert double(2) == 4", "assert LIMIT == 3"]})
PATIENT = {"timeout_s": 120.0}  # a busy machine must not decide


def score(code: str, label: str = LABEL, timeout_s: float = 120.0) -> dict[str, float]:
    response = f"First I think.\n```python\n{code}\n```\nDone."
    return compute_score("mbpp", response, label, {"timeout_s": timeout_s})


def test_a_right_program_scores_one_and_its_output_does_not_matter() -> None:
    result = score("print('x' * 100_000)\ndef double(n):\n    return 2 * n")
    assert (result["score"], result["tests_passed"], result["has_code"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("code", "share"),
    [
        ("def double(n):\n    return n", 0.5),
        ("def double(n) return", 0),
        ("raise SystemExit(0)", 0),
        ("import os\nos._exit(0)", 0),
        ("x = bytearray(1 << 40)\ndef double(n):\n    return 2 * n", 0),
        ("open('x', 'w').write('y' * (1 << 22))\ndef double(n):\n    return 2 * n", 0),
        (
            "import os\nassert 'HOME' not in os.environ and not os.listdir()\ndouble = lambda n: 2 * n",
            1,
        ),
    ],
)
def test_other_programs(code: str, share: float) -> None:
    result = score(code)
    assert result["tests_passed"] == share
    assert result["score"] == float(share == 1)


def test_a_program_without_an_end_scores_zero() -> None:
    assert score("while True:\n    pass", timeout_s=0.3)["score"] == 0


def test_a_process_that_leaves_its_session_does_not_hold_the_score_up(tmp_path: Path) -> None:
    """It waits for the score, and is ended after 200 s if none comes."""
    fifo = tmp_path / "scored"
    os.mkfifo(fifo)
    leave = f"    os.setsid()\n    signal.alarm(200)\n    open({str(fifo)!r})\n    os._exit(0)"
    code = f"import os, signal\nif os.fork() == 0:\n{leave}\ndef double(n):\n    return 2 * n"
    assert score(code)["score"] == 1
    os.close(os.open(fifo, os.O_RDWR))


def test_a_response_without_code_scores_zero() -> None:
    assert compute_score("mbpp", "I do not know.", LABEL)["has_code"] == 0


def test_the_last_block_counts() -> None:
    response = "```python\ndouble = 1\n```\n```py\ndouble = lambda n: 2 * n\n```"
    assert compute_score("mbpp", response, LABEL, PATIENT)["score"] == 1


def test_a_program_reaches_no_network_where_the_metric_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}))"
        result = score(f"{code}\ndef double(n):\n    return 2 * n")
    assert result["score"] == float(not result["no_network"])
