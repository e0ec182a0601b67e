"""Writes the results of a run: HF export, summary.json, the table of its steps, one trace of all ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from tlt_megatron.config.schema import RunConfig
from tlt_megatron.models.hf_io import save_hf_model
from tlt_megatron.runtime.collectives import barrier
from tlt_megatron.runtime.timeline import merge_timelines
from tlt_megatron.trainer.build import Run
from tlt_megatron.trainer.loop import RLTrainer

log = logging.getLogger(__name__)

TABLE_COLUMNS = (
    "step",
    "critic/rewards/mean",
    "eval/accuracy",
    "response_length/mean",
    "response_length/max",
    "actor/grad_norm",
    "actor/entropy",
    "timing_s/gen",
    "timing_s/update_actor",
    "timing_s/step",
)


def finish_run(run: Run, config: RunConfig, run_dir: Path) -> None:
    """Write all results and print the run folder. A collective of all ranks, after the last step.

    A run that was stopped on request writes only its summary. The resumed run does the rest.
    """
    trainer = run.trainer
    if trainer.is_stopped:
        _finish_stopped(trainer, config, run_dir)
        return
    is_complete = trainer.step == config.run.num_steps
    if config.speculation.measure_gain and is_complete:
        trainer.measure_gain()
    if trainer.drafter is not None and trainer.world.is_first:
        trainer.drafter.export(run_dir / "hf_drafter")
    if config.checkpoint.export_hf and is_complete:
        weights = run.model.export_hf_weights()
        if trainer.world.is_first:
            save_hf_model(run_dir / "hf", weights, Path(config.model.path), dtype=run.dtype)
        else:
            _drain(weights)
    trainer.phases.timeline.flush()
    barrier(trainer.world)
    if not trainer.world.is_first:
        return
    trainer.history.write_summary(run_dir / "summary.json")
    if config.logging.trace:
        merge_timelines(run_dir)
    trainer.progress.close()
    trainer.progress.print_table(_rows(run_dir / "metrics.jsonl"), TABLE_COLUMNS)
    for name, value in trainer.history.summary().items():
        trainer.progress.message(f"{name}: {value:.4g}" if value is not None else f"{name}: -")
    trainer.progress.message(f"run folder: {run_dir.resolve()}")


def _finish_stopped(trainer: RLTrainer, config: RunConfig, run_dir: Path) -> None:
    trainer.phases.timeline.flush()
    if trainer.world.is_first:
        trainer.history.write_summary(run_dir / "summary.json")
        trainer.progress.close()
        log.info(
            "saved step %d of %d; resume with: --resume auto run.dir=%s",
            *(trainer.step, config.run.num_steps, run_dir),
        )


def _rows(path: Path) -> list[dict[str, float]]:
    """Return the metrics by step. The rows of an evaluation are merged into the row of its step."""
    rows: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    return [rows[step] for step in sorted(rows)]


def _drain(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Iterate over an export, to take part in its collectives. Only rank 0 writes the result."""
    for _ in tensors:
        pass
