"""What all schedules share: a tiny task, the variants of its run, and the straight run of each."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.faults.processes import start
from tests.ranks import LIMIT_S
from tests.tiny_task import FEATURES, make_tiny_task, write_environment, write_tools
from tlt_megatron.trainer.saving.manifest import POINTER

NUM_STEPS = 4
RUN_LIMIT_S = LIMIT_S  # for a run, which takes seconds
_BASE = (
    f"run.num_steps={NUM_STEPS} checkpoint.interval=1 logging.trackers=[]"
    " rollout.num_samples=2 rollout.num_prompts=2 rollout.max_new_tokens=12"
)
MIXTURE, TOOLS = "mixture", "tools"
MANY = "64 conversations"  # of each rank at once, in one worker


def _features(*names: str) -> str:
    return " ".join(["data.eval=", *(FEATURES[name] for name in names)])


VARIANTS = {
    "plain": "eval.interval=2",
    "tensor": "data.eval= parallel.tensor=2",
    # Rank 0 has twice the work of rank 1, so that rank 1 has idle time.
    "spot": _features("speculation")
    + " drafter.algorithm=hass rollout.num_prompts=3 rollout.max_new_tokens=16",
    "critic": _features("critic") + " critic.warmup_steps=1",
    "partial": _features("partial rollouts"),
    "conversation": _features("conversations"),
    "environment": _features("environment"),
    "dynamic": _features("dynamic sampling", "speculation"),
    # combinations
    "conversation with critic": _features("conversations", "critic", "KL in the reward"),
    "partial and dynamic": _features("partial rollouts", "dynamic sampling"),
    # eps, so that Adam does not enlarge the rounding of another layout
    MIXTURE: _features(
        *("experts", "routing replay", "partial rollouts", "KL in the loss", "speculation")
    )
    + " optimizer.eps=1e-5",
}
# `--environments`: the same, but the turns have an environment or tools.
ENVIRONMENTS = {
    "plain": FEATURES["environment"] + " eval.interval=2",
    "tensor": _features("environment") + " parallel.tensor=2",
    "spot": _features("environment", "stop strings", "speculation")
    + " drafter.algorithm=hass rollout.num_prompts=3 rollout.max_new_tokens=16",
    "critic": _features("environment", "critic") + " critic.warmup_steps=1",
    "dynamic": _features("environment", "dynamic sampling", "speculation"),
    "conversation": _features("conversations", "speculation"),
    TOOLS: _features("tools", "speculation"),
    MANY: _features("environment").replace(":Search", ":Patient")
    + " rollout.num_prompts=32 rollout.num_samples=4 rollout.max_batch_size=64 reward.num_workers=1",
}
LAYOUTS = {  # another one than two data-parallel ranks, as overrides and number of ranks
    "one rank": (("parallel.tensor=1",), 1),
    "tensor": (("parallel.tensor=2",), 2),
    "pipeline": (("parallel.tensor=1", "parallel.pipeline=2"), 2),
    "context": (("parallel.tensor=1", "parallel.context=2"), 2),
    "data": (("parallel.tensor=1",), 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A configuration of the tiny run, and the folder of its straight run."""

    name: str
    config: Path
    straight: Path
    settings: str = ""

    @property
    def environment(self) -> str:
        """The name of the class or function that answers turns; "" for none."""
        found = re.search(r"rollout.environment=\S+:(\w+)", self.settings)
        return found[1] if found else ""

    @property
    def layout(self) -> str:
        """The one of LAYOUTS that the straight run has."""
        return "tensor" if self.name == "tensor" else "data"

    def at(self, layout: str) -> tuple[tuple[str, ...], int]:
        """Return the overrides and the number of ranks of one of LAYOUTS."""
        overrides, num_ranks = LAYOUTS[layout]
        if self.name == MIXTURE:  # the ranks of a pipeline stage share the experts
            overrides += (f"parallel.expert={1 if layout == 'pipeline' else num_ranks}",)
        return overrides, num_ranks

    def arguments(self, run_dir: Path) -> list[str]:
        """The arguments of launch/pretrain_rl.py."""
        own = self.settings.replace("{task}", str(self.config.parent)).split()
        return ["--config", str(self.config), f"run.dir={run_dir}", *_BASE.split(), *own]

    def copy_stopped(self, run_dir: Path, step: int) -> Path:
        """Copy the straight run as it was when it had saved `step`; returns its checkpoints."""
        return copy_stopped(self.straight, run_dir, step)


def copy_stopped(straight: Path, run_dir: Path, step: int) -> Path:
    """Copy a run with all checkpoints as it was when it had saved `step`, with the default of two
    checkpoints; returns their folder.
    """
    later = [f"iter_{n:07d}" for n in range(1, NUM_STEPS + 1) if not step - 2 < n <= step]
    later += [f"step_{n:07d}.*" for n in range(step + 1, NUM_STEPS + 1)]
    ignored = shutil.ignore_patterns("summary.json", "trace.json", "hf", *later)
    shutil.copytree(straight, run_dir, ignore=ignored)
    (run_dir / "checkpoints" / POINTER).write_text(str(step))
    return run_dir / "checkpoints"


class Lab:
    """Makes the task and the straight runs in `root`, once; two runs at a time."""

    def __init__(self, root: Path, variants: Mapping[str, str] = VARIANTS) -> None:
        """`variants`: VARIANTS or ENVIRONMENTS."""
        config, tools = make_tiny_task(root / "task"), make_tiny_task(root / "tools")
        for folder in (root / "task", root / "tools"):
            write_environment(folder)
        write_tools(root / "tools")
        configs = {MIXTURE: make_tiny_task(root / "mixture", kind="qwen3_moe"), TOOLS: tools}
        self.variants = {
            name: Variant(
                name=name,
                config=configs.get(name, config),
                straight=root / "straight" / name,
                settings=settings,
            )
            for name, settings in variants.items()
        }
        jobs = []
        for name, variant in self.variants.items():
            arguments = [*variant.arguments(variant.straight), "checkpoint.keep=0"]
            jobs.append(start(root / "jobs" / name, arguments))
            if len(jobs) > 1:
                jobs[-2].wait(RUN_LIMIT_S)
        for job in jobs:
            if not job.wait(RUN_LIMIT_S) or not job.is_success:
                raise RuntimeError(f"a straight run failed: {job.terminal}")
