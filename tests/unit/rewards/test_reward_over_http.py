"""The example of a reward model over HTTP, in a worker: retries, errors that are not repeated, and
a model that never answers.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.reward_puppet import outcomes
from tlt_megatron.rewards.workers import RewardPool

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "reward_model_http.py"
Serve = Callable[[list[int]], list[dict[str, str]]]


def ask(response: str, *, timeout_s: float = 120.0) -> tuple[float, str]:
    """The reward, and how the call failed."""
    spec = f"{EXAMPLE}:compute_score"
    with RewardPool(spec, num_workers=1, timeout_s=timeout_s, on_error="zero") as pool:
        [outcome] = outcomes(pool, response)
        return outcome.score, outcome.failure


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts a model that answers its requests with these statuses, cut off after a negative one;
    returns the list of what it was asked.
    """
    servers: list[ThreadingHTTPServer] = []

    def start(statuses: list[int]) -> list[dict[str, str]]:
        asked: list[dict[str, str]] = []

        class Model(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                status = statuses[len(asked) - 1]
                self.send_response(abs(status))
                if status < 0:  # the answer ends before its length
                    self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"score": 0.75, "fluency": 0.5}')

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Model))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        monkeypatch.setenv("REWARD_MODEL_URL", f"http://127.0.0.1:{servers[-1].server_port}/score")
        return asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_model_that_fails_three_times_is_asked_a_fourth_time(serve: Serve) -> None:
    asked = serve([503, 429, -200, 200])
    assert ask("an answer") == (0.75, "")
    assert len(asked) == 4
    assert {request["response"] for request in asked} == {"an answer"}


def test_a_request_that_the_model_refuses_is_not_repeated(serve: Serve) -> None:
    asked = serve([404])
    assert ask("an answer") == (0.0, "error")
    assert len(asked) == 1


def test_a_model_that_never_answers_is_given_up_after_the_timeout_of_the_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        monkeypatch.setenv("REWARD_MODEL_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        assert ask("an answer", timeout_s=1.0) == (0.0, "timeout")


def test_a_url_that_is_not_set_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REWARD_MODEL_URL", raising=False)
    with (
        pytest.raises(ValueError, match="REWARD_MODEL_URL='': must be the http"),
        RewardPool(f"{EXAMPLE}:compute_score", num_workers=1, timeout_s=60, on_error="raise") as p,
    ):
        p.wait_ready()
