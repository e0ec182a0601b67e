"""Tools of clients of `tlt serve`. The model's tokens are whole calls and halves of calls."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.served_model import make_chat_model, post, serving, stream
from tlt_megatron import Engine

USER = [{"role": "user", "content": "12"}]

LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"properties": {"place": {"type": "string"}}}},
}
CALL = '<tool_call>{"name": "look", "arguments": {"place": "f"}}</tool_call>'
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}<tool_call>{% endfor %}{% for m in messages %}{{ m.role[0] }}:{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.place }}{% endfor %};{% endfor %}a:"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def caller(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Engine]]:
    """A server whose model writes a call, or half of one, as one token."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("caller") / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([f"1{CALL}2", f"3{CALL}4{CALL}", CALL[:20]])
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.save_pretrained(folder)
    engine = Engine(folder, dtype="float64", max_batch_size=8, max_tokens=512)
    with serving(engine) as address:
        yield address, engine


def test_tools_reach_the_template_and_calls_come_back(caller: tuple[str, Engine]) -> None:
    address, engine = caller
    body = {"messages": USER, "tools": [LOOK], "max_tokens": 24, "n": 32, "seed": 3}
    told = engine.encode([USER], tools=[LOOK])[0]
    assert "look" in engine.tokenizer.decode(told)
    texts = [one.text for one in engine.generate([told], max_new_tokens=24, num_samples=32, seed=3)]
    choices = post(address, "chat/completions", body)[1]["choices"]
    kinds = set()
    for text, choice in zip(texts, choices, strict=True):
        message = choice["message"]
        assert message.pop("role") == "assistant"
        half = text.count("<tool_call>") != text.count("</tool_call>")
        count = 0 if half else text.count("<tool_call>")
        kinds.add((half, count))
        if not count:
            assert message == {"content": text}
            continue
        assert message["content"] == (text.partition("<tool_call>")[0] or None)
        assert choice["finish_reason"] in ("tool_calls", "length")
        assert len({call["id"] for call in message["tool_calls"]}) == count
        for call in message["tool_calls"]:
            assert call["function"] == {"name": "look", "arguments": '{"place": "f"}'}
    assert kinds >= {(False, 0), (False, 1), (False, 2), (True, 0)}
    deltas: dict[int, list[Any]] = {}
    for event in stream(address, "chat/completions", **body):
        deltas.setdefault(event["choices"][0]["index"], []).append(event["choices"][0]["delta"])
    for choice in choices:
        (delta,) = deltas[choice["index"]]
        for calls in (delta, choice["message"]):
            for call in calls.get("tool_calls", ()):
                del call["id"]  # differs between requests
        assert delta == {"role": "assistant", **choice["message"]}
    plain = post(address, "chat/completions", body | {"tool_choice": "none"})[1]
    assert not any("tool_calls" in choice["message"] for choice in plain["choices"])
    assert plain["usage"]["prompt_tokens"] == len(engine.encode([USER])[0]) < len(told)


def test_calls_and_results_of_clients_reach_the_template(caller: tuple[str, Engine]) -> None:
    address, engine = caller
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "look", "arguments": '{"place": "f"}'},
    }
    result = {"role": "tool", "tool_call_id": "a", "content": "<3"}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    reply = post(address, "chat/completions", {"messages": messages, "max_tokens": 1})[1]
    assert reply["usage"]["prompt_tokens"] == len(engine.encode([messages])[0])
    assert (
        engine.tokenizer.decode(engine.encode([messages])[0]) == ":12;a:lookf;t:<3;a:"
    )  # it has no u
    call["function"]["arguments"] = "{"
    code, reply = post(address, "chat/completions", {"messages": messages})
    assert (code, reply["error"]["message"][:47]) == (
        400,
        "messages[1].tool_calls: arguments of a call='{'",
    )
    bad = {"messages": USER, "tools": [{"name": "look", "parameters": "place"}]}
    code, reply = post(address, "chat/completions", bad)
    assert (code, reply["error"]["message"][:33]) == (400, "tools: {'name': 'look', 'paramete")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tools": [LOOK]}, "tools: the chat template of "),  # of a template that drops them
        ({"tools": ["look"]}, "tools.0='look': Input should be a valid dictionary"),
        ({"tools": [LOOK], "tool_choice": "required"}, "tool_choice='required': Input should be 'auto' or 'none'"),
        ({"tools": [LOOK], "parallel_tool_calls": False}, "parallel_tool_calls=False is not supported with tools"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_offered_are_refused(model: Path, asked: dict, said: str) -> None:
    with serving(Engine(model, dtype="float64", max_tokens=64)) as address:
        code, reply = post(address, "chat/completions", {"messages": USER, **asked})
    assert code == 400
    assert reply["error"]["message"].startswith(said)
