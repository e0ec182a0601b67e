"""One tiny task for all whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_task import make_tiny_task


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of its config.yaml; model, prompts and reward stand beside it."""
    return make_tiny_task(tmp_path_factory.mktemp("task"))
