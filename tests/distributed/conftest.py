"""Tiny policies for all tests of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_hf


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a random qwen3 of 4 layers."""
    return make_tiny_hf(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(scope="session")
def tied_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a random llama whose output layer is its embedding."""
    return make_tiny_hf(tmp_path_factory.mktemp("models") / "llama", "llama", tied=True)


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a random qwen3_moe whose first layer is dense."""
    path = tmp_path_factory.mktemp("models") / "qwen3_moe"
    return make_tiny_hf(path, "qwen3_moe", mlp_only_layers=[0])


@pytest.fixture(scope="session")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a random glm4_moe: a router of sigmoids with a bias, a shared expert, a dense
    first layer.
    """
    return make_tiny_hf(tmp_path_factory.mktemp("models") / "glm4_moe", "glm4_moe")
