"""Calls of tools in the texts of turns, in the forms of five model families."""

from __future__ import annotations

import pytest

from tlt_megatron.rewards.environment import ToolCall
from tlt_megatron.rewards.tool_calls import find_form, read_calls

TYPES = {"text": {"type": "string"}, "count": {"type": "integer"}, "list": {"type": "array"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": TYPES}}}]
F, NUMBERS = ToolCall("f", {"count": 3}), {"text": "7", "count": 3, "list": [1, 2]}


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("tags", "no call", []),
        ("tags", '<tool_call>\n{"name": "f", "arguments": {"count": 3}}\n</tool_call>', [F]),
        ("tags", 'x<tool_call>{"name": "f", "parameters": {"count": 3}}</tool_call>', [F]),
        ("tags", '<tool_call>{"name": "f", "arguments": "{\\"count\\": 3}"}</tool_call>', [F]),
        ("tags", '<tool_call>{"name": "f"}</tool_call>' * 2, [ToolCall("f")] * 2),
        ("tags", '<tool_call>{"name": "f", "arguments": ""}</tool_call><tool_call>{"name": "f", "arguments": null}</tool_call>', [ToolCall("f")] * 2),
        ("tags", '<think><tool_call>{"name": "g"}</tool_call></think>\n<tool_call>{"name": "f"}</tool_call>', [ToolCall("f")]),
        ("tags", 'I could <tool_call>{"name": "g"}</tool_call> or\n</think>\n<tool_call>{"name": "f"}</tool_call>', [ToolCall("f")]),
        ("tags", '<think>I could <tool_call>{"name": "g"}</tool_call>', []),
        ("tags", "<tool_call>\n<function=f>\n<parameter=text>\n7\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
         "<parameter=list>\n[1, 2]\n</parameter>\n</function>\n</tool_call>", [ToolCall("f", NUMBERS)]),
        ("tags", "<tool_call>\n<function=f>\n</function>\n</tool_call>", [ToolCall("f")]),
        ("tags", "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>7</arg_value>\n<arg_key>count</arg_key>\n<arg_value>3</arg_value>"
         "<arg_key>list</arg_key><arg_value>[1, 2]</arg_value>\n</tool_call>", [ToolCall("f", NUMBERS)]),
        ("tags", "<tool_call>f</tool_call>", [ToolCall("f")]),
        ("tags", "<tool_call>f<arg_key>count</arg_key><arg_value>3</arg_value></tool_call>", [F]),
        ("llama", "no call", []),
        ("llama", 'text {"name": "f", "parameters": {}}', []),
        ("llama", '{"score": 1}', []),
        ("llama", '{"name": "f", "parameters": {"count": 3}}', [F]),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {"count": 3}}<|eom_id|>'.removesuffix("<|eom_id|>"), [F]),
        ("llama", '{"type": "function", "name": "f", "parameters": {"count": 3}}; {"name": "f", "parameters": {}}', [F, ToolCall("f")]),
        ("mistral", "no call", []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"count": 3}, "id": "abc123def"}]', [ToolCall("f", {"count": 3}, "abc123def")]),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', [ToolCall("f"), ToolCall("g")]),
        ("mistral", 'Let me see.[TOOL_CALLS]f[ARGS]{"count": 3}[TOOL_CALLS]g[CALL_ID]a1[ARGS]{}', [F, ToolCall("g", {}, "a1")]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"count": 3}g[ARGS]{}', [F, ToolCall("g")]),
        ("mistral", "[THINK][TOOL_CALLS]g[ARGS]{}[/THINK]yes", []),
    ],
)  # fmt: skip
def test_calls_are_read(form: str, text: str, calls: list[ToolCall]) -> None:
    assert list(read_calls(text, form, TOOLS)) == calls


