"""A harness of verifiers that runs in the reward worker. It calls tools as verifiers' own harness
`null` does, which needs a process, `uv` and a package index for each conversation.

`verifiers_environment.py` gives it to environments that name no harness.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

vf: Any = importlib.import_module("verifiers.v1")
_chat: Any = importlib.import_module("verifiers.v1.dialects.chat")
_mcp: Any = importlib.import_module("verifiers.v1.harnesses.utils.mcp")
_results: Any = importlib.import_module("verifiers.v1.harnesses.utils.compaction")
_runtimes: Any = importlib.import_module("verifiers.v1.runtimes")
_openai: Any = importlib.import_module("openai")

__all__ = ["InProcess"]  # verifiers looks here


class InProcess(vf.Harness[vf.HarnessConfig]):
    """Asks the policy until it writes a turn without a call, and runs the calls."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, *given: Any) -> Any:
        """Run a conversation. An error of the model's server ends it, and verifiers knows why."""
        _, _, endpoint, secret, mcp_urls, data = given
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += map(_chat.message_to_wire, prompt or ())
        client = _openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
        limit_s = self.config.tool_timeout
        servers = {name: {"url": url, "timeout": limit_s} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(client)
            found, places, clients = await _mcp.connect_mcp({"mcpServers": servers}, stack)
            tools = list(map(with_ordered_keys, found))
            calls: Any = True
            while calls:
                completion = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=tools or _openai.omit
                )
                turn = completion.choices[0].message
                messages.append(turn.model_dump(exclude_none=True))
                calls = turn.tool_calls
                for call in calls or ():
                    content = await _run(call.function, places, clients)
                    named = {"tool_call_id": call.id, "name": call.function.name}
                    result = {"role": "tool", **named, "content": content}
                    messages.append(_results.bound_tool_message(result))
        return _runtimes.ProgramResult(exit_code=0, stdout="", stderr="")


def with_ordered_keys(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with the keys of its parameters in one order: it depends on the version of
    MCP on which client and server agree, which a busy machine changes.
    """
    function = dict(tool["function"])
    function["parameters"] = dict(sorted(function["parameters"].items()))
    return {**tool, "function": function}


async def _run(call: Any, places: Mapping[str, Any], clients: Any) -> Any:
    """Return the result of a call, or a text on what is wrong with it."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except json.JSONDecodeError as error:
        return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    if not isinstance(arguments, dict):
        return "error: tool arguments must be a JSON object; resend as an object"
    if call.name not in places:
        return f"error: unknown tool {call.name!r}"
    return await _mcp.call_mcp(clients, places, call.name, arguments)
