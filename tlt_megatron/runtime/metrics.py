"""The metrics of a run: metrics.jsonl, and the trackers of logging.trackers.

Only rank 0 has a MetricsWriter (trainer/build.py). After a resume no RL step appears twice in the
file: rows that the killed run wrote after its checkpoint are cut.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tlt_megatron.runtime.durable import has_step, is_metrics_row, read_json_lines, replace_text
from tlt_megatron.runtime.trackers import Row, Tracker

log = logging.getLogger(__name__)


class MetricsWriter:
    """Writes one JSON object per call to <run_dir>/metrics.jsonl: `{"step": 3,
    "critic/rewards/mean": 0.5, ...}`, and tells the trackers.

    A tracker that fails is reported and no longer used. `resume_step` is the first step that will
    be written again; None for a fresh run.
    """

    def __init__(
        self, run_dir: Path, trackers: Mapping[str, Tracker], *, resume_step: int | None
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "metrics.jsonl"
        self._trackers = dict(trackers)
        keep_rows(self.path, resume_step, is_metrics_row)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of `step`; NaN and infinities become null.

        A step may get a second row with other keys (its evaluation). Readers merge rows by step.
        """
        values = {
            name: value if isinstance(value, int) else float(value)
            for name, value in metrics.items()
        }
        row = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **row}, allow_nan=False) + "\n")
        self._file.flush()
        if nonfinite := [name for name, value in row.items() if value is None]:
            log.warning("step %d: %s not finite, written as null", step, ", ".join(nonfinite))
        self._tell(f"step {step}", lambda tracker: tracker.log(step, values))

    def log_responses(self, step: int, rows: Sequence[Row]) -> None:
        """Give responses to the trackers."""
        self._tell(f"step {step}", lambda tracker: tracker.log_responses(step, rows))

    def close(self, *, failed: bool = False) -> None:
        """Close all outputs, of a run that `failed` as such."""
        self._file.close()
        self._tell("the end of the run", lambda tracker: tracker.close(failed=failed))

    def _tell(self, when: str, function: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                function(tracker)
            except Exception as error:  # the package's, or the user's: the run goes on
                del self._trackers[name]
                log.warning(
                    "logging.trackers: %s failed at %s and gets no more metrics: %r. The run goes on; metrics.jsonl has all"
                    " metrics",
                    *(name, when, error),
                )


def keep_rows(
    path: Path,
    resume_step: int | None,
    fits: Callable[[Mapping[str, object]], bool] = has_step,
) -> None:
    """Keep the rows of a jsonl file, if any, whose "step" is before `resume_step`. None: rename the
    file.

    A crash leaves the old or the new file. A damaged file is copied to another name first.
    """
    if not path.exists():
        return
    if resume_step is None:
        set_aside(path)
        return
    rows = read_json_lines(path, fits)
    if len(rows) < path.read_bytes().count(b"\n"):  # the line of a killed run has no end
        log.warning("%s is a copy of the damaged file", shutil.copyfile(path, _free_name(path)))
    kept = [json.dumps(row) + "\n" for row in rows if row["step"] < resume_step]
    replace_text(path, "".join(kept))


def set_aside(path: Path) -> None:
    """Rename the file of an earlier run in this folder, so that a fresh run neither mixes with it
    nor destroys it.
    """
    aside = path.rename(_free_name(path))
    log.warning("%s holds the %s of an earlier run in this folder", aside, path.stem)


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return free
