"""What all schedules share: a tiny task, the variants of its run, and the straight run of each."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.faults.processes import start
from tests.tiny_task import TLT, make_tiny_task, write_environment
from tlt_megatron.trainer.saving.manifest import POINTER

NUM_STEPS = 4
RUN_LIMIT_S = 300.0  # for a run, which takes seconds, on a loaded machine
_BASE = (
    f"run.num_steps={NUM_STEPS} checkpoint.interval=1 logging.trackers=[]"
    " rollout.num_samples=2 rollout.num_prompts=2 rollout.max_new_tokens=12"
)
_TLT = " ".join(TLT)
_CRITIC = "algorithm.advantage=gae critic.lr=1e-3 critic.warmup_steps=1"
_PARTIAL = "algorithm.tis_cap=2 rollout.over_sampling_prompts=4 rollout.partial_rollout_tokens=5"
_CONVERSATION = (
    "rollout.environment={task}/environment.py:answer rollout.max_turns=3"
    " rollout.max_observation_tokens=12"
)
MIXTURE = "mixture"
VARIANTS = {
    "plain": "eval.interval=2",
    "tensor": "data.eval= parallel.tensor=2",
    # Rank 0 has twice the work of rank 1, so that rank 1 has idle time.
    "spot": f"data.eval= {_TLT} drafter.algorithm=hass rollout.num_prompts=3"
    " rollout.max_new_tokens=16",
    "critic": f"data.eval= {_CRITIC}",
    "partial": f"data.eval= {_PARTIAL}",
    "conversation": f"data.eval= {_CONVERSATION}",
    "dynamic": f"data.eval= {_TLT} algorithm.filter_groups=score",
    # combinations
    "conversation with critic": f"data.eval= {_CONVERSATION} {_CRITIC}",
    "partial and dynamic": f"data.eval= {_PARTIAL} algorithm.filter_groups=score",
    MIXTURE: f"data.eval= {_TLT} rollout.routing_replay=true parallel.expert=2"
    " optimizer.eps=1e-5",  # so that Adam does not enlarge the rounding of another layout
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
        own = VARIANTS[self.name].replace("{task}", str(self.config.parent)).split()
        return ["--config", str(self.config), f"run.dir={run_dir}", *_BASE.split(), *own]

    def copy_stopped(self, run_dir: Path, step: int) -> Path:
        """Copy the straight run as it was when it had saved `step`, with the default of two
        checkpoints; returns their folder.
        """
        later = [f"iter_{n:07d}" for n in range(1, NUM_STEPS + 1) if not step - 2 < n <= step]
        later += [f"step_{n:07d}.*" for n in range(step + 1, NUM_STEPS + 1)]
        ignored = shutil.ignore_patterns("summary.json", "trace.json", "hf", *later)
        shutil.copytree(self.straight, run_dir, ignore=ignored)
        (run_dir / "checkpoints" / POINTER).write_text(str(step))
        return run_dir / "checkpoints"


class Lab:
    """Makes the task and the straight runs in `root`, once; two runs at a time."""

    def __init__(self, root: Path) -> None:
        config = make_tiny_task(root / "task")
        write_environment(root / "task")
        configs = {MIXTURE: make_tiny_task(root / "mixture", kind="qwen3_moe")}
        self.variants = {
            name: Variant(
                name=name, config=configs.get(name, config), straight=root / "straight" / name
            )
            for name in VARIANTS
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
