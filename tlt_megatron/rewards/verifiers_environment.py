"""Environments of verifiers 0.4 for `rollout.environment`: `pip install tlt_megatron[verifiers]`.

    # glossary_env.py
    Glossary = from_verifiers({"taskset": {"id": "glossary"}}, {"name": "qwen3"})
    if __name__ == "__main__":
        write_rows(Glossary, "glossary.jsonl")  # for data.train

An episode runs in the reward worker with verifiers' own harness, client and renderer. The client
posts each turn to a server on the loopback, which is in the worker too. See `verifiers_episode.py`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import secrets
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt_megatron.rewards.environment import Environment, Step, Turn
from tlt_megatron.rewards.verifiers_episode import Episode

try:
    vf: Any = importlib.import_module("verifiers.v1")
except ModuleNotFoundError as missing:
    raise ValueError(
        f"needs verifiers 0.4: pip install 'tlt_megatron[verifiers]' ({missing})"
    ) from None
_loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
_web: Any = importlib.import_module("aiohttp.web")

_HARNESS = "tlt_in_process"  # verifiers finds a harness by the name of a module without dots
_MAX_BYTES = 1 << 28  # of a request
_FILES = ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json")
_NO_KEY = "TLT_MEGATRON_NO_KEY"  # a variable that is not set: the server is ours


def from_verifiers(
    env: Mapping[str, Any], renderer: Mapping[str, Any], num_tasks: int | None = None
) -> type[Environment]:
    """Return the class for `rollout.environment`.

    `env` is the table `[env]` of verifiers, and `renderer` is that of its client, which must be the
    model family's: {"name": "qwen3"}. `num_tasks` bounds a taskset without end.
    """
    host = _Host(env, renderer, num_tasks)

    class Verifiers(Environment):
        tasks = host.tasks

        async def start(self, row: Mapping[str, Any], seed: int) -> Step:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
            self.episode = await host.open(row)
            first = await self._or_cancel(self.episode.next_prompt())
            return Step(token_ids=first.token_ids)

        async def step(self, turn: Turn) -> Step:  # pyright: ignore[reportIncompatibleMethodOverride]
            return await self._or_cancel(self.episode.next_prompt(turn))

        async def end(self) -> Mapping[str, float]:  # pyright: ignore[reportIncompatibleMethodOverride]
            return await self._or_cancel(self.episode.end())

        async def _or_cancel(self, call: Any) -> Any:
            try:
                return await call
            except BaseException:  # also a timeout: no one asks this episode again
                self.episode.cancel()
                raise

    return Verifiers


def write_rows(environment: Any, path: str | Path) -> None:
    """Write a row for each task of a class of `from_verifiers`."""
    with Path(path).open("w", encoding="utf-8") as file:
        for index, task in enumerate(environment.tasks):
            prompt, system = task.data.prompt, task.data.system_prompt
            messages = [{"role": "user", "content": prompt}]
            if not isinstance(prompt, str):
                messages = [each.model_dump(exclude_none=True) for each in prompt or ()]
            if system:
                messages.insert(0, {"role": "system", "content": system})
            about = {"task": index, "task_key": task.key}
            row = {"id": str(index), "prompt": messages, "label": task.key, "metadata": about}
            file.write(json.dumps(row) + "\n")


class _Host:
    """The environment of a worker with its tool servers, and the server for its client."""

    def __init__(
        self, env: Mapping[str, Any], renderer: Mapping[str, Any], num_tasks: int | None
    ) -> None:
        self._env = _loaders.load_environment(_loaders.resolve_env_config(_with_defaults(env)))
        tasks = self._env.taskset if num_tasks is None else self._env.taskset.take(num_tasks)
        if not tasks.bounded:
            raise ValueError(f"{type(tasks).__name__} has tasks without end: give num_tasks")
        self.tasks = list(tasks)
        self._renderer = dict(renderer)
        self._episodes: dict[str, Episode] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="tokenizer-")
        self._serving: asyncio.Task[None] | None = None
        self._url: asyncio.Future[str]

    async def open(self, row: Mapping[str, Any]) -> Episode:
        """Begin the episode of a row. ValueError if it is not one of `write_rows`."""
        about, policy = row["extra_info"], row["policy"]
        index = about.get("task")
        known = isinstance(index, int) and 0 <= index < len(self.tasks)
        if not known or self.tasks[index].key != about.get("task_key"):
            raise ValueError(f"task={index!r}: not a row of this taskset: write them again")
        if self._serving is None:
            self._url = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._url))
        url = await asyncio.shield(self._url)
        name, episode = secrets.token_hex(16), Episode(policy)  # for no other user
        client = vf.TrainClientConfig(
            base_url=url,
            api_key_var=_NO_KEY,
            renderer=self._renderer,
            renderer_model_name=self._tokenizer(policy["tokenizer"]),
        )
        drawn = {key: policy[key] for key in ("temperature", "top_p", "top_k")}
        context = vf.ModelContext(model=name, client=client, sampling=vf.SamplingConfig(**drawn))
        run = self._env.run_episode(
            self.tasks[index],
            context,
            on_trace=lambda trace: episode.traces.update({trace.id: trace}),
        )
        self._episodes[name] = episode
        episode.begin(run, lambda: self._episodes.pop(name))
        return episode

    def _tokenizer(self, folder: str) -> str:
        """Return a folder with the policy's tokenizer.json alone, as the trainer uses it: the class
        of the model that config.json names may have rules of its own.
        """
        source, target = Path(folder).resolve(), Path(self._folder.name)
        config = source / "tokenizer_config.json"
        if not (source / _FILES[0]).is_file() or not config.is_file():
            return folder
        if not (target / config.name).exists():
            given = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
            for name in _FILES:
                if (source / name).is_file():
                    (target / name).symlink_to(source / name)
            (target / config.name).write_text(json.dumps(given))
        return str(target)

    async def _serve(self, ready: asyncio.Future[str]) -> None:
        """Have the tool servers and the server for the client until the worker ends. `ready` gets
        its address, or the error.
        """
        application = _web.Application(client_max_size=_MAX_BYTES)
        application.router.add_post("/inference/v1/generate", self._answer)
        runner = _web.AppRunner(application, access_log=None)
        try:
            async with self._env.serving():
                await runner.setup()
                await _web.TCPSite(runner, "127.0.0.1", 0).start()
                ready.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
                await asyncio.Event().wait()
        except Exception as error:  # of a tool server of the user: each conversation gets it
            if ready.done():
                raise
            ready.set_exception(ValueError(f"verifiers: its servers do not start: {error!r}"))
        finally:
            await runner.cleanup()

    async def _answer(self, request: Any) -> Any:
        body = await request.json()
        episode = self._episodes.get(body["model"])
        status, response = 400, {"error": {"message": f"model={body['model']!r} is not the policy"}}
        if episode is not None:
            status, response = await episode.serve(body, request.headers["X-Session-ID"])
        return _web.json_response(response, status=status)


def _with_defaults(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table, with a harness and tools on this machine where it names no others."""
    taskset, agent = env["taskset"]["id"], dict(env.get("agent", {}))
    if "agent" not in _loaders.env_config_type(taskset, env.get("id", "")).model_fields:
        return dict(env)
    agent.setdefault("runtime", {"type": "subprocess"})
    if "harness" not in agent and _loaders.default_harness_id(taskset) == "bash":
        own = importlib.import_module("tlt_megatron.rewards.verifiers_harness")
        sys.modules.setdefault(_HARNESS, own)
        agent["harness"] = {"id": _HARNESS}
    return {**env, "agent": agent}
