"""`Trainer`: a run from a script or a notebook. It starts the ranks that `tlt train` starts, and
shows what they print.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_megatron.api.function_source import place_of
from tlt_megatron.cli import train_command
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
    20}).train().summary`.
    """

    def __init__(
        self,
        config: str | Path | Sequence[str | Path],
        *,
        reward: Callable[..., Any] | None = None,
        overrides: Mapping[str, object] | None = None,
        ranks: int = 1,
    ) -> None:
        """`config` is a YAML file, or several of which a later one goes over an earlier one.

        `reward` replaces `reward.function`. A function of a script or a notebook is copied to a
        file beside the run folder, with the imports and values that it uses. ValueError if that is
        impossible. `overrides` are settings such as `{"rollout.num_samples": 8}`. `ranks` is the
        number of processes, one per GPU.
        """
        files = [config] if isinstance(config, str | Path) else list(config)
        settings = dict(overrides or {})
        new = f"runs/{Path(files[-1]).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.folder = Path(str(settings.setdefault("run.dir", new)))
        if reward is not None:
            copy = self.folder.with_name(f"{self.folder.name}_reward.py")
            settings["reward.function"] = place_of(reward, copy)
        words = [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()]
        self._command = train_command([*map(str, files), *words, "--nproc-per-node", str(ranks)])

    def train(self) -> FinishedRun:
        """Run to the end and return what is left.

        KeyboardInterrupt stops the run, which first saves a checkpoint; a second one does not wait
        for it. The run also stops and saves if this process ends. RunStopped if something else
        stopped it. RuntimeError with the last line of the output if the run fails, ValueError if
        its settings are refused.
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
        last, is_interrupted, line = "", False, "-"
        while line:
            try:
                line = process.stdout.readline()
                sys.stdout.write(line)
                sys.stdout.flush()
                last = line.strip() or last
            except KeyboardInterrupt:
                is_interrupted = True
                process.send_signal(signal.SIGINT)
        code = process.wait()
        if is_interrupted:
            raise KeyboardInterrupt
        if code:
            raise (ValueError if code == 2 else RuntimeError)(last or f"exit code {code}")
        summary = self.folder / "summary.json"
        run = FinishedRun(folder=self.folder, summary=json.loads(summary.read_text("utf-8")))
        if run.summary["is_stopped"]:
            raise RunStopped(run)
        return run
