"""`tlt serve`'s application under uvicorn, as clients of OpenAI's protocol see it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import LIMIT_S
from tests.served_model import (
    get,
    make_chat_model,
    post,
    serving,
    stream,
    tokens_until,
    wait_until_idle,
)
from tlt_megatron import Engine
from tools.commands.openai_server import Bounds

USER = [{"role": "user", "content": "12"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine(model, dtype="float64", max_batch_size=8, max_tokens=512)


@pytest.fixture(scope="module")
def address(engine: Engine) -> Iterator[str]:
    with serving(engine, Bounds(body_bytes=4096, num_open=300)) as address:
        yield address


# ---- answers


def test_a_chat_and_its_stream(address: str, engine: Engine) -> None:
    (expected,) = engine.generate(USER, max_new_tokens=20, seed=5)
    body = {"messages": USER, "max_completion_tokens": 20, "seed": 5}
    (choice,) = post(address, "chat/completions", body)[1]["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text}
    deltas = [e["choices"][0] for e in stream(address, "chat/completions", **body)]
    assert deltas[0]["delta"]["role"] == "assistant"
    assert "".join(d["delta"]["content"] for d in deltas) == expected.text
    assert [d["finish_reason"] for d in deltas][-2:] == [None, expected.finish_reason]


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_ends_the_text(address: str, engine: Engine, streams: bool) -> None:
    (whole,) = engine.generate("12+7=", max_new_tokens=60, seed=8)
    stop = whole.text[10:12]
    place = whole.text.find(stop)
    body = {"prompt": "12+7=", "max_tokens": 60, "seed": 8, "stop": ["never", stop]}
    if streams:
        usage = {"include_usage": True}
        events = list(stream(address, "completions", **body, stream_options=usage))
        text = "".join(e["choices"][0]["text"] for e in events[:-1])
        reason, usage = events[-2]["choices"][0]["finish_reason"], events[-1]["usage"]
    else:
        reply = post(address, "completions", body)[1]
        text, reason = reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]
        usage = reply["usage"]
    assert (text, reason) == (whole.text[:place], "stop")
    assert usage["completion_tokens"] == tokens_until(stop, whole.token_ids, engine)
    wait_until_idle(address)


def test_logprobs_and_echo(address: str, engine: Engine) -> None:
    body = {"prompt": "12+7=", "max_tokens": 9, "seed": 8, "temperature": 0.5}
    (one,) = engine.generate("12+7=", max_new_tokens=9, seed=8, temperature=0.5)
    (drawn,) = post(address, "completions", body | {"logprobs": 0})[1]["choices"]
    assert drawn["text"] == one.text
    assert len(drawn["logprobs"]["tokens"]) == len(one.token_ids)
    values = drawn["logprobs"]["token_logprobs"]
    assert values != one.logprobs, "of the sampled distribution"
    (raw,) = post(address, "completions", body | {"logprobs": 3, "echo": True})[1]["choices"]
    assert raw["text"] == "12+7=" + one.text
    found = raw["logprobs"]
    assert found["tokens"][:5] == list("12+7=")
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][5:] == pytest.approx(values, abs=1e-6)
    assert found["text_offset"][:6] == [0, 1, 2, 3, 4, 5]
    assert found["top_logprobs"][0] is None
    assert len(found["top_logprobs"]) == 5 + len(values)
    assert all(1 <= len(top) <= 3 for top in found["top_logprobs"][1:])  # texts may be equal
    greedy = {"messages": USER, "max_tokens": 9, "temperature": 0}
    greedy |= {"logprobs": True, "top_logprobs": 2}
    for token in post(address, "chat/completions", greedy)[1]["choices"][0]["logprobs"]["content"]:
        best, second = token.pop("top_logprobs")
        assert best == token
        assert second["logprob"] < best["logprob"]
    chat = {"messages": USER, "max_tokens": 9, "seed": 8, "logprobs": True}
    (whole,) = post(address, "chat/completions", chat)[1]["choices"]
    pieces = [e["choices"][0] for e in stream(address, "chat/completions", **chat)]
    tokens = [token for piece in pieces for token in piece["logprobs"]["content"]]
    assert tokens == whole["logprobs"]["content"]
    assert len(tokens) <= 9
    assert all(token["logprob"] <= 0 for token in tokens)


def test_neutral_defaults_are_accepted(address: str) -> None:
    none = dict.fromkeys(
        ("max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "logprobs", "tools")
    )
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "user": "me",
        "response_format": {"type": "text"},
        "tool_choice": "none",
        "store": False,
        "model": "any",
    }
    code, reply = post(address, "chat/completions", {"messages": USER, **none, **neutral})
    assert code == 200, reply
    code, reply = post(address, "completions", {"prompt": "1", "best_of": 1, "suffix": None})
    assert code == 200, reply
    assert reply["usage"]["completion_tokens"] <= 16, "OpenAI's default"


@pytest.mark.parametrize(
    "path, body, code, said",
    [
        ("completions", {"prompt": "1" * 600}, 400, "prompts[0] has 600 tokens, and "),
        (
            "completions",
            {"prompt": []},
            400,
            "0 prompts with n=1 are 0 responses: must be 1 to 300",
        ),
        ("completions", {"prompt": [3, 48]}, 400, "prompts[0][1]=48: must be a token id, 0 to 47"),
        ("completions", {"prompt": "\ud800"}, 400, "half of a surrogate pair"),
        ("completions", {"prompt": {"a": 1}}, 400, "prompt"),
        ("completions", {}, 400, "prompt: Field required"),
        ("completions", {"prompt": "1", "max_tokens": 0}, 400, "max_tokens=0: "),
        (
            "completions",
            {"prompt": "1", "max_tokens": 10**9},
            400,
            "its response up to 1000000000: ",
        ),
        ("completions", {"prompt": "1", "n": 10**15}, 400, "n=1000000000000000: "),
        ("completions", {"prompt": ["1"] * 100, "n": 100}, 400, "are 10000 responses"),
        ("completions", {"prompt": "1", "temperature": float("nan")}, 400, "temperature"),
        ("completions", {"prompt": "1", "stop": ["x"] * 65}, 400, "stop"),
        ("completions", {"prompt": "1", "logprobs": 21}, 400, "logprobs=21: "),
        ("completions", {"prompt": "1", "max_tokens": True}, 400, "max_tokens=True: "),
        ("completions", {"prompt": "1", "max_tokens": "5"}, 400, "max_tokens='5': "),
        ("completions", {"prompt": "1", "seed": 1.5}, 400, "seed=1.5: "),
        ("completions", {"prompt": "1", "stream": "true"}, 400, "stream='true': "),
        ("completions", {"prompt": "1", "stop": [1]}, 400, "stop=[1]: "),
        ("completions", {"prompt": True}, 400, "prompt=True: "),
        ("chat/completions", {"messages": USER, "top_logprobs": 2}, 400, "needs logprobs=true"),
        ("completions", {"prompt": "1", "logprobs": 2, "stream": True}, 400, "stream=True with"),
        ("completions", {"prompt": "1", "best_of": 2}, 400, "best_of=2 is not supported"),
        ("completions", {"prompt": "1", "nonsense": 2}, 400, "'nonsense': this server has no such"),
        ("completions", [1], 400, "the body is list: must be a JSON object"),
        ("completions", b"{", 400, "the body is no JSON"),
        ("completions", b'{"prompt": "1", "prompt": "2"}', 400, "the key 'prompt' stands twice"),
        ("completions", b"[" * 4000, 400, "the body is no JSON"),
        ("completions", b"x" * 5000, 413, "the body is larger than 4096 bytes, the most here"),
        (
            "chat/completions",
            {"messages": USER, "frequency_penalty": 0.5},
            400,
            "frequency_penalty=0.5 is not supported: must be 0",
        ),
        (
            "chat/completions",
            {"messages": USER, "chat_template_kwargs": {"other": 1}},
            400,
            "the chat template of tiny has no argument 'other'",  # not the folder of this machine
        ),
        ("chat/completions", {"messages": ["hi"]}, 400, "messages.0='hi': "),
        ("chat/completions", {"messages": [{"content": "1"}]}, 400, "messages[0]={'content': '1'}"),
        ("completions", {"prompt": "1", "\ud800": 1}, 400, "this server has no such field"),
        ("completions", {"prompt": "1", "stop": "x" * 300}, 400, "stop"),
        ("nothing", {}, 404, "Not Found"),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_a_bad_request_is_answered_in_one_line(
    address: str, path: str, body: Any, code: int, said: str
) -> None:
    found, reply = post(address, path, body)
    assert (found, set(reply), set(reply["error"])) == (
        code,
        {"error"},
        {"message", "type", "param", "code"},
    )
    message = reply["error"]["message"]
    assert said in message
    assert "\n" not in message
    assert len(message) < 300


def test_the_chat_template_gets_the_arguments_of_a_request(address: str) -> None:
    greedy = {"max_tokens": 9, "temperature": 0}
    asked = {"messages": USER, "chat_template_kwargs": {"mode": "3*"}}
    (chat,) = post(address, "chat/completions", asked | greedy)[1]["choices"]
    (text,) = post(address, "completions", {"prompt": "3*u:12;a:"} | greedy)[1]["choices"]
    assert chat["message"]["content"] == text["text"]


def test_models_and_health(address: str) -> None:
    (card,) = get(address, "/v1/models")[1]["data"]
    assert card["id"] == "tiny"
    assert get(address, "/v1/models/tiny") == (200, card)
    code, reply = get(address, "/v1/models/a/b")
    assert (code, "this server has 'tiny'" in reply["error"]["message"]) == (404, True)
    assert get(address, "/health") == (200, {"status": "ok", "open_responses": 0})


# ---- one batch, and clients that leave


def test_a_short_request_does_not_wait_for_a_long_one(address: str) -> None:
    """It joins the batch although it samples otherwise, and ends first."""
    events = stream(address, "completions", prompt="12+7=", max_tokens=500, n=4, seed=1)
    next(events)
    body = {"prompt": "3*4=", "max_tokens": 4, "temperature": 0.3}
    assert post(address, "completions", body)[0] == 200
    assert get(address, "/health")[1]["open_responses"] > 0
    events.close()
    wait_until_idle(address)


def leave(address: str, *, streams: bool) -> None:
    """Ask for 500 tokens, wait for the first, and close the connection."""
    host, port = address.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=LIMIT_S)
    body = {"prompt": "1", "max_tokens": 500, "stream": streams, "seed": 1, "n": 1}
    connection.request("POST", "/v1/completions", json.dumps(body))
    if streams:
        connection.getresponse().readline()
    else:
        time.sleep(0.05)
    connection.close()


def test_200_clients_that_leave_in_the_middle_leave_nothing_behind(
    address: str, engine: Engine
) -> None:
    before = post(address, "completions", {"prompt": "12", "max_tokens": 9, "seed": 3})
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda i: leave(address, streams=i % 2 == 0), range(200)))
    wait_until_idle(address)
    batch, cache = engine.batch, engine._engine._cache
    while any(thread.name == "decode" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert not batch._jobs
    assert not batch._new
    assert not batch._stopped
    assert not batch._news
    assert cache is not None
    assert cache.num_free == cache.num_pages
    after = post(address, "completions", {"prompt": "12", "max_tokens": 9, "seed": 3})
    assert after[1]["choices"] == before[1]["choices"]


# ---- openai's own client


def test_the_client_of_openai(address: str, engine: Engine) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    (expected,) = engine.generate(USER, max_new_tokens=12, seed=4)
    settings = {"model": "tiny", "messages": USER, "max_tokens": 12, "seed": 4}
    reply = client.chat.completions.create(
        **settings, frequency_penalty=0, stop=None, n=1, logprobs=True
    )
    assert reply.choices[0].message.content == expected.text
    assert len(reply.choices[0].logprobs.content) == reply.usage.completion_tokens
    pieces = list(
        client.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
    )
    assert pieces[-1].usage == reply.usage
    text = "".join(piece.choices[0].delta.content for piece in pieces[:-1])
    assert text == expected.text
    completion = client.completions.create(model="tiny", prompt="1", n=2, max_tokens=5, echo=True)
    assert [choice.text[0] for choice in completion.choices] == ["1", "1"]
    with pytest.raises(openai.BadRequestError, match=r"tools: .* has no argument"):
        client.chat.completions.create(**settings, tools=[{"type": "function"}])
