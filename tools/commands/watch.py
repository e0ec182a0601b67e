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
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tools.run_report.data import distinct_names, runs_below
from tools.run_report.live import LiveComparison, LiveRun
from tools.run_report.page import render_states

_HOST = "127.0.0.1"


class WatchServer(ThreadingHTTPServer):
    """Serves the pages of `runs` at /0/, /1/, ..., of several also one that compares them at /all/.

    The version of a page is at <address>version. Port 0: any free one.
    """

    def __init__(self, runs: Sequence[LiveRun], port: int) -> None:
        super().__init__((_HOST, port), _Handler)
        self.pages: dict[str, LiveRun | LiveComparison] = {
            f"/{i}/": run for i, run in enumerate(runs)
        }
        if len(runs) > 1:
            self.pages = {"/all/": LiveComparison(runs), **self.pages}
        self.port: int = self.socket.getsockname()[1]

    def answer(self, path: str) -> tuple[str, str] | None:
        """Return content and its type; None for a path that does not exist."""
        page = self.pages.get(path.removesuffix("version"))
        if page is None:
            return None
        if path.endswith("version"):
            states = render_states(page.states())
            return json.dumps({"version": page.version(), "states": states}), "application/json"
        links = [(address, other.name) for address, other in self.pages.items()]
        return page.page(links if len(links) > 1 else []), "text/html"


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer

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
        content = answer[0].encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{answer[1]}; charset=utf-8")
        self.send_header("Content-Length", f"{len(content)}")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the browser has left the page
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
        raise ValueError(f"--port {options.port}: {error}; must be free") from None
    with server:
        print(f"watch: http://{_HOST}:{server.port}/ (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    raise SystemExit("run it as: tlt watch")
