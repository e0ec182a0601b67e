"""The ranks of an SGLang run start together or fail together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tlt_megatron.config.load import load_config
from tlt_megatron.runtime.device import select_device
from tlt_megatron.runtime.process_groups import group_of
from tlt_megatron.trainer import build_sglang


def test_all_ranks_raise_the_kind_of_error_that_one_of_them_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ValueError ends the program with one line and code 2, a RuntimeError with a traceback."""

    def refuse_on_one() -> None:
        if dist.get_rank() == 1:
            raise ValueError("another version")

    monkeypatch.setattr(build_sglang, "check_version", refuse_on_one)

    def rank() -> str:
        world = group_of(dist.group.WORLD)
        with pytest.raises(ValueError, match="another version") as refused:
            build_sglang.build_sglang_engine(
                load_config(None), select_device("cpu"), tmp_path, world
            )
        return str(refused.value)

    expected = "rollout engines of ranks [1] failed; rank 1: another version"
    assert run_ranks(2, rank) == [expected] * 2
