"""Serves a live page of one run or several, only on this machine (127.0.0.1).

    python tools/watch.py runs/mine --port 8017

The page is that of tools/report.py, without what a run writes only at its end. It reloads itself when files of the run have
changed. The run folder is only read. From another machine: `ssh -L 8017:127.0.0.1:8017 HOST`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socketserver
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

_HOST = "127.0.0.1"
_FILES = ("config.yaml", "metrics.jsonl", "speculation.jsonl", "summary.json")
_MARKS = ("lock", "config.yaml", "metrics.jsonl")  # a run has one of these from its start


class LiveRun:
    """The page of a run folder, rendered again when its files have changed. ValueError for a folder that is no run."""

    def __init__(self, path: Path) -> None:
        if not any((path / mark).is_file() for mark in _MARKS):
            raise ValueError(f"{path}: is no run folder: must hold one of {', '.join(_MARKS)}")
        self.path = path
        self.name = path.resolve().name
        self._lock = threading.Lock()
        self._page = ("", "")  # version, HTML

    def version(self) -> str:
        """Return a word that changes with the sizes and times of the files that the page shows."""
        from tools.run_report.data import LIVE_RANKS

        files = [self.path / name for name in _FILES]
        files += sorted((self.path / "timeline").glob("rank_*.jsonl"))[:LIVE_RANKS]
        files += sorted((self.path / "rollouts").glob("step_*.jsonl"))[-1:]
        return f"{zlib.crc32(repr([_stamp(file) for file in files]).encode()):08x}"

    def page(self, runs: Sequence[tuple[str, str]]) -> str:
        """Return the HTML; `runs` are address and name of every run of the server."""
        with self._lock:
            version = self.version()  # before reading: a later change makes the page reload again
            if self._page[0] != version:
                self._page = (version, self._render(version, runs))
            return self._page[1]

    def _render(self, version: str, runs: Sequence[tuple[str, str]]) -> str:
        from tools.run_report.data import RunData, read_run
        from tools.run_report.page import Live, render_page
        from tools.run_report.panels import build_panels
        from tools.run_report.responses import NUM_SHOWN, read_responses

        try:
            run = read_run(self.path, is_live=True)
            state = self._state(run)
            panels = build_panels(run, None) if run.rows else []
            responses = read_responses(self.path, NUM_SHOWN)
        except (ValueError, FileNotFoundError) as error:  # the next change of a file renders anew
            run = RunData(
                name=self.name,
                config={},
                config_text="",
                summary={},
                rows=[],
                spans=None,
                passes=None,
                is_live=True,
            )
            state, panels, responses = f"cannot be shown: {error}", [], []
        return render_page(run, panels, responses, Live(version=version, state=state, runs=runs))

    def _state(self, run: Any) -> str:
        steps = run.series("timing_s/step")[0]
        if not steps:
            return "The run is starting: no RL step is done yet."
        written = time.localtime((self.path / "metrics.jsonl").stat().st_mtime)
        num_steps = run.config.get("run", {}).get("num_steps", "?")
        return f"{steps[-1]} of {num_steps} RL steps are done, at {time.strftime('%X', written)}."


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return path.name, 0, 0
    return path.name, stat.st_size, stat.st_mtime_ns


class WatchServer(socketserver.ThreadingTCPServer):
    """Serves the pages of `runs` at /0/, /1/, ... and their versions at /0/version, ... Port 0: any free one."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, runs: Sequence[LiveRun], port: int) -> None:
        super().__init__((_HOST, port), _Handler)
        self.runs = runs
        self.port: int = self.socket.getsockname()[1]

    def answer(self, path: str) -> tuple[str, str] | None:
        """Return content and its type; None for a path that does not exist."""
        number, _, name = path.strip("/").partition("/")
        if not number.isdecimal() or int(number) >= len(self.runs):
            return None
        run = self.runs[int(number)]
        if name == "version":
            return json.dumps({"version": run.version()}), "application/json"
        links = [(f"/{i}/", other.name) for i, other in enumerate(self.runs)]
        return (run.page(links if len(links) > 1 else []), "text/html") if not name else None


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer

    def do_GET(self) -> None:
        if self.headers.get("Host", "").rpartition(":")[0] not in (_HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN, "only for 127.0.0.1 and localhost")
            return
        if self.path == "/":
            self.send_response(HTTPStatus.FOUND)
            self.send_header("Location", "/0/")
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


def main(arguments: list[str] | None = None) -> int:
    """Serve until Ctrl-C. Return 2 for a folder that is no run, a port in use, or an absent plotting package."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="folder of a run")
    parser.add_argument("--port", type=int, default=8017, help="0: any free one; default 8017")
    options = parser.parse_args(arguments)
    try:
        import tools.run_report.page
        import tools.run_report.panels  # noqa: F401  # both need packages of [report]

        server = WatchServer([LiveRun(path) for path in options.run_dirs], options.port)
    except ModuleNotFoundError as error:
        print(f"watch: needs the package {error.name}: pip install -e .[report]", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"watch: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"watch: --port {options.port}: {error.strerror}; must be free", file=sys.stderr)
        return 2
    with server:
        print(f"watch: http://{_HOST}:{server.port}/ (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
