"""Serves a trained policy with its drafter behind the protocol of OpenAI.

    tlt serve runs/mine --port 8000
    tlt serve Qwen/Qwen3-0.6B --drafter drafter --engine sglang

The embedded engine is for trying a model, also on a CPU; it needs `pip install
"tlt_megatron[serve]"`. `--engine sglang` or `vllm` prints that server's full command and becomes
it. The drafter is first exported to its format, beside the original.
"""

from __future__ import annotations

import argparse
import os
import shlex
from importlib.util import find_spec
from pathlib import Path

from tlt_megatron.config.hub import fetch_model
from tools.commands.export_drafter import export_drafter, find_drafter, load_target, server_command
from tools.commands.saved_run import model_and_drafter


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
            raise ValueError(f"{name} is not installed: pip install 'tlt_megatron[serve]'")
    import uvicorn

    from tlt_megatron import Engine
    from tools.commands.openai_server import make_app

    engine = Engine(model, drafter=drafter, max_tokens=options.max_tokens)
    uvicorn.run(make_app(engine, options.model), host=options.host, port=options.port)


def _other_server(options: argparse.Namespace, model: str, drafter: str | None) -> list[str]:
    """Return the command of SGLang or vLLM. Its format of the drafter is written once."""
    exported = None
    if drafter is not None:
        exported = Path(f"{drafter}_{options.engine}")
        if not exported.is_dir():
            target = load_target(fetch_model("model", model))
            export_drafter(find_drafter(Path(drafter)), exported, options.engine, target)
    command = server_command(options.engine, model, exported)
    return [*command, "--host", options.host, "--port", str(options.port)]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("model", metavar="RUN_OR_MODEL", help="a run, a folder, or an id on the Hub")
    add("--drafter", metavar="FOLDER", help="default: the run's")
    add("--engine", default="embedded", choices=("embedded", "sglang", "vllm"))
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--max-tokens", type=int, default=2048, help="prompt and response, embedded")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit("run it as: tlt serve")
