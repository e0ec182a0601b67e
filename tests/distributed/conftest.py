"""One tiny policy for all tests of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_hf


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a random qwen3 of 4 layers."""
    return make_tiny_hf(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")
