"""Set-up, `make test` and what a package holds, with stand-ins for pip, pytest and the index of CPU
builds.
"""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).resolve().parents[2]
# An interpreter that notes what pip and pytest are asked. `fail` in its folder makes pytest fail.
PYTHON = f"""#!/usr/bin/env bash
here=$(dirname "$0")
if [[ $1 == -m ]]; then echo "$*" >> "$here/asked"; [[ ! -e $here/fail ]]; else exec {sys.executable} "$@"; fi
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "python"
    path.parent.mkdir()
    path.write_text(PYTHON)
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def index() -> Iterator[str]:
    """An index that has torch."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/cpu/torch/" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("folder", "has_driver", "asked", "is_warned"),
    [
        ("/cpu", False, "--extra-index-url {index}/cpu torch==2.13.0", False),
        ("/none", False, "torch==2.13.0", True),
        ("/cpu", True, "torch>=2.11,<2.15", False),
    ],
)
def test_a_machine_without_a_driver_gets_the_cpu_build_if_its_index_answers(
    python: Path, index: str, folder: str, has_driver: bool, asked: str, is_warned: bool
) -> None:
    if has_driver:
        (python.parent / "nvidia-smi").symlink_to("/bin/true")
    command = ["requirements/install_torch.sh", python, *([] if has_driver else ["cpu"])]
    done = subprocess.run(
        command,
        cwd=REPO,
        env={"PATH": f"{python.parent}:/usr/bin:/bin", "TORCH_INDEX": index + folder},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = (python.parent / "asked").read_text()
    assert said == f"-m pip install -q {asked.format(index=index)}\n"
    assert ("5.6 GB" in done.stdout) == is_warned
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    assert done.stdout.endswith(f"set-up: torch {torch.__version__} ({build})\n")


@pytest.mark.parametrize("code", [0, 2])
def test_all_parts_of_the_suite_run_although_one_fails(
    python: Path, tmp_path: Path, code: int
) -> None:
    for mark in (".done", ".dev"):  # set up
        (tmp_path / mark).touch()
    if code:
        (python.parent / "fail").touch()
    done = subprocess.run(["make", "test", f"VENV={tmp_path}"], cwd=REPO, capture_output=True)
    assert done.returncode == code
    assert (python.parent / "asked").read_text().count("-m pytest") == 3


def test_a_package_says_who_made_it_and_holds_what_its_tests_need(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path],
        cwd=REPO,
        env=os.environ | {"REPO_URL": "https://example.org/fork/"},
        check=True,
        capture_output=True,
    )
    facts = (tmp_path / "tlt_megatron.egg-info" / "PKG-INFO").read_text()
    assert "\nAuthor: The tlt_megatron authors\n" in facts
    assert "\nClassifier: " in facts
    assert "\nProject-URL: Repository, https://example.org/fork\n" in facts
    assert 'src="https://example.org/fork/raw/main/docs/figures/tail_light.svg"' in facts
    assert "](docs/" not in facts
    assert '="docs/' not in facts
    held = set((tmp_path / "tlt_megatron.egg-info" / "SOURCES.txt").read_text().splitlines())
    named = {"CHANGELOG.md", "CITATION.cff", "tests/conftest.py", "docs/guide.md", "Makefile"}
    assert named <= held


def test_an_image_does_not_take_over_what_git_ignores() -> None:
    """`COPY . .` would bring .venv/.done, and the image's set-up would be skipped."""
    ignored = (REPO / ".gitignore").read_text().replace("/\n", "\n").split()
    lines = (REPO / ".dockerignore").read_text().splitlines()
    assert {line.removeprefix("**/") for line in lines} >= set(ignored)
