"""Trackers get the metrics of a run, and the first responses of each step if the run writes
responses.

A tracker is a class with the methods of `Tracker`, made on rank 0. `logging.trackers` names it by a
name of config/extensions.py or by an import path. A package is imported when its tracker is made.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tlt_megatron.runtime.durable import replace_text

COLUMNS = ("prompt", "response", "reward", "data_source", "logprob_diff", "finish_reason")
Row = Mapping[str, Any]  # a response, as in rollouts/step_*.jsonl
Settings = Mapping[str, Mapping[str, object]]


class Tracker(Protocol):
    """Made as `Class(run_dir=..., project=..., config=..., resume_step=...)`.

    `config` are all settings by section. `resume_step` is the first step that a resumed run does;
    None for a fresh run.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics.

        Values may be NaN or infinite; a step may be logged twice, with other names.
        """

    def log_responses(self, step: int, rows: Sequence[Row]) -> None:
        """Log responses as a table, or do nothing."""

    def close(self, *, failed: bool = False) -> None:
        """Write what is left. `failed` is given if the run ended with an error."""


class TensorBoard:
    """Writes <run_dir>/tensorboard. Steps that a resumed run does again are hidden."""

    def __init__(self, *, run_dir: Path, resume_step: int | None, **_: object) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(run_dir / "tensorboard", purge_step=resume_step or 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_responses(self, step: int, rows: Sequence[Row]) -> None:
        """Do nothing: TensorBoard has no tables."""

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002
        self._writer.close()


class Wandb:
    """Writes to Weights & Biases, the same run after a resume (wandb_id.txt).

    WANDB_MODE=offline needs no network.
    """

    def __init__(
        self, *, run_dir: Path, project: str, config: Settings, resume_step: int | None
    ) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        folder = run_dir.resolve()
        id_file = folder / "wandb_id.txt"
        if resume_step is None or not id_file.is_file():
            replace_text(id_file, f"{folder.name}-{secrets.token_hex(4)}")
        self._wandb = wandb
        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=id_file.read_text(encoding="utf-8"),
            dir=str(folder),
            config=dict(config),
            resume="allow",  # steps that it already has are dropped
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_responses(self, step: int, rows: Sequence[Row]) -> None:
        data = [[row[name] for name in COLUMNS] for row in rows]
        self._run.log({"responses": self._wandb.Table(columns=list(COLUMNS), data=data)}, step=step)

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))
