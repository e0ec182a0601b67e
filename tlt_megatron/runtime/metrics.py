"""The metrics of a run: always metrics.jsonl, and TensorBoard or Weights & Biases if enabled.

Only rank 0 has a MetricsWriter (trainer/build.py). After a resume no RL step appears twice: rows that the killed run wrote
after its checkpoint are cut from the file and hidden in TensorBoard.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import numbers
import zlib
from pathlib import Path
from typing import Any

from tlt_megatron.runtime.durable import replace_text

log = logging.getLogger(__name__)


class MetricsWriter:
    """Writes one JSON object per call to <run_dir>/metrics.jsonl: `{"step": 3, "critic/rewards/mean": 0.5, ...}`.

    `resume_step` is the first step that will be written again; None for a fresh run. ValueError if a requested package is not
    installed.
    """

    def __init__(
        self, run_dir: Path, *, tensorboard: bool, wandb_project: str, resume_step: int | None
    ) -> None:
        if tensorboard:
            _require_package("tensorboard", "logging.tensorboard=true")
        if wandb_project:
            _require_package("wandb", f"logging.wandb_project={wandb_project!r}")
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "metrics.jsonl"
        self.num_nonfinite = 0  # values written as null so far
        keep_rows(self.path, resume_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._tensorboard = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(
                run_dir / "tensorboard", purge_step=0 if resume_step is None else resume_step
            )
        self._wandb = _start_wandb(run_dir, wandb_project) if wandb_project else None

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of `step`; NaN and infinities become null. ValueError for a value that is not a number.

        A step may get a second row with other keys (its evaluation). Readers merge rows by step.
        """
        values = {name: _to_number(name, value) for name, value in metrics.items()}
        row = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **row}, allow_nan=False) + "\n")
        self._file.flush()
        self._note_nonfinite(step, [name for name, value in row.items() if value is None])
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def close(self) -> None:
        """Close all outputs. A second call does nothing."""
        if self._file.closed:
            return
        self._file.close()
        if self.num_nonfinite:
            log.warning(
                "%s: %d non-finite values were written as null", self.path, self.num_nonfinite
            )
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _note_nonfinite(self, step: int, names: list[str]) -> None:
        if names and self.num_nonfinite == 0:
            log.warning(
                "step %d: %s not finite, written as null; further ones are only counted",
                step,
                ", ".join(names),
            )
        self.num_nonfinite += len(names)


def _to_number(name: str, value: object) -> float | int:
    if name == "step":
        raise ValueError("metric 'step': this key holds the number of the step")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"metric {name!r}={value!r}: must be a number, not {type(value).__name__}")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def keep_rows(path: Path, resume_step: int | None) -> None:
    """Keep the rows of a jsonl file, if any, whose "step" is before `resume_step`. None: rename the file.

    A crash leaves the old or the new file.
    """
    if not path.is_file():
        return
    if resume_step is None:
        set_aside(path)
        return
    kept, num_torn = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] < resume_step:
                kept.append(line if line.endswith("\n") else line + "\n")
        except json.JSONDecodeError:
            num_torn += 1
    if num_torn:
        log.warning("%s: left out %d torn lines of a run that was killed", path, num_torn)
    replace_text(path, "".join(kept))


def set_aside(path: Path) -> None:
    """Rename the file of an earlier run in this folder, so that a fresh run neither mixes with it nor destroys it."""
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
    log.warning("%s holds the %s of an earlier run in this folder", aside, path.stem)


def _require_package(name: str, setting: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"{setting}: needs the package {name}, which is not installed")


def _start_wandb(run_dir: Path, project: str) -> Any:
    """Return the wandb run of this run folder, the same one after a resume. wandb drops steps that it already has."""
    import wandb  # pyright: ignore[reportMissingImports]  # optional

    folder = run_dir.resolve()
    run_id = f"{folder.name}-{zlib.crc32(str(folder).encode()):08x}"
    return wandb.init(project=project, name=folder.name, id=run_id, dir=str(folder), resume="allow")
