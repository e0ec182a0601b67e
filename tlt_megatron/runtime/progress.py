"""The terminal output of rank 0 or a tool: a live display, or one plain line per step, and a table
at the end.

If the terminal closes or cannot show a character, only the display ends, with one line in the log.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tlt_megatron.runtime.status import RankStatus

log = logging.getLogger(__name__)

_FACTS = {  # metric -> its text in the display
    "critic/rewards/mean": "reward {}",
    "sft/loss": "loss {}",
    "sft/tokens_per_s": "{} tokens/s",
    "eval/accuracy": "accuracy {}",
    "response_length/mean": "length {}",
    "perf/rollout_tokens_per_s": "{} tokens/s",
    "rollout/spec_accept_length": "accept length {}",
    "timing_s/step": "{} s/step",
    "loss": "loss {}",  # tools print it
    "agreement": "agreement {}",
}
_HEADERS = {
    "critic/rewards/mean": "reward",
    "sft/loss": "loss",
    "eval/loss": "eval loss",
    "eval/accuracy": "eval acc",
    "response_length/mean": "mean length",
    "response_length/max": "max length",
    "response_length/clip_ratio": "cut",
    "rollout/entropy": "entropy",
    "perf/rollout_tokens_per_s": "tokens /s",
    "timing_s/update_actor": "update s",
}
_ETA_WINDOW = 20  # newest steps whose mean duration predicts the rest
_FILE_WIDTH = 120  # a table's width without a terminal


class _Console(Console):
    """Silences itself when the reader of a pipe closes it. rich's own console would end the
    process.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with contextlib.suppress(OSError):  # a stdout that is not a file needs nothing
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        log.warning("nobody reads the display any more; the run goes on")


def _stdout_console() -> Console:
    is_terminal = sys.stdout.isatty()
    return _Console(force_terminal=is_terminal, width=None if is_terminal else _FILE_WIDTH)


