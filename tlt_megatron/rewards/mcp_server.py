"""An MCP server as a source of tools: its process, and one session of this worker. For `tool_set`.

The official package `mcp` is imported here alone (`pip install tlt_megatron[mcp]`).
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from tlt_megatron.config.extensions import MCP
from tlt_megatron.rewards.tool_calls import ToolFailed
from tlt_megatron.runtime.environment_variables import with_defaults


class McpServer:
    """Starts the command of an entry `mcp:COMMAND`. ValueError if that gives no tools."""

    def __init__(self, entry: str, timeout_s: float) -> None:
        try:
            import anyio.from_thread
            from mcp import ClientSession, StdioServerParameters
            from mcp.client.stdio import stdio_client
        except ImportError as error:
            raise ValueError(
                f"rollout.tools={entry!r}: needs the package mcp: pip install 'tlt_megatron[mcp]' ({error})"
            ) from error
        self._entry = entry
        self._stack = ExitStack()  # never closed: the server ends with the worker
        self._portal = self._stack.enter_context(anyio.from_thread.start_blocking_portal())
        open_ = self._portal.wrap_async_context_manager
        try:
            command, *arguments = shlex.split(entry.removeprefix(MCP)) or [""]
            own = with_defaults({})  # else the package passes on a few variables alone
            server = StdioServerParameters(command=command, args=arguments, env=own)
            streams = self._stack.enter_context(open_(stdio_client(server)))
            self._session = self._stack.enter_context(open_(ClientSession(*streams)))
            self._wait(self._session.initialize, timeout_s)
            tools = self._wait(self._list_tools, timeout_s)
        except Exception as error:  # of a program of the user and of the package
            raise ValueError(
                f"rollout.tools={entry!r}: the server does not start: {error!r}"
            ) from error
        if not tools:
            raise ValueError(f"rollout.tools={entry!r}: the server has no tools")
        self.functions = [
            {"name": t.name, "description": t.description or "", "parameters": t.input_schema}
            for t in tools
        ]

    def caller(self, name: str) -> Callable[[Mapping[str, Any], float], object]:
        """Return the function that calls a tool."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        def run(arguments: Mapping[str, Any], deadline: float) -> object:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ToolFailed("Error: no time is left for further calls of this turn")
            try:
                result = self._wait(lambda: self._session.call_tool(name, dict(arguments)), left)
            except TimeoutError as error:
                raise ToolFailed(f"Error: {name}: it took too long") from error
            except MCPError as error:
                if error.code != CONNECTION_CLOSED:
                    raise
                sys.stderr.write(f"{name}: the server has ended: {self._entry}\n")
                os._exit(1)  # another worker, with a server of its own, repeats the conversations
            text = "\n".join(map(_text_of, result.content))
            if result.is_error:
                raise ToolFailed(text)
            return text

        return run

    async def _list_tools(self) -> list[Any]:
        """Return the tools of all pages."""
        from mcp_types import PaginatedRequestParams

        page = await self._session.list_tools()
        tools = [*page.tools]
        while page.next_cursor:
            params = PaginatedRequestParams(cursor=page.next_cursor)
            page = await self._session.list_tools(params=params)
            tools += page.tools
        return tools

    def _wait(self, function: Callable[[], Any], timeout_s: float) -> Any:
        import anyio

        async def limited() -> Any:
            with anyio.fail_after(timeout_s):
                return await function()

        return self._portal.call(limited)


def _text_of(part: Any) -> str:
    """Return the text of a part of a result, or the name of its kind, such as [image]."""
    found = getattr(getattr(part, "resource", part), "text", None)
    return f"[{part.type}]" if found is None else found