OR_NONE = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize("is_bare", [False, True])
@pytest.mark.parametrize(
    "written",
    ["<function=f><parameter=x>\n{}\n</parameter></function>", "f<arg_key>x</arg_key><arg_value>{}</arg_value>"],
    ids=["coder", "glm"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "7", "7"),
        ({"type": "string"}, "True", "True"),
        ({"type": "string"}, '"a"', '"a"'),
        ({"type": "string", "nullable": True}, "7", "7"),
        ({"type": "string", "nullable": True}, "null", None),
        (OR_NONE, "7", "7"),
        (OR_NONE, "None", None),
        ({"type": ["integer", "string"]}, "7", 7),
        ({"type": ["string", "null"]}, "[1]", "[1]"),
        ({"enum": ["7", "8"]}, "7", "7"),
        ({"type": "boolean"}, "False", False),
        ({"type": "number"}, "7", 7),
        ({"type": "integer"}, "", ""),
        ({"type": "integer"}, "seven", "seven"),
        ({}, "7", 7),
        (True, "7", 7),
        ({"anyOf": 3, "enum": 3, "type": [[]]}, "7", 7),
    ],
)
def test_arguments_without_quotes_have_the_types_of_the_schema(
    schema: object, text: str, value: object, written: str, is_bare: bool
) -> None:
    function = {"name": "f", "parameters": {"properties": {"x": schema}}}
    tools = [{}, {"function": 3}, function if is_bare else {"function": function}]
    (call,) = read_calls(f"<tool_call>{written.format(text)}</tool_call>", "tags", tools)
    assert call == ToolCall("f", {"x": value})
    assert type(call.arguments["x"]) is type(value)


@pytest.mark.parametrize(
    ("form", "text", "why"),
    [
        ("tags", "<tool_call>{", "</tool_call> is missing"),
        ("tags", "<tool_call>{'name': 1}</tool_call>", "must be JSON"),
        ("tags", '<tool_call>{"name": "f"} and more</tool_call>', "must be one JSON object"),
        ("tags", '<tool_call>{"name": 3}</tool_call>', 'must be an object with a text "name"'),
        (
            "tags",
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            '"arguments" must be an',
        ),
        ("tags", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "must be JSON"),
        ("tags", r'<tool_call>{"name": "\ud800"}</tool_call>', "surrogates not allowed"),
        ("llama", r'{"name": "f", "parameters": {"a": ["\ud800"]}}', "surrogates not allowed"),
        ("tags", "<tool_call>" + '{"name": ' + "[" * 100000 + "</tool_call>", "must be JSON"),
        (
            "tags",
            '<tool_call>{"name": "f", "arguments": ' + "9" * 9999 + "}</tool_call>",
            "must be",
        ),
        (
            "tags",
            '<tool_call>{"name": "f", "arguments": {"a": '
            + "[" * 500
            + "]" * 500
            + "}}</tool_call>",
            "within each other",
        ),
        ("tags", "<tool_call></tool_call>", "neither JSON nor a name"),
        ("tags", "<tool_call>f and words</tool_call>", "neither JSON nor a name"),
        ("llama", '<|python_tag|>print("a")', "must be JSON"),
        ("llama", '{"name": "f", "parameters": {', "must be JSON"),
        ("llama", '{"name": "f", "parameters": 3}', '"parameters" must be an object'),
        ("mistral", "[TOOL_CALLS] [{", "must be JSON"),
        ("mistral", '[TOOL_CALLS] {"name": "f"}', "must be a JSON list"),
        ("mistral", "[TOOL_CALLS]f[ARGS]3", '"arguments" must be an object'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{", "must be JSON"),
        ("mistral", "[TOOL_CALLS] [3]", "must be an object"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(form: str, text: str, why: str) -> None:
    (call,) = read_calls(text, form, TOOLS)
    assert why in call.error
    assert not call.arguments
    assert len(call.error) < 300


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("return a json object within <tool_call></tool_call> XML tags", "tags"),
        ("{{- '[TOOL_CALLS]' }}", "mistral"),
        ("<|start_header_id|>ipython<|end_header_id|> '\"parameters\": '", "llama"),
        ("<|im_start|>", ""),
    ],
)
def test_the_form_is_in_the_template(template: str, form: str) -> None:
    assert find_form(template) == form


@pytest.mark.parametrize("end", ["", "</function></tool_call>"])
@pytest.mark.parametrize("head", ["", "<tool_call>f ", "<tool_call><function=f>", "[TOOL_CALLS]"])
@pytest.mark.parametrize("form", ["tags", "llama", "mistral"])
def test_a_policy_that_repeats_itself_costs_no_time(form: str, head: str, end: str) -> None:
    """Seconds for each of these texts would hold all rollouts of a rank."""
    units = ("<arg_key>", "<arg_key>a</arg_key> ", "<parameter=a>", "<tool_call>", "<think>", " ")
    for unit in (*units, "</think>", "[TOOL_CALLS]", '{"name": ', '[{"name": "f"}'):
        text = head + unit * (200_000 // len(unit)) + end
        assert len(read_calls(text, form, TOOLS)) < len(text)
