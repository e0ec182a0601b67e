"""The features of a run that `make pairs` combines, and the check of a combination.

A combination runs two steps on two ranks. It must equal, token for token: itself resumed after step
1 and, with speculation, itself without (weights bit for bit), and itself on one rank (weights to
rounding). Or the program refuses it, with one line that names a setting of every feature.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tests.faults.case import compare
from tests.faults.lab import copy_stopped
from tests.tiny_task import (
    FEATURES,
    make_tiny_task,
    run_forked,
    write_environment,
    write_teacher,
    write_tools,
)

ON_A_MIXTURE = {"experts", "routing replay"}
ONE_RANK = ("parallel.expert=1", "parallel.context=1")
PLAIN = ("speculation.enabled=false", "spot.enabled=false")
BASE = (
    "run.num_steps=2 checkpoint.interval=1 checkpoint.keep=0 data.eval= logging.trackers=[]"
    " rollout.num_samples=2 rollout.num_prompts=4 rollout.max_new_tokens=16"
    " optimizer.eps=1e-5"  # so that Adam does not enlarge the rounding of another layout
)
# Two values of one setting: there is no run of both.
EXCLUSIVE = (
    ("KL in the loss", "KL in the reward"),
    ("conversations", "environment"),
    ("conversations", "tools"),
    ("environment", "tools"),
    ("speculation", "own layer"),
)
# Features that one run cannot have. The last three are refused by name.
CUT = "partial rollouts"
APART = (*EXCLUSIVE, (CUT, "conversations"), (CUT, "environment"), ("critic", "LoRA"))
# The policies of a dense task and of a mixture's, by whether they have a layer for MTP.
KINDS = {False: ("qwen2", "qwen3_moe"), True: ("mimo", "glm4_moe")}
# `make test` checks the pairs of `draw(SEED)`. PAIRS_SEED draws others.
SEED = int(os.environ.get("PAIRS_SEED", "0"))


def make_tasks(root: Path) -> dict[str, Path]:
    """Write the tasks of KINDS below `root`, and return their configs. Their policies end turns
    early.
    """
    configs = {}
    for has_mtp, kinds in KINDS.items():
        for kind in kinds:
            configs[kind] = make_tiny_task(root / kind, kind=kind, has_mtp=has_mtp)
            write_environment(root / kind)
            write_tools(root / kind)
            write_teacher(root / kind, kind)
    return configs


def all_pairs() -> list[tuple[str, str]]:
    """Return every two features that one run can have."""
    return [pair for pair in itertools.combinations(FEATURES, 2) if pair not in EXCLUSIVE]


def draw(seed: int) -> list[list[str]]:
    """Return three combinations of one size that have every feature once, but for tools, which
    tests/e2e/test_tools.py combines: four features exclude each other.
    """
    rng = random.Random(seed)
    drawn = [name for name in FEATURES if name != "tools"]
    while True:
        order = rng.sample(drawn, len(drawn))
        thirds = [order[start::3] for start in range(3)]
        if not any(set(pair) <= set(third) for pair in APART for third in thirds):
            return thirds


def check(features: Sequence[str], tasks: Mapping[str, Path], root: Path) -> tuple[str, list[str]]:
    """Run a combination and its references below the empty folder `root`.

    Returns the line with which it is refused, or "" if it runs, and in words what differs from the
    references.
    """
    has_own = "own layer" in features
    config = tasks[KINDS[has_own][bool(ON_A_MIXTURE.intersection(features))]]
    own = [*BASE.split(), *_settings(features, config)]
    straight = root / "straight"

    def start(num_ranks: int, name: str, *further: str) -> tuple[int, str]:
        arguments = ["--config", config, f"run.dir={root / name}", *own, *further]
        results = run_forked(num_ranks, *arguments)
        said = "".join(text for _, text in results)
        return max(code for code, _ in results), said

    code, said = start(2, "straight")
    if code:
        return _refusal(features, config, code, said)
    copy_stopped(straight, root / "resumed", 1)
    references = {"resumed": (2, ("--resume", "auto")), "one rank": (1, ONE_RANK)}
    if has_own or "speculation" in features:
        references["plain"] = 2, PLAIN
    found = []
    for name, (num_ranks, further) in references.items():
        code, said = start(num_ranks, name, *further)
        if code:
            found.append(f"{name}: exit code {code}: {said[-3000:]}")
        else:
            is_rounded = name == "one rank"
            differing = compare(
                root / name, straight, is_rounded=is_rounded, trains_own_layer=has_own
            )
            found += [f"{name}: {each}" for each in differing]
    return "", found


def _settings(features: Collection[str], config: Path) -> list[str]:
    words = " ".join(overrides for name, overrides in FEATURES.items() if name in features)
    return words.replace("{task}", str(config.parent)).split()


def _refusal(features: Sequence[str], config: Path, code: int, said: str) -> tuple[str, list[str]]:
    """Return the line that refuses a combination, and what is wrong with it."""
    lines = [line for line in said.splitlines() if line.startswith("pretrain_rl: ")]
    line = lines[0].removeprefix("pretrain_rl: ") if lines else ""
    unnamed = [
        name
        for name in features
        if not any(s.partition("=")[0] in line for s in _settings([name], config))
    ]
    if code != 2 or not line or unnamed or "Traceback" in said:
        return "", [f"exit code {code}, not refused by name: {said[-3000:]}"]
    return line.replace(f"{config.parent}/", ""), []
