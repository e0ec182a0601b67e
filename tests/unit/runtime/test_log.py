"""Who sees which log line: rank 0's console, the other consoles, the file of every rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tlt_megatron.runtime.log import configure_logging


@pytest.fixture(autouse=True)
def _root_logger_is_put_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [h for h in root.handlers if h not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


def log_some() -> None:
    for name in ("tlt_megatron.trainer.loop", "megatron.core"):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING):
            logging.getLogger(name).log(level, "%s of %s", logging.getLevelName(level), name)


def messages(text: str) -> list[str]:
    return [line.rpartition(": ")[2] for line in text.splitlines()]


def test_rank_0_shows_our_lines_and_warnings_of_libraries(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(0, None)
    log_some()
    assert messages(capsys.readouterr().err) == [
        "INFO of tlt_megatron.trainer.loop",
        "WARNING of tlt_megatron.trainer.loop",
        "WARNING of megatron.core",
    ]


def test_other_ranks_show_warnings_only(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(3, None)
    log_some()
    assert messages(capsys.readouterr().err) == [
        "WARNING of tlt_megatron.trainer.loop",
        "WARNING of megatron.core",
    ]


@pytest.mark.parametrize("rank", [0, 3])
def test_every_rank_keeps_a_file_with_all_lines(rank: int, tmp_path: Path) -> None:
    configure_logging(rank, tmp_path)
    log_some()
    text = (tmp_path / "logs" / f"rank_{rank:05d}.log").read_text(encoding="utf-8")
    assert messages(text) == [
        f"{level} of {name}"
        for name in ("tlt_megatron.trainer.loop", "megatron.core")
        for level in ("INFO", "WARNING")
    ]
    assert all(f" rank {rank} " in line for line in text.splitlines())


@pytest.mark.parametrize("level", ["DEBUG", logging.DEBUG])
def test_level_opens_both(
    level: int | str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(0, tmp_path, level)
    log_some()
    assert "DEBUG of tlt_megatron" in capsys.readouterr().err
    assert "DEBUG of megatron" in (tmp_path / "logs" / "rank_00000.log").read_text()


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        configure_logging(0, None, "LOUD")


def test_configuring_again_writes_no_line_twice_and_keeps_foreign_handlers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = logging.NullHandler()
    logging.getLogger().addHandler(foreign)
    configure_logging(0, tmp_path / "first")
    configure_logging(0, tmp_path / "second")
    logging.getLogger("tlt_megatron").warning("once")
    assert messages(capsys.readouterr().err) == ["once"]
    assert (tmp_path / "first" / "logs" / "rank_00000.log").read_text() == ""
    assert foreign in logging.getLogger().handlers


def test_a_resumed_run_appends_to_its_file(
    tmp_path: Path,
) -> None:
    for text in ("before", "after"):
        configure_logging(0, tmp_path)
        logging.getLogger("tlt_megatron").info(text)
    lines = (tmp_path / "logs" / "rank_00000.log").read_text().splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == ["before", "after"]
