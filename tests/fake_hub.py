"""A server on this machine that speaks the part of the Hugging Face Hub's protocol that downloads
use.
"""

from __future__ import annotations

import hashlib
import json
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Folders by their id, and what was asked for: the method and the path of every request."""

    models: dict[str, Path] = field(default_factory=dict)
    datasets: dict[str, Path] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    url: str = ""
    created: list[dict[str, object]] = field(default_factory=list)  # repositories
    uploads: dict[str, bytes] = field(default_factory=dict)  # by name
    # in a download: "breaks off", or the ending of files that get wrong bytes of the right size
    fault: str = ""

    def downloads(self) -> list[str]:
        """Return the names of the files that were sent, in order."""
        gets = [r.partition(" ")[2] for r in self.requests if r.startswith("GET ")]
        return [path.rpartition("/")[2] for path in gets if "/resolve/" in path]


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve `hub` on a free port of this machine until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = unquote(urlsplit(self.path).path)
            if path == "/api/repos/create":
                asked = json.loads(body)
                hub.created.append(asked)
                self._send_json({"url": f"{hub.url}/{asked['organization']}/{asked['name']}"})
            elif "/preupload/" in path:  # every file fits into the commit
                files = [{"path": f["path"]} for f in json.loads(body)["files"]]
                for file in files:
                    file |= {"uploadMode": "regular", "shouldIgnore": False}
                self._send_json({"files": files})
            elif "/commit/" in path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        hub.uploads[line["value"]["path"]] = b64decode(line["value"]["content"])
                repo = path.removeprefix("/api/models/").partition("/commit/")[0]
                url = f"{hub.url}/{repo}/commit/{COMMIT}"
                self._send_json({"commitUrl": url, "commitOid": COMMIT})
            else:
                self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            words = path.strip("/").split("/")
            is_data = "datasets" in words[:2]
            folders = hub.datasets if is_data else hub.models
            is_api = words[0] == "api"
            words = words[is_api + (is_data or is_api) :]
            folder, rest = folders.get("/".join(words[:2])), words[2:]
            if folder is None:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif not is_api and rest[:1] == ["resolve"]:
                self._send_file(folder / "/".join(rest[2:]))
            elif rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            elif rest[:1] == ["tree"]:
                self._send_json([_entry(folder, file) for file in _files(folder)])
            elif rest[:1] in ([], ["revision"]):
                names = [{"rfilename": str(f.relative_to(folder))} for f in _files(folder)]
                about = {"id": "/".join(words[:2]), "sha": COMMIT, "siblings": names}
                self._send_json(about | {"private": False, "gated": False, "tags": []})
            else:
                self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

        do_HEAD = do_GET

        def _send_file(self, file: Path) -> None:
            if file.is_file():
                content = file.read_bytes()
                tag = hashlib.sha256(content).hexdigest()
                if file.suffix == hub.fault:
                    content = content[:-1] + bytes([content[-1] ^ 1])
                self._send(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})
            else:
                self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

        def _send_json(self, content: object) -> None:
            self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

        def _send(self, code: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if hub.fault == "breaks off" and len(content) > 10_000:
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
            else:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _entry(folder: Path, file: Path) -> dict[str, object]:
    tag = hashlib.sha256(file.read_bytes()).hexdigest()
    size = file.stat().st_size
    return {"type": "file", "path": str(file.relative_to(folder)), "size": size, "oid": tag}
