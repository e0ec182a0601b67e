"""The real SGLang engine on a CPU, with the stand-ins for its CUDA-only kernels. Run by `make test-sglang` in an environment
of its own; without sglang there is nothing to collect here."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

HERE = Path(__file__).parent


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


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 4 layers and 48 tokens, sharp enough to be drafted for.

    Of a width that SGLang can halve on a CPU, where it pads others to multiples of 32 for each rank."""
    from tests.tiny_models import make_tiny_hf

    return make_tiny_hf(
        tmp_path_factory.mktemp("policy"), "llama", vocab_size=48, intermediate_size=192
    )
