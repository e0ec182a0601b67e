"""Which log lines are shown by rank 0's console, by the other consoles, and by the file of every
rank.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tlt_megatron.runtime.log import configure_logging

pytestmark = pytest.mark.usefixtures("root_logger")


def log_some() -> None:
    for name in ("tlt_megatron.trainer.loop", "megatron.core"):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING):
            logging.getLogger(name).log(level, "%s of %s", logging.getLevelName(level), name)


def messages(text: str) -> list[str]:
    return [line.rpartition(": ")[2] for line in text.splitlines()]


@pytest.mark.parametrize("rank, node", [(0, 0), (3, 1)])
def test_consoles_show_warnings_and_rank_0s_our_lines_and_every_rank_keeps_a_file_with_all(
    rank: int,
    node: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GROUP_RANK", str(node))
    configure_logging(rank, tmp_path)
    log_some()
    names = ("tlt_megatron.trainer.loop", "megatron.core")
    ours = ["INFO of tlt_megatron.trainer.loop"] if rank == 0 else []
    assert messages(capsys.readouterr().err) == ours + [f"WARNING of {name}" for name in names]
    file = tmp_path / "logs" / f"node_000{node}" / f"rank_0000{rank}.log"
    text = file.read_text(encoding="utf-8")
    kept = [f"{level} of {name}" for name in names for level in ("INFO", "WARNING")]
    assert messages(text) == kept
    assert all(f" rank {rank} " in line for line in text.splitlines())


def test_configuring_again_writes_no_line_twice_keeps_foreign_handlers_and_appends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = logging.NullHandler()
    logging.getLogger().addHandler(foreign)
    for text in ("before", "after"):
        configure_logging(0, tmp_path)
        logging.getLogger("tlt_megatron").warning(text)
    assert messages(capsys.readouterr().err) == ["before", "after"]
    file = tmp_path / "logs" / "node_0000" / "rank_00000.log"
    assert messages(file.read_text()) == ["before", "after"]
    assert foreign in logging.getLogger().handlers
