"""Serves a trained policy with its drafter behind the protocol of OpenAI.

    tlt serve runs/mine --port 8000
    tlt serve Qwen/Qwen3-0.6B --drafter drafter --engine sglang

The embedded engine is for trying a model, also on a CPU; it needs `pip install
"tlt_megatron[serve]"`. `--engine sglang` or `vllm` prints that server's full command and becomes
it. The drafter is first exported to its format, beside the original.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tlt_megatron.config.hub import fetch_model
from tlt_megatron.config.model_folder import check_model
from tlt_megatron.config.own_layer import OWN, check_own_layer
from tlt_megatron.runtime.typed_command import pip_command
from tools.commands.export_drafter import export_drafter, find_drafter, load_target, server_command
from tools.commands.saved_run import model_and_drafter

if TYPE_CHECKING:
    from fastapi import FastAPI
    from uvicorn import Config


def main() -> None:
    """Serve until Ctrl-C. ValueError for a model or drafter that cannot be used."""
    options = _parse()
    model, drafter = model_and_drafter(options.model)
    drafter = options.drafter or drafter
    if options.engine != "embedded":
        command = _other_server(options, model, drafter)
        print(shlex.join(command), flush=True)
        os.execvp(command[0], command)
    for name in ("fastapi", "uvicorn"):
        if find_spec(name) is None:
            raise ValueError(f"{name} is not installed: {pip_command('tlt_megatron[serve]')}")
    with _bind(options.host, options.port) as place:
        _serve(options, model, drafter, place)


def _serve(
    options: argparse.Namespace, model: str, drafter: str | None, place: socket.socket
) -> None:
    import uvicorn

    from tlt_megatron import Engine
    from tools.commands.openai_server import make_app

    engine = Engine(
        model,
        drafter=drafter,
        max_batch_size=options.max_batch_size,
        max_tokens=options.max_tokens,
    )
    name = Path(options.model).resolve().name if Path(options.model).exists() else options.model
    config = server_config(make_app(engine, name), options.host, options.port)
    try:
        place.listen(config.backlog)
    except OSError as error:  # another server has begun meanwhile
        raise ValueError(f"--host {options.host} --port {options.port}: {error}") from None
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{host}:{place.getsockname()[1]}"
    print(f"tlt serve: running on {address} (Ctrl-C ends it)", file=sys.stderr, flush=True)
    uvicorn.Server(config).run(sockets=[place])


def server_config(app: FastAPI, host: str, port: int) -> Config:
    """Return the configuration of a server whose connections are bounded."""
    import uvicorn

    from tools.commands.server_bounds import BoundedHttp, Guard

    return uvicorn.Config(
        Guard(app, host),
        host=host,
        port=port,
        http=BoundedHttp,
        ws="none",
        timeout_graceful_shutdown=5,
    )


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket for the server, before the model is loaded. ValueError if the place cannot be
    used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        place = socket.socket(family, kind, protocol)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host {host} --port {port}: {error}; must be free") from None
    return place


def _other_server(options: argparse.Namespace, model: str, drafter: str | None) -> list[str]:
    """Return the command of SGLang or vLLM. Its format of the drafter is written once."""
    exported, own = None, []
    if drafter == OWN:
        folder = fetch_model("model", model)
        check_own_layer(folder, check_model("model", folder), "--drafter")
        method = {"method": "mtp", "num_speculative_tokens": 1}
        own = ["--speculative-algorithm", "NEXTN", "--speculative-draft-model-path", model]
        own = ["--speculative-config", json.dumps(method)] if options.engine == "vllm" else own
    elif drafter is not None:
        exported = Path(f"{drafter}_{options.engine}")
        if not exported.is_dir():
            target = load_target(fetch_model("model", model), "model")
            export_drafter(find_drafter(Path(drafter)), exported, options.engine, target)
    command = server_command(options.engine, model, exported)
    return [*command, *own, "--host", options.host, "--port", str(options.port)]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("model", metavar="RUN_OR_MODEL", help="a run, a folder, or an id on the Hub")
    add("--drafter", metavar="FOLDER", help="default: the run's")
    add("--engine", default="embedded", choices=("embedded", "sglang", "vllm"))
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--max-tokens", type=int, default=2048, help="prompt and response, embedded")
    add("--max-batch-size", type=int, default=16, help="responses at once, embedded")
    options = parser.parse_args()
    if not 0 <= options.port <= 65535:
        raise ValueError(f"--port {options.port}: must be 0 to 65535 (0: any free one)")
    for name in ("max_tokens", "max_batch_size"):
        if getattr(options, name) < 1:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} {getattr(options, name)}: must be at least 1")
    return options


if __name__ == "__main__":
    raise SystemExit("run it as: tlt serve")
