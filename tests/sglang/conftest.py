"""The real SGLang engine on a CPU, with the stand-ins for its CUDA-only kernels. Run by `make
test-sglang` in an environment of its own; without sglang there is nothing to collect here."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytest.register_assert_rewrite("tests.sglang.rollouts")


def _has_sglang() -> bool:
    try:
        return metadata.version("sglang") == "0.5.23"
    except metadata.PackageNotFoundError:
        return False


if not _has_sglang():
    collect_ignore_glob = ["test_*.py"]
elif importlib.util.find_spec("sgl_kernel") is None:
    raise RuntimeError(
        "tests/sglang needs its stand-ins on PYTHONPATH: run it by `make test-sglang`"
    )
# This folder would otherwise stand for the package `sglang` in processes that look here first.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE.parent]
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 4 layers and 48 tokens, sharp enough to be drafted for.

    SGLang can halve its width on a CPU, where it pads others to multiples of 32 for each
    rank."""
    from tests.tiny_models import make_tiny_hf

    return make_tiny_hf(
        tmp_path_factory.mktemp("policy"), "llama", vocab_size=48, intermediate_size=192
    )


@pytest.fixture(scope="session")
def drafter(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE drafter of this policy, trained by us."""
    from tests.sglang.rollouts import train_drafter

    return train_drafter(policy_folder, tmp_path_factory.mktemp("drafter"))


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left_behind() -> Iterator[None]:
    """No engine of a module outlives it."""
    yield
    from tests.sglang.rollouts import engine_processes

    assert engine_processes() == []
