"""One tiny task for all whole runs, and runs under torchrun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_task import make_tiny_task, write_environment
from tests.torchrun_job import Job


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of its config.yaml; model, prompts and reward stand beside it."""
    return make_tiny_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a task whose policy ends its turns: most responses have fewer than 16 tokens,
    and some reach 24. The file environment.py beside it answers them.
    """
    config = make_tiny_task(tmp_path_factory.mktemp("task"))
    write_environment(config.parent)
    return config


@pytest.fixture
def start_job() -> Iterator[Callable[..., Job]]:
    """Starts a `Job`. What still runs at the end of the test is killed."""
    jobs: list[Job] = []

    def start(config: Path, run_dir: Path, *arguments: str, **door: Any) -> Job:
        jobs.append(Job(config, run_dir, *arguments, **door))
        return jobs[-1]

    yield start
    for job in jobs:
        (job.folder / "hold").unlink(missing_ok=True)
        if job.process.poll() is None:
            for process in job.family():
                process.kill()
