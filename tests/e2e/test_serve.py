"""`tlt serve` and `tlt chat` on a finished run, as a user starts them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from tests.fake_hub import FakeHub, serve
from tests.ranks import LIMIT_S, free_port
from tests.tiny_task import REPO, python, run
from tlt_megatron import Engine
from tlt_megatron.trainer.model_card import base_model

TLT = ("-m", "tlt_megatron.cli")
SPOT = ("speculation.enabled=true", "speculation.strategies=[2_1_2]", "spot.enabled=true")


@pytest.fixture(scope="module")
def finished(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "run"
    run(1, config, folder, "run.num_steps=1", *SPOT)
    return folder


@pytest.fixture(scope="module")
def address(finished: Path) -> Iterator[str]:
    port = free_port()
    words = [sys.executable, *TLT, "serve", finished, "--port", str(port), "--max-tokens", "48"]
    with subprocess.Popen(words, cwd=REPO, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = []
        for line in server.stderr:
            said.append(line)
            if "running on" in line:
                break
        else:
            raise AssertionError("".join(said))
        yield f"http://127.0.0.1:{port}"
        server.send_signal(signal.SIGINT)
        assert server.wait(LIMIT_S) in (0, -signal.SIGINT)


def post(address: str, path: str, **body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{address}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as reply:
            text = reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    return 200, text if body.get("stream") else json.loads(text)


def test_answers_are_those_of_the_engine(address: str, finished: Path) -> None:
    prompts, sampling = ["12+7=", "3*4="], {"temperature": 0.7, "seed": 5}
    expected = Engine(finished / "hf", max_tokens=48).generate(
        prompts, max_new_tokens=20, num_samples=2, **sampling
    )
    code, reply = post(address, "completions", prompt=prompts, max_tokens=20, n=2, **sampling)
    assert code == 200
    assert [choice["text"] for choice in reply["choices"]] == [one.text for one in expected]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [c["finish_reason"] for c in reply["choices"]] == [o.finish_reason for o in expected]
    drawn = sum(len(one.token_ids) for one in expected)
    assert reply["usage"].pop("accept_length") >= 1.0  # with the run's drafter
    assert reply["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": drawn,
        "total_tokens": 9 + drawn,
    }
    code, text = post(
        address, "completions", prompt=prompts, max_tokens=20, n=2, stream=True, **sampling
    )
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events.pop() == "[DONE]"
    assert len(events) > 4, "a response comes in pieces"
    texts = [""] * 4
    for event in events:
        (choice,) = json.loads(event)["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [one.text for one in expected]
    with urllib.request.urlopen(f"{address}/v1/models") as models:
        assert json.load(models)["data"][0]["id"] == finished.name, "no path of this machine"


@pytest.mark.parametrize(
    "words, said",
    [
        (("--port", "99999999"), "tlt serve: --port 99999999: must be 0 to 65535"),
        (("--port", "-1"), "tlt serve: --port -1: must be 0 to 65535"),
        (("--host", "192.0.2.1"), "tlt serve: --host 192.0.2.1 --port 8000: "),
        (("--max-tokens", "0"), "tlt serve: --max-tokens 0: must be at least 1"),
        (("--max-batch-size", "-3"), "tlt serve: --max-batch-size -3: must be at least 1"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_in_one_line(
    finished: Path, words: tuple[str, str], said: str
) -> None:
    done = python(*TLT, "serve", finished, *words)
    assert done.returncode == 2
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


def test_a_port_in_use_is_refused_before_the_model_is_read(finished: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = python(*TLT, "serve", finished, "--port", port)
    assert done.returncode == 2
    assert f"--port {port}: " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def stand_in(program: str, folder: Path) -> str:
    """A PATH on which the program of a server prints its arguments."""
    (folder / program).write_text('#!/bin/sh\necho "started: $@"\n')
    (folder / program).chmod(stat.S_IRWXU)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize("engine, program", [("sglang", "python"), ("vllm", "vllm")])
def test_another_engine_is_started_with_the_exported_drafter(
    finished: Path, tmp_path: Path, engine: str, program: str
) -> None:
    path = stand_in(program, tmp_path)
    for _ in range(2):  # the second time the drafter is there
        done = python(*TLT, "serve", finished, "--engine", engine, "--port", 8123, PATH=path)
        assert done.returncode == 0, done.stderr
        printed, started = done.stdout.splitlines()
        assert str(finished / f"hf_drafter_{engine}") in printed
        assert "--port 8123" in printed
        assert started.startswith("started: ")
        assert str(finished / "hf") in started
    assert (finished / f"hf_drafter_{engine}" / "model.safetensors").is_file()


def test_another_engine_serves_a_model_of_the_hub_with_a_drafter(
    finished: Path, tmp_path: Path
) -> None:
    """Its export needs the model's embedding, which is fetched."""
    drafter = shutil.copytree(finished / "hf_drafter", tmp_path / "drafter")
    words = ("serve", "tiny/policy", "--drafter", drafter, "--engine", "vllm")
    with serve(FakeHub(models={"tiny/policy": finished / "hf"})) as hub:
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        done = python(*TLT, *words, **own, PATH=stand_in("vllm", tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"{drafter}_vllm" in done.stdout


def test_the_policy_has_a_card_that_the_hub_reads(finished: Path) -> None:
    card = ModelCard.load(finished / "hf" / "README.md")
    summary = json.loads((finished / "summary.json").read_text())
    assert card.data.base_model == "model"  # the folder of the run's model
    assert f"| eval_accuracy_last | {summary['eval_accuracy_last']:.4g} |" in card.text
    assert "tlt serve RUN" in card.text


@pytest.mark.parametrize(
    "path, name",
    [
        ("/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/0123", "Qwen/Qwen3-0.6B"),
        ("/models/my-model", "my-model"),
    ],
)
def test_the_base_model_is_named_as_the_hub_names_it(path: str, name: str) -> None:
    assert base_model(path) == name


def test_chat_answers_each_line(finished: Path, address: str) -> None:
    for model in (finished, address):
        words = (*TLT, "chat", model, "--max-new-tokens", 8)
        done = python(*words, given="12+7=\n3*4=\n\n")
        if model == address:  # this tokenizer has no chat template
            assert done.returncode == 2
            assert "no chat template" in done.stderr.splitlines()[-1]
        else:
            assert done.returncode == 0, done.stderr
            # Without an accept length if the selector decoded the answer plainly.
            assert done.stdout.count(" tokens/s") == 2
