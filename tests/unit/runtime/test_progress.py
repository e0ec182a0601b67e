"""What the display says on a terminal and in a file, and what it does if the terminal goes away."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Sequence

import pytest
from rich.console import Console

from tlt_megatron.runtime.log import configure_logging
from tlt_megatron.runtime.progress import Progress
from tlt_megatron.runtime.status import RankStatus

METRICS = {
    "critic/rewards/mean": 0.25,
    "response_length/mean": 187.3,
    "perf/rollout_tokens_per_s": 3412.0,
    "timing_s/step": 30.0,
    "actor/grad_norm": 0.5,
}


COLUMNS = ("step", *list(METRICS)[:4])


def make_console(*, terminal: bool, width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def table(rows: list[dict], columns: Sequence[str], width: int = 100, **options: int) -> list[str]:
    """The lines of a table that are not empty."""
    console = make_console(terminal=width < 100, width=width)
    progress = Progress("lines", 100, console=console)
    progress.print_table(rows, columns, **options)
    return [line.strip() for line in text_of(console).splitlines() if line.strip()]


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    console = make_console(terminal=False, width=20)
    progress = Progress("auto", 5, console=console)
    progress.step(1, METRICS)
    progress.message("step 1: held-out accuracy [0.5]")
    progress.step(2, METRICS | {"eval/accuracy": 0.5})
    progress.close()
    assert text_of(console).splitlines() == [
        "step 1/5 | reward 0.25 | length 187.3 | 3,412 tokens/s | 30 s/step | ETA 0:02:00",
        "step 1: held-out accuracy [0.5]",
        "step 2/5 | reward 0.25 | accuracy 0.5 | length 187.3 | 3,412 tokens/s | 30 s/step | ETA 0:01:30",
    ]


def test_a_terminal_shows_a_live_display_that_ends_with_the_last_state() -> None:
    console = make_console(terminal=True)
    status = RankStatus(rank=0, num_ranks=1)
    status.count_phase("DRAFT-TRAIN")
    progress = Progress("auto", 4, status=status, console=console)
    progress.message("a message")
    frame = text_of(console).partition("a message\n")[2]
    assert "step 0/4" in frame
    assert "no step has ended yet" in frame
    assert "DRAFT-TRAIN 0:00:0" in frame
    progress.step(3, METRICS)
    progress.close()
    last_frame = text_of(console).split("\x1b[2K")[-1]
    assert "step 3/4" in last_frame
    assert "ETA 0:00:30" in last_frame
    assert "reward 0.25  length 187.3  3,412 tokens/s  30 s/step" in last_frame
    assert "DRAFT-TRAIN" not in last_frame
    assert last_frame.endswith("\x1b[?25h")  # the cursor is back


def test_lines_on_a_terminal_stay_lines_and_a_resumed_run_counts_from_where_it_is() -> None:
    console = make_console(terminal=True)
    Progress("lines", 12, first_step=10, console=console).step(11, METRICS)
    assert text_of(console).startswith("step 11/12 | ")
    assert text_of(console).endswith("ETA 0:00:30\n")
    assert text_of(console).count("\n") == 1
    assert "\x1b" not in text_of(console)


@pytest.mark.usefixtures("root_logger")
def test_log_lines_and_prints_stand_whole_above_the_live_display(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    console = make_console(terminal=True)
    configure_logging(0, None)  # before the display, as the launcher does
    progress = Progress("auto", 4, console=console)
    logging.getLogger("tlt_megatron.x").info("from the log")
    print("from a print")
    progress.close()
    logging.getLogger("tlt_megatron.x").info("after the display")
    shown = text_of(console)
    assert "rank 0 INFO tlt_megatron.x: from the log\n" in shown
    assert "from a print\n" in shown
    assert sys.stderr.getvalue().endswith("tlt_megatron.x: after the display\n")
    assert "from the log" not in sys.stderr.getvalue()


def test_mode_none_shows_nothing() -> None:
    console = make_console(terminal=True)
    progress = Progress("none", 4, console=console)
    progress.step(1, METRICS)
    progress.message("text")
    progress.print_table([{"step": 1, **METRICS}], COLUMNS)
    progress.close()
    assert text_of(console) == ""


def test_an_evaluation_shows_its_responses() -> None:
    """It has no steps to show."""
    for is_terminal in (False, True):
        console = make_console(terminal=is_terminal, width=120)
        status = RankStatus(rank=0, num_ranks=1)
        status.count_phase("ROLLOUT")
        progress = Progress("auto", 0, status=status, console=console)
        status.expect_responses(30)
        for _ in range(30):
            status.add_response(num_tokens=7)
            progress.add_response()
        progress.close()
        text = text_of(console)
        assert "0/0" not in text
        assert "no step has ended" not in text
        assert "30 of 30 responses of rank 0" in text
        if not is_terminal:
            assert [line.split()[0] for line in text.splitlines()] == [
                f"{n}" for n in range(3, 31, 3)
            ]
            assert all(" | ETA 0:00:" in line for line in text.splitlines())


def test_a_tool_counts_what_it_names_and_may_skip_some(monkeypatch: pytest.MonkeyPatch) -> None:
    console = make_console(terminal=False)
    times = iter([0.0, 10.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    progress = Progress("auto", 100, unit="tensor", console=console)
    progress.step(5, {"loss": 0.5})
    assert text_of(console) == "tensor 5/100 | loss 0.5 | ETA 0:03:10\n"


def test_table_shows_the_columns_that_some_row_has() -> None:
    rows = [
        {"step": 0, "eval/accuracy": 0.125},
        {"step": 1, **METRICS, "eval/accuracy": None},
        {"step": 2, **METRICS, "critic/rewards/mean": float("nan")},
    ]
    columns = "step", "eval/accuracy", "critic/rewards/mean", "actor/grad_norm", "actor/entropy"
    header, _, *lines = [line.split() for line in table(rows, columns)[1:]]
    assert header == ["step", "eval", "acc", "reward", "grad", "norm"]
    assert lines == [["0", "0.125", "-", "-"], ["1", "-", "0.25", "0.5"], ["2", "-", "nan", "0.5"]]
    assert table([], columns)[0] == "steps"


def test_table_of_a_long_run_shows_first_last_and_what_lies_between() -> None:
    for num_rows, shown in ((100, ["1", "34", "67", "100"]), (4, ["1", "2", "3", "4"])):
        lines = table([{"step": n + 1} for n in range(num_rows)], ["step"], max_rows=4)
        assert lines[0] == ("steps (4 of 100 rows)" if num_rows == 100 else "steps")
        assert lines[-4:] == shown


@pytest.mark.parametrize("width", [20, 36, 38, 45])
def test_narrow_terminal_wraps_headers_never_cuts_numbers(width: int) -> None:
    lines = table([{"step": 1, **METRICS}], COLUMNS, width)
    assert lines[-1].split() == ["1", "0.25", "187.3", "3,412", "30"]


class BrokenTerminal(io.StringIO):
    """Takes `num_writes` writes, then the terminal is gone."""

    def __init__(self, num_writes: int, error: Exception) -> None:
        super().__init__()
        self.num_writes = num_writes
        self.error = error

    def write(self, text: str) -> int:
        self.num_writes -= 1
        if self.num_writes < 0:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("mode", ["auto", "lines"])
@pytest.mark.parametrize("num_writes", [0, 2])
@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error"),
        UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range(128)"),
        ValueError("I/O operation on closed file"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_terminal_that_goes_away_ends_the_display_not_the_run(
    mode: str, num_writes: int, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    file = BrokenTerminal(num_writes, error)
    console = Console(file=file, force_terminal=mode == "auto", width=80, color_system=None)
    stdout, stderr = sys.stdout, sys.stderr
    with caplog.at_level(logging.WARNING):
        progress = Progress(mode, 4, console=console)
        for step in range(1, 5):
            progress.message(f"step {step}")
            progress.step(step, METRICS)
        progress.close()
        progress.print_table([{"step": 1, **METRICS}], COLUMNS)
    ended = [r for r in caplog.records if "the display ended, the run goes on" in r.getMessage()]
    assert len(ended) == 1
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
