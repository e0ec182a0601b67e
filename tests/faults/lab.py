"""What all schedules share: a tiny task, its variants, and the straight run of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.faults.processes import start_forked
from tests.tiny_task import make_tiny_task

NUM_STEPS = 4
_BASE = (
    f"run.num_steps={NUM_STEPS}",
    "rollout.num_samples=2",
    "checkpoint.interval=1",
    "logging.tensorboard=false",
)
VARIANTS = {
    "plain": ("rollout.num_prompts=2", "rollout.max_new_tokens=12", "eval.interval=2"),
    "tensor": (
        "rollout.num_prompts=2",
        "rollout.max_new_tokens=12",
        "data.eval=",
        "parallel.tensor=2",
    ),
    # Rank 0 has twice the work of rank 1, so that rank 1 has idle time.
    "spot": (
        "rollout.num_prompts=3",
        "rollout.max_new_tokens=16",
        "data.eval=",
        "speculation.enabled=true",
        "speculation.strategies=['3_1_3','ngram_4']",
        "spot.enabled=true",
        "drafter.algorithm=hass",
        "drafter.batch_tokens=64",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A configuration of the tiny run, and the folder of its straight run."""

    name: str
    config: Path
    overrides: tuple[str, ...]
    straight: Path
    num_steps: int = NUM_STEPS

    def arguments(self, run_dir: Path) -> list[str]:
        """Of launch/pretrain_rl.py."""
        return ["--config", str(self.config), f"run.dir={run_dir}", *_BASE, *self.overrides]


class Lab:
    """Makes the task and the straight runs in `root`, once."""

    def __init__(self, root: Path, names: tuple[str, ...] = tuple(VARIANTS)) -> None:
        self.root = root
        config = make_tiny_task(root / "task")
        self.variants = {
            name: Variant(
                name=name,
                config=config,
                overrides=VARIANTS[name],
                straight=root / "straight" / name,
            )
            for name in names
        }
        for variant in self.variants.values():
            arguments = [*variant.arguments(variant.straight), "checkpoint.keep=0"]
            job = start_forked(root / "straight_jobs" / variant.name, arguments)
            if not job.wait(300) or set(job.rank_codes.values()) != {0}:
                raise RuntimeError(f"the straight run of {variant.name} failed: {job.terminal}")

    def variant(self, name: str) -> Variant:
        """By name."""
        return self.variants[name]