@dataclass
class Progress:
    """Display of RL steps. Mode auto is live on a terminal, else lines; none does nothing."""

    mode: str
    num_steps: int  # 0 is an evaluation, of which responses are counted
    _: KW_ONLY
    first_step: int = 0  # steps that are already done
    unit: str = "step"  # a tool may count something else
    # the live display names its phase of the loop
    status: RankStatus = field(default_factory=lambda: RankStatus(rank=0, num_ranks=1))
    console: Console = field(default_factory=_stdout_console)

    def __post_init__(self) -> None:
        self._done = self.first_step
        self._metrics: dict[str, float] = {}
        self._started = self._step_ended = time.monotonic()
        self._step_seconds: deque[float] = deque(maxlen=_ETA_WINDOW)
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        if self.mode == "none":
            self.console = Console(quiet=True, force_interactive=False)
        if self.mode == "auto" and self.console.is_interactive:
            live = self._live = Live(
                get_renderable=self._render, console=self.console, refresh_per_second=4
            )
            self._draw(lambda: live.start(refresh=True))
            atexit.register(self.close)  # Ctrl-C of a tool: the cursor comes back

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step. `step` counts the steps done, including this one."""
        now = time.monotonic()
        since_last_s = (now - self._step_ended) / max(1, step - self._done)  # a tool may skip some
        self._step_seconds.append(metrics.get("timing_s/step", since_last_s))
        self._step_ended = now
        self._done = step
        self._metrics |= metrics
        if self._live is not None:
            self._draw(self._live.refresh)
        else:
            facts = [f"{self.unit} {step}/{self.num_steps}", *self._facts(), self._eta()]
            self.message(" | ".join(facts))

    def add_response(self) -> None:
        """Show how many responses of the phase are done on this rank, as the status has it.

        Lines show it of a run of 0 steps, by tenths.
        """
        if self._live is not None or self.num_steps:
            return
        done, total = self.status.num_done, self.status.num_responses
        if done * 10 // total > (done - 1) * 10 // total:
            self.message(f"{self._responses_text()} | {self._eta()}")

    def message(self, text: str) -> None:
        """Print a line of text, above the live display if there is one."""
        is_wrapped = self._live is not None  # lines above a live display must not exceed the width
        self._draw(lambda: self.console.print(Text(text), soft_wrap=not is_wrapped))

    def print_table(
        self,
        rows: Sequence[Mapping[str, float | str | None]],
        columns: Sequence[str],
        *,
        title: str = "steps",
        max_rows: int = 20,
    ) -> None:
        """Print a table of metric rows: all of them, or the first, the last and evenly spaced rows
        in between.

        Columns without a value in any row are left out.
        """
        picked = [rows[index] for index in pick_evenly(len(rows), max_rows)]
        cut = f" ({len(picked)} of {len(rows)} rows)" if len(picked) < len(rows) else ""
        table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        shown = [c for c in columns if any(row.get(c) is not None for row in rows)]
        for column in shown:
            header = _header(column)
            cells = [format_number(row.get(column)) for row in picked]
            # A narrow terminal wraps headers between words. Rows may exceed the width, so that no
            # number is cut.
            width = max(map(len, [*cells, *header.split()]))
            table.add_column(header, justify="right", min_width=width)
        for row in picked:
            table.add_row(*(format_number(row.get(column)) for column in shown))
        self.message(f"{title}{cut}")
        self._draw(lambda: self.console.print(table, crop=False))

    def close(self) -> None:
        """End the live display and leave its last state visible.

        Messages and the table can still be printed.
        """
        if self._live is not None:
            live, self._live = self._live, None
            self._draw(live.stop)

    def _draw(self, draw: Callable[[], None]) -> None:
        """Run `draw`. If the terminal fails, only the display ends."""
        try:
            draw()
        except (OSError, UnicodeError, ValueError) as error:  # ValueError: the stream was closed
            log.warning("the display ended, the run goes on: %s: %s", type(error).__name__, error)
            if self._live is not None:
                live, self._live = self._live, None
                with contextlib.suppress(OSError, UnicodeError, ValueError):
                    live.stop()
            self.console = Console(quiet=True)

    def _render(self) -> RenderableType:
        """Return the live display. It is called again at every refresh, so its clocks advance."""
        status, parts = self.status, []
        if self.num_steps:
            done, total = self._done, self.num_steps
            count = f"{self.unit} {done}/{total}"
            parts = self._facts() or [f"no {self.unit} has ended yet"]
            if status.num_done < status.num_responses:
                parts.append(self._responses_text())
        else:
            done, total, count = status.num_done, status.num_responses, self._responses_text()
        head = Table.grid(padding=(0, 2), expand=False)
        head.add_row(
            Text(count, style="bold"),
            ProgressBar(total=max(1, total), completed=done, width=30),
            Text(f"elapsed {_clock(time.monotonic() - self._started)}"),
            Text(self._eta(), style="cyan"),
        )
        lines: list[RenderableType] = [head, Text("  ".join(parts), style="dim")]
        if self._live is not None and status.loop_phase:
            clock = _clock(time.time() - status.loop_phase_began_s)
            self._spinner.update(text=Text(f"{status.loop_phase} {clock}", style="magenta"))
            lines.append(self._spinner)
        return Group(*lines)

    def _facts(self) -> list[str]:
        return [
            text.format(format_number(self._metrics[name]))
            for name, text in _FACTS.items()
            if name in self._metrics
        ]

    def _responses_text(self) -> str:
        return f"{self.status.num_done:,} of {self.status.num_responses:,} responses of rank 0"

    def _eta(self) -> str:
        status, seconds = self.status, sum(self._step_seconds)
        done, left = len(self._step_seconds), max(0, self.num_steps - self._done)
        if not self.num_steps:
            done, left = status.num_done, status.num_responses - status.num_done
            seconds = time.time() - status.loop_phase_began_s
        return f"ETA {_clock(seconds / done * left)}" if done else "ETA -"


def pick_evenly(num_rows: int, max_rows: int) -> list[int]:
    """Return at most `max_rows` evenly spread indices of `num_rows`, including the first and the
    last.
    """
    if num_rows <= max_rows:
        return list(range(num_rows))
    return [round(i * (num_rows - 1) / (max_rows - 1)) for i in range(max_rows)]


def _header(column: str) -> str:
    """Return a short header with a space where it may wrap: reward, mean length, gen s, grad
    norm.
    """
    if column in _HEADERS:
        return _HEADERS[column]
    if column.startswith("timing_s/"):
        column = column.removeprefix("timing_s/") + "_s"
    return column.rpartition("/")[2].replace("_", " ")


def format_number(value: float | str | None) -> str:
    """Return about three digits, with commas between thousands; "-" for None. A text stays as it
    is.
    """
    if value is None or isinstance(value, str):
        return value or "-"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
