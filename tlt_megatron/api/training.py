"""`Trainer`: a run from a script or a notebook. It starts the ranks that `tlt train` starts, and
shows what they print.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from tlt_megatron.cli import train_command
from tlt_megatron.rewards.carried_function import save_function
from tlt_megatron.runtime.parent import run_environment
from tlt_megatron.trainer.summary import read_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """What a run left behind."""

    folder: Path
    summary: dict[str, Any]  # summary.json: rewards, accuracy, speed-up, seconds

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each RL step, oldest first. Row 0 is the evaluation before the
        first step, if there is one.
        """
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def policy(self) -> Path:
        """Return the trained policy as a Hugging Face folder, which `Engine` takes."""
        return self.folder / "hf"

    @property
    def drafter(self) -> Path:
        """Return its drafter, which `Engine` takes. It is there if the run trained one."""
        return self.folder / "hf_drafter"


class RunStopped(Exception):
    """A run was stopped on request, by SIGTERM say, before its last step. It has saved a
    checkpoint.
    """

    def __init__(self, run: FinishedRun) -> None:
        super().__init__(
            f"{run.folder}: stopped on request after step {run.summary.get('num_steps')} and saved;"
            f' continue with overrides={{"run.dir": "{run.folder}", "checkpoint.resume": "auto"}}'
        )
        self.run = run  # its `policy` is not there yet


class Trainer:
    """One run of a configuration.

    Example: `Trainer("my.yaml", reward=my_function, overrides={"run.num_steps":
    20}).train().summary`, or without a file `Trainer(model="Qwen/Qwen3-0.6B", data=[{"prompt":
    "12+7=", "label": "19"}], reward=my_function)`.
    """

    def __init__(
        self,
        config: str | Path | Sequence[str | Path] = (),
        *,
        model: str | PathLike[str] | None = None,
        data: str | PathLike[str] | Iterable[Mapping[str, Any]] | None = None,
        reward: Callable[..., Any] | None = None,
        overrides: Mapping[str, object] | None = None,
        ranks: int = 1,
    ) -> None:
        """`config` is a YAML file, or several of which a later one goes over an earlier one.
        Without one, `model` and `data` are needed, and every other setting has its default.

        `model` replaces `model.path`. `data` replaces `data.train`: a file, a data set of the Hub
        such as `openai/gsm8k/main:train`, or rows, which are written to the run folder. ValueError
        for rows that are no JSON objects.

        `reward` replaces `reward.function`: any callable, such as a function of a script or a
        notebook, a lambda, a partial or an object. It is copied to files beside the run folder,
        with the values that it uses now. ValueError if that is impossible. `overrides` are settings
        such as `{"rollout.num_samples": 8}`. `ranks` is the number of processes, one per GPU.
        """
        if type(ranks) is not int or ranks < 1:
            raise ValueError(f"ranks={ranks!r}: must be an integer >= 1")
        files = [config] if isinstance(config, str | Path) else list(config)
        if not files and (model is None or data is None):
            raise ValueError("Trainer needs a config, or both model and data")
        settings = dict(overrides or {})
        name = Path(files[-1]).stem if files else "trainer"
        new = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.folder = Path(str(settings.setdefault("run.dir", new)))
        if model is not None:
            settings["model.path"] = fspath(model)
        if data is not None:
            is_name = isinstance(data, str | PathLike)
            settings["data.train"] = fspath(data) if is_name else _write_rows(data, self.folder)
        if reward is not None:
            file = self.folder.with_name(f"{self.folder.name}_reward.py")
            settings["reward.function"] = save_function(reward, file, run_environment())
        words = [f"{key}={json.dumps(value, default=_plain)}" for key, value in settings.items()]
        self._command = train_command([*map(str, files), *words, "--nproc-per-node", str(ranks)])

    def train(self) -> FinishedRun:
        """Run to the end and return what is left.

        KeyboardInterrupt stops the run, which first saves a checkpoint; a second one does not wait
        for it. The run also stops and saves if this process ends. RunStopped if something else
        stopped it. RuntimeError with the reason and the way to go on if the run fails, ValueError
        if its settings are refused.
        """
        # Ranks are stopped by one signal to the launcher, not by the terminal's to everyone.
        process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=run_environment(),
            start_new_session=True,
        )
        assert process.stdout is not None
        last, is_interrupted, line = deque[str](maxlen=3), False, "-"
        while line:
            try:
                line = process.stdout.readline()
                sys.stdout.write(line)
                sys.stdout.flush()
                last.extend([line.strip()] if line.strip() else [])
            except KeyboardInterrupt:
                is_interrupted = True
                process.send_signal(signal.SIGINT)
        code = process.wait()
        if is_interrupted:
            raise KeyboardInterrupt
        if code:
            goes_on = last and last[-1].startswith("overrides=")  # after the reason, and a line
            said = " ".join(last) if goes_on else [f"exit code {code}", *last][-1]
            raise (ValueError if code == 2 else RuntimeError)(said)
        summary = self.folder / "summary.json"
        run = FinishedRun(folder=self.folder, summary=json.loads(summary.read_text("utf-8")))
        if run.summary["is_stopped"]:
            raise RunStopped(run)
        return run


def _plain(value: Any) -> Any:
    """Return a setting's value for JSON: numbers of NumPy and torch as such, paths as text."""
    return _number(value) if hasattr(value, "tolist") else str(value)


def _number(value: Any) -> Any:
    """Return a number or array of NumPy or torch for JSON. TypeError for anything else."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} has no form in it")
    return value.tolist()


def _write_rows(rows: Iterable[Mapping[str, Any]], folder: Path) -> str:
    """Write the rows of a data set to a file whose name depends on them, so that the file of an
    earlier run stays. Return its path.
    """
    lines = []
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise ValueError(f"data={rows!r:.80}: must be a file, a data set's name, or a list of rows")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise ValueError(f"data: row {number} is {row!r:.80}: must be a dict")
        try:
            lines.append(json.dumps(dict(row), allow_nan=False, default=_number) + "\n")
        except (TypeError, ValueError) as error:
            raise ValueError(f"data: row {number} is no JSON: {error}") from None
    if not lines:
        raise ValueError("data: has no rows")
    text = "".join(lines)
    file = folder / f"data-{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")
    return str(file.resolve())
