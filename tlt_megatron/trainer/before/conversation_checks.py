"""Checks of chat template, tokenizer and prompts before a run with conversations, for
`trainer/build.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tlt_megatron.data.tokenizer import Tokenizer
from tlt_megatron.rewards.tool_calls import find_form, function_of, name_of, properties_of
from tlt_megatron.rollout.open_conversation import with_tools
from tlt_megatron.types import Message, Prompt

_RESULT = "(result)"
_ADVICE = (
    "use a model that is made for tools, such as Qwen 2.5, Qwen 3, Llama 3.1, Mistral or GLM 4.5"
)


def check_conversations(
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    tools: Sequence[Mapping[str, Any]],
    *,
    setting: str,
    is_complete: bool,
) -> list[str]:
    """Refuse a tokenizer with which no conversation goes on after the first turn, and prompts that
    cannot have `tools`, which come from `setting`. Return warnings. `is_complete`: a prompt has no
    tools but these, and their calls must be read.
    """
    if not tokenizer.stop_token_ids:
        raise ValueError(
            f"{setting}: the model folder names no eos token, which must end each turn"
        )
    arguments: dict[str, Mapping[str, Any]] = {}  # that differ; tools count as one
    names = {name_of(tool) for tool in tools}
    for prompt in prompts:
        where = f"prompt_id={prompt.prompt_id!r}"
        if "messages" in prompt.extra_info:
            raise ValueError(
                f"{where}: extra_info.messages must not be there where rollout.environment or rollout.tools is"
                " set: the reward function gets the conversation under this name"
            )
        if not prompt.messages:
            if tools:
                raise ValueError(
                    f"{where}: must be a list of messages, because {setting} has tools, which only a chat template writes"
                )
            continue
        kwargs: Mapping[str, Any] = prompt.template_kwargs
        if not is_complete:
            kwargs = with_tools(kwargs, tools)
        unknown = {name_of(tool) for tool in kwargs.get("tools") or ()} - names
        if is_complete and unknown:
            raise ValueError(
                f"{where}: its tools {', '.join(sorted(unknown))} must be in rollout.tools, which runs the calls"
            )
        named = {key: key if isinstance(value, list) else value for key, value in kwargs.items()}
        arguments.setdefault(repr(named), kwargs)
    for kwargs in arguments.values():
        tokenizer.check_turns(kwargs)
        check_tools(tokenizer, kwargs, setting, needs_calls=is_complete)
    has_tools = any(kwargs.get("tools") for kwargs in arguments.values())
    if not has_tools or form_of(tokenizer):
        return []
    return [f"{setting}: {_unknown_form(tokenizer)}: `turn.tool_calls` is empty"]


def check_tools(
    tokenizer: Tokenizer,
    template_kwargs: Mapping[str, Any],
    setting: str,
    *,
    needs_calls: bool = True,
) -> None:
    """Raise ValueError of one line if the chat template does not write a tool of `template_kwargs`,
    an argument or a result, as some do without an error. With `needs_calls` also if its form of
    calls is not known.
    """
    tools = template_kwargs.get("tools")
    if not tools:
        return
    template = f"the chat template of {tokenizer.path}"
    begin: list[Message] = [{"role": "user", "content": "x"}]
    without = {key: value for key, value in template_kwargs.items() if key != "tools"}
    try:
        plain = tokenizer.render(begin, without)
        written = tokenizer.render(begin, template_kwargs)
        result = {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": _RESULT}
        turn = {"role": "assistant", "content": "y"}
        whole = tokenizer.render([*begin, turn, result], template_kwargs)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}: {_ADVICE}") from error
    for tool in tools:
        if not name_of(tool) or not _has_parameters(tool):
            raise ValueError(
                f"{setting}: {tool!r:.80} must be OpenAI's schema of a tool with a name, and with parameters as a JSON"
                " schema of an object"
            )
        names = [name_of(tool), *map(str, properties_of(tool))]
        missing = [each for each in names if written.count(each) <= plain.count(each)]
        if missing:
            raise ValueError(
                f"{setting}: {template} leaves out {missing[0]!r} of the tool {name_of(tool)!r}: {_ADVICE}"
            )
    if _RESULT not in whole:
        raise ValueError(f"{setting}: {template} leaves out messages of the role tool: {_ADVICE}")
    if needs_calls and not form_of(tokenizer):
        raise ValueError(f"{setting}: {_unknown_form(tokenizer)}: {_ADVICE}")


def form_of(tokenizer: Tokenizer) -> str:
    """Return the form in which the chat template for tools has their calls; "": it is not known."""
    if not tokenizer.has_chat_template:
        return ""
    return find_form(str(tokenizer.hf.get_chat_template(tools=[{}])))


def _unknown_form(tokenizer: Tokenizer) -> str:
    known = "those of Hermes, Qwen, GLM, Llama 3.1 and Mistral are"
    return f"the chat template of {tokenizer.path} has calls in a form that is not known ({known})"


def _has_parameters(tool: Mapping[str, Any]) -> bool:
    """Return whether the parameters, if there are some, have the form of a JSON schema."""
    found = function_of(tool).get("parameters") or {}
    return isinstance(found, Mapping) and isinstance(found.get("properties") or {}, Mapping)
