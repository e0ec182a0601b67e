"""Measures `tlt serve`: many clients at once against one request with as many samples.

    python -m tools.bench clients --model build/quickstart_policy

Every round asks for the same greedy responses in both ways, so the work is equal, and in rotating
order. Seconds are those of the clients' wall clock, because server and clients are processes of
their own.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tools.bench.measure import spread, wall_seconds
from tools.bench.step import turned
from tools.print_tables import print_table

_READY = "running on"


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add("--model", default="build/quickstart_policy")
    add("--prompt", default="12+7=")
    add("--clients", type=int, default=20)
    add("--max-tokens", type=int, default=200)
    add("--rounds", type=int, default=5)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Serve the model, ask in both ways and print the table. Return the values of the JSON."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", options.model, "--port", str(port), "--max-batch-size", str(options.clients)]
    command = [sys.executable, "-m", "tlt_megatron.cli", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        if not any(_READY in line for line in server.stderr):
            raise RuntimeError(f"{' '.join(command)} has ended")
        ways = _ways(f"http://127.0.0.1:{port}/v1/completions", options)
        found: dict[str, list[float]] = {name: [] for name in ways}
        for ask in ways.values():
            ask()  # warms up
        for number in range(options.rounds):
            for name in turned(list(ways), number):
                found[name].append(wall_seconds(ways[name]))
        server.send_signal(signal.SIGINT)
        server.stderr.read()
    one, *others = found
    ratios = {
        name: spread([a / b for a, b in zip(found[name], found[one], strict=True)])
        for name in others
    }
    rows = [
        [name, f"{spread(found[name])['median']:.2f}", *(f"{v:.2f}" for v in ratios[name].values())]
        for name in others
    ]
    title = f"{one}: {spread(found[one])['median']:.2f} s"
    print_table(title, ("requests", "s", "ratio, median", "min", "max"), rows)
    return {"seconds": found, "ratios": ratios}


def _ways(address: str, options: argparse.Namespace) -> dict[str, Callable[[], object]]:
    number = options.clients

    def ask(samples: int) -> None:
        body = {"prompt": options.prompt, "n": samples, "temperature": 0}
        body["max_tokens"] = options.max_tokens
        request = urllib.request.Request(address, json.dumps(body).encode())
        with urllib.request.urlopen(request) as reply:
            reply.read()

    def at_once() -> None:
        with ThreadPoolExecutor(number) as pool:
            list(pool.map(ask, [1] * number))

    def in_turn() -> None:
        for _ in range(number):
            ask(1)

    return {
        f"one request with n={number}": lambda: ask(number),
        f"{number} clients at once": at_once,
        f"{number} requests in turn": in_turn,
    }
