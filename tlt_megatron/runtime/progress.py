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

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tlt_megatron.runtime.step_phase import StepPhase

log = logging.getLogger(__name__)

MODES = ("auto", "live", "lines", "none")
_FACTS = {  # metric -> its text in the display
    "critic/rewards/mean": "reward {}",
    "eval/accuracy": "accuracy {}",
    "response_length/mean": "length {}",
    "perf/rollout_tokens_per_s": "{} tokens/s",
    "rollout/spec_accept_length": "accept length {}",
    "timing_s/step": "{} s/step",
    "loss": "loss {}",  # of tools
    "agreement": "agreement {}",
}
_HEADERS = {
    "critic/rewards/mean": "reward",
    "eval/accuracy": "eval acc",
    "response_length/mean": "mean length",
    "response_length/max": "max length",
    "perf/rollout_tokens_per_s": "tokens /s",
    "timing_s/update_actor": "update s",
}
_ETA_WINDOW = 20  # newest steps whose mean duration predicts the rest
_FILE_WIDTH = 120  # of a table without a terminal


class Progress:
    """Display of `num_steps` RL steps; `first_step` of them are already done. Mode auto is live on
    a terminal, else lines.

    The live display names the phase of the loop in `phase`. A tool may count something else and
    names it in `unit`. With 0 steps (an evaluation), responses are counted. With `enabled` False
    (every rank but the first) or mode none it does nothing. `console` is for tests.
    """

    def __init__(
        self,
        mode: str,
        num_steps: int,
        *,
        first_step: int = 0,
        unit: str = "step",
        phase: StepPhase | None = None,
        enabled: bool,
        console: Console | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"logging.progress={mode!r}: must be one of {', '.join(MODES)}")
        self.num_steps = num_steps
        self._unit = unit
        self._done = first_step
        self._responses = 0, 0  # done and all of the rollout phase, on this rank
        self._metrics: dict[str, float] = {}
        self._phase = phase or StepPhase()
        self._started = self._step_ended = time.monotonic()
        self._step_seconds: deque[float] = deque(maxlen=_ETA_WINDOW)
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        if not enabled or mode == "none":
            self._console = Console(quiet=True)
            return
        self._console = console or _stdout_console()
        if mode == "lines":
            return
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            live = self._live = Live(
                get_renderable=self._render, console=self._console, refresh_per_second=4
            )
            self._draw(lambda: live.start(refresh=True))
            atexit.register(self.close)  # Ctrl-C of a tool: the cursor comes back
        elif mode == "live":
            log.info("logging.progress='live' needs a terminal: one line per step instead")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step. `step` counts the steps done, including this one."""
        now = time.monotonic()
        since_last_s = (now - self._step_ended) / max(1, step - self._done)  # a tool may skip some
        self._step_seconds.append(metrics.get("timing_s/step", since_last_s))
        self._step_ended = now
        self._done = step
        self._metrics |= metrics
        self._refresh()
        if self._live is None:
            facts = [f"{self._unit} {step}/{self.num_steps}", *self._facts(), self._eta()]
            self.message(" | ".join(facts))

    def responses(self, num_done: int, num_all: int) -> None:
        """Show how many responses of the phase are done on this rank.

        Lines show it of a run of 0 steps, by tenths.
        """
        self._responses = num_done, num_all
        is_tenth = num_done and num_done * 10 // num_all > (num_done - 1) * 10 // num_all
        if self._live is None and self.num_steps == 0 and is_tenth:
            self.message(f"{self._responses_text()} | {self._eta()}")

    def message(self, text: str) -> None:
        """Print a line of text, above the live display if there is one."""
        is_wrapped = self._live is not None  # lines above a live display must not exceed the width
        self._draw(lambda: self._console.print(Text(text), soft_wrap=not is_wrapped))

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
            cells = [_cell(row.get(column)) for row in picked]
            # A narrow terminal wraps headers between words. Rows may exceed the width, so that no
            # number is cut.
            width = max(map(len, [*cells, *header.split()]))
            table.add_column(header, justify="right", min_width=width)
        for row in picked:
            table.add_row(*(_cell(row.get(column)) for column in shown))
        self.message(f"{title}{cut}")
        self._draw(lambda: self._console.print(table, crop=False))

    def close(self) -> None:
        """End the live display and leave its last state visible.

        Messages and the table can still be printed.
        """
        if self._live is not None:
            live, self._live = self._live, None
            self._draw(live.stop)

    def _refresh(self) -> None:
        if self._live is not None:
            self._draw(self._live.refresh)

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
            self._console = Console(quiet=True)

    def _render(self) -> RenderableType:
        """Return the live display. It is called again at every refresh, so its clocks advance."""
        now = time.monotonic()
        done, total = (self._done, self.num_steps) if self.num_steps else self._responses
        responses = self._responses_text()
        head = Table.grid(padding=(0, 2), expand=False)
        head.add_row(
            Text(f"{self._unit} {done}/{total}" if self.num_steps else responses, style="bold"),
            ProgressBar(total=max(1, total), completed=done, width=30),
            Text(f"elapsed {_clock(now - self._started)}"),
            Text(self._eta(), style="cyan"),
        )
        parts = self._facts() or [f"no {self._unit} has ended yet"] * bool(self.num_steps)
        if self.num_steps and self._responses[0] < self._responses[1]:
            parts.append(responses)
        facts = Text("  ".join(parts), style="dim")
        phase = self._phase
        if self._live is None or not phase.of_loop:
            return Group(head, facts)
        seconds = now - phase.of_loop_began_s
        self._spinner.update(text=Text(f"{phase.of_loop} {_clock(seconds)}", style="magenta"))
        return Group(head, facts, self._spinner)

    def _facts(self) -> list[str]:
        return [
            text.format(format_number(self._metrics[name]))
            for name, text in _FACTS.items()
            if name in self._metrics
        ]

    def _responses_text(self) -> str:
        return "{:,} of {:,} responses of rank 0".format(*self._responses)

    def _eta(self) -> str:
        if self.num_steps == 0 and self._responses[0]:
            done, total = self._responses
            seconds = time.monotonic() - self._phase.of_loop_began_s
            return f"ETA {_clock(seconds / done * (total - done))}"
        if not self._step_seconds:
            return "ETA -"
        mean_s = sum(self._step_seconds) / len(self._step_seconds)
        return f"ETA {_clock(mean_s * max(0, self.num_steps - self._done))}"


class _Console(Console):
    """Silences itself when the reader of a pipe closes it. rich's own console would end the
    process.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with contextlib.suppress(OSError):  # a stdout that is not a file needs nothing
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        log.warning("nobody reads the display any more; the run goes on")


def pick_evenly(num_rows: int, max_rows: int) -> list[int]:
    """Return at most `max_rows` evenly spread indices of `num_rows`, including the first and the
    last.
    """
    if num_rows <= max_rows:
        return list(range(num_rows))
    return [round(i * (num_rows - 1) / (max_rows - 1)) for i in range(max_rows)]


def _stdout_console() -> Console:
    console = _Console(force_terminal=sys.stdout.isatty())
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def _header(column: str) -> str:
    """Return a short header with a space where it may wrap: reward, mean length, gen s, grad norm."""
    if column in _HEADERS:
        return _HEADERS[column]
    if column.startswith("timing_s/"):
        column = column.removeprefix("timing_s/") + "_s"
    return column.rpartition("/")[2].replace("_", " ")


def _cell(value: float | str | None) -> str:
    return value if isinstance(value, str) else format_number(value)


def format_number(value: float | None) -> str:
    """Return about three digits, with commas between thousands; "-" for None."""
    if value is None:
        return "-"
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
