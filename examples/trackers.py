"""Trackers of your own: MLflow, SwanLab and Trackio, as
`logging.trackers=[examples/trackers.py:MlFlow]`, `:SwanLab`, `:Trackio`.

Each needs its package: `pip install mlflow`, `swanlab` or `trackio`. `logging.project` names the
project.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from tlt_megatron.runtime.trackers import COLUMNS, Row, Settings


class MlFlow:
    """Writes to MLflow: to MLFLOW_TRACKING_URI, else without a server to <run_dir>/mlflow.db and
    mlartifacts.

    A resumed run is a run of its own, because MLflow keeps both values of a step that is done
    again.
    """

    def __init__(
        self, *, run_dir: Path, project: str, config: Settings, resume_step: int | None
    ) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        folder, uri = run_dir.resolve(), os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = None if uri else (folder / "mlartifacts").as_uri()
        self._mlflow = mlflow
        self._client = mlflow.MlflowClient(tracking_uri=uri or f"sqlite:///{folder}/mlflow.db")
        found = self._client.get_experiment_by_name(project)
        experiment = (
            found.experiment_id if found else self._client.create_experiment(project, artifacts)
        )
        name = folder.name if resume_step is None else f"{folder.name}-from-step-{resume_step}"
        self._run_id = self._client.create_run(experiment, run_name=name).info.run_id
        self._client.log_dict(self._run_id, dict(config), "config.yaml")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = time.time_ns() // 1_000_000
        entries = [
            self._mlflow.entities.Metric(_mlflow_name(name), value, now_ms, step)
            for name, value in metrics.items()
        ]
        self._client.log_batch(self._run_id, metrics=entries)

    def log_responses(self, step: int, rows: Sequence[Row]) -> None:
        table = {name: [row[name] for row in rows] for name in COLUMNS}
        self._client.log_table(self._run_id, table, f"responses/step_{step:07d}.json")

    def close(self, *, failed: bool = False) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def _mlflow_name(name: str) -> str:
    """Return the name with "_" for the characters that MLflow refuses: "mean@4" becomes
    "mean_4".
    """
    return re.sub(r"[^\w\-. /]", "_", name)


class SwanLab:
    """Writes to SwanLab as SWANLAB_MODE says, else without network to <run_dir>/swanlog.

    `swanlab watch` shows that folder if the package swanlab[dashboard] is installed.
    """

    def __init__(
        self, *, run_dir: Path, project: str, config: Settings, resume_step: int | None
    ) -> None:
        import swanlab  # pyright: ignore[reportMissingImports]

        folder = run_dir.resolve()
        default = "offline" if find_spec("swanboard") is None else "local"
        self._swanlab = swanlab
        swanlab.init(
            project=project,
            experiment_name=folder.name,
            logdir=str(folder / "swanlog"),
            mode=os.environ.get("SWANLAB_MODE") or default,
            config=dict(config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def log_responses(self, step: int, rows: Sequence[Row]) -> None:
        texts = [
            self._swanlab.Text("\n\n".join(f"{name}: {row[name]}" for name in COLUMNS))
            for row in rows
        ]
        self._swanlab.log({"responses": texts}, step=step)

    def close(self, *, failed: bool = False) -> None:
        self._swanlab.finish()


class Trackio:
    """Writes to Trackio: to a Space of the Hub that TRACKIO_SPACE_ID names, else to this machine,
    where `trackio show` shows it.

    A resumed run goes on in its own curves.
    """

    def __init__(
        self, *, run_dir: Path, project: str, config: Settings, resume_step: int | None
    ) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._trackio = trackio
        trackio.init(
            project=project,
            name=run_dir.resolve().name,
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            config=dict(config),
            resume="never" if resume_step is None else "allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def log_responses(self, step: int, rows: Sequence[Row]) -> None:
        """Write nothing: it has no table of texts that all versions share."""

    def close(self, *, failed: bool = False) -> None:
        self._trackio.finish()
