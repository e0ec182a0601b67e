"""Serves a live page of one run or several, only on this machine (127.0.0.1).

    tlt watch runs/mine --port 8017
    tlt watch runs

The page is that of tools/commands/report.py, without what a run writes only at its end. It reloads
itself when files of the run have changed. Several runs are also shown side by side. A folder that
is no run stands for the runs below it. The run folder is only read. From another machine: `ssh -L
8017:127.0.0.1:8017 HOST`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tools.run_report.data import distinct_names, runs_below
from tools.run_report.live import LiveComparison, LiveRun
from tools.run_report.page import render_states

_HOST = "127.0.0.1"
_FRESH_S = 1.0  # age up to which a rendered page of the same files is sent again
_IDLE_S = 30.0  # for a client to send its request or take the answer


@dataclass(slots=True)
class _Content:
    """What was last sent for an address. Its lock lets one thread render for all."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    version: str = ""
    made_s: float = -math.inf  # on the clock of time.monotonic
    content: bytes = b""


class WatchServer(ThreadingHTTPServer):
    """Serves the pages of `runs` at /0/, /1/, ..., of several also one that compares them at /all/.

    The version of a page is at <address>version. Port 0: any free one.
    """

    request_queue_size = 1024  # a connection beyond it waits for seconds

    def __init__(self, runs: Sequence[LiveRun], port: int) -> None:
        super().__init__((_HOST, port), _Handler)
        self.pages: dict[str, LiveRun | LiveComparison] = {
            f"/{i}/": run for i, run in enumerate(runs)
        }
        if len(runs) > 1:
            self.pages = {"/all/": LiveComparison(runs), **self.pages}
        self.port: int = self.socket.getsockname()[1]
        words = ("", "version")
        self._known = {page + word: _Content() for page in self.pages for word in words}

    def answer(self, path: str) -> tuple[bytes, str] | None:
        """Return content and its type; None for a path that does not exist. Content of the same
        files is rendered once a second, for any number of clients.
        """
        known = self._known.get(path)
        if known is None:
            return None
        page = self.pages[path.removesuffix("version")]
        with known.lock:
            version = page.version()  # before rendering: a later change makes it render again
            if version != known.version or time.monotonic() - known.made_s > _FRESH_S:
                known.content, known.version = self._render(path, page).encode(), version
                known.made_s = time.monotonic()
        return known.content, "application/json" if path.endswith("version") else "text/html"

    def _render(self, path: str, page: LiveRun | LiveComparison) -> str:
        if path.endswith("version"):
            states = render_states(page.states())
            return json.dumps({"version": page.version(), "states": states})
        links = [(address, other.name) for address, other in self.pages.items()]
        return page.page(links if len(links) > 1 else [])


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    timeout = _IDLE_S

    def do_GET(self) -> None:
        if self.headers.get("Host", "").partition(":")[0] not in (_HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN, "only for 127.0.0.1 and localhost")
            return
        if self.path == "/":
            self.send_response(HTTPStatus.FOUND)
            self.send_header("Location", next(iter(self.server.pages)))
            self.end_headers()
            return
        answer = self.server.answer(self.path)
        if answer is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        content = answer[0]
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{answer[1]}; charset=utf-8")
        self.send_header("Content-Length", f"{len(content)}")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        with contextlib.suppress(ConnectionError, TimeoutError):  # the browser has left the page
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: a page asks every few seconds."""


def main(arguments: list[str] | None = None) -> None:
    """Serve until Ctrl-C. ValueError for a folder that is no run, and for a port in use."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="a run, or a folder of runs"
    )
    parser.add_argument("--port", type=int, default=8017, help="0: any free one; default 8017")
    options = parser.parse_args(arguments)
    run_dirs = [run for folder in options.run_dirs for run in runs_below(folder)]
    runs = [LiveRun(*each) for each in zip(run_dirs, distinct_names(run_dirs), strict=True)]
    try:
        server = WatchServer(runs, options.port)
    except (OSError, OverflowError) as error:
        rule = "must be a free port, 0 to 65535"
        raise ValueError(f"--port {options.port}: {rule}: {error}") from None
    with server, contextlib.suppress(KeyboardInterrupt):
        print(f"watch: http://{_HOST}:{server.port}/ (Ctrl-C ends it)", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    raise SystemExit("run it as: tlt watch")
