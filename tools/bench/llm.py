"""Measures TLT on a real language model: SmolLM2-135M-Instruct learns to add.

The settings are those of examples/smollm2.yaml.

    make bench-llm
    python -m tools.bench llm --parts decode         # without RL runs

Parts, each with a table and its keys in the JSON:

- `decode`: speed over plain decoding and differing tokens per token by dtype, and the price of
  batch-invariant decoding.
- `step`: RL steps by phase, for the variants of tools/bench/step.py. Rollouts are in float32, so
  that all variants draw the same tokens: in bfloat16 their lengths differ, and a step is faster or
  slower by luck.
- `learn`: held-out accuracy before and after a run of the example.

`decode` and `step` take the policy that imitated right sums (examples/smollm2_sft.yaml),
`learn` the model as it is. The accept lengths that the warm-up of the drafter measured are a table
too. `make bench-llm` also runs tools/bench/costs.py and tools/bench/rollout.py with the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from tlt_megatron.config.load import load_config
from tools.bench.interleaved import mismatch_per_token
from tools.bench.speed import bench_batch_invariant, bench_long_tail, load_policy, make_variants
from tools.bench.step import bench_speed, launching, print_by_step
from tools.print_tables import print_table
from tools.run_report.data import read_metrics

_DTYPES = ("bfloat16", "float32")
_QUIET = (
    "logging.rollouts=true",
    "logging.progress=none",
    "logging.trackers=[]",
    "checkpoint.keep=1",
)


def bench_decode(options: argparse.Namespace) -> dict[str, object]:
    """Return speed over plain decoding, mismatch per token and the price of batch invariance; by
    dtype.
    """
    config = load_config(options.config, options.overrides)
    (held_out, *_) = config.data.eval_files.values()
    settings = argparse.Namespace(
        model=options.policy, drafter=options.drafter, deepen=0,
        max_new_tokens=config.rollout.max_new_tokens, temperature=config.rollout.temperature,
        num_tokens=options.num_tokens, num_requests=options.num_requests, num_samples=1,
        strategies=config.speculation.strategies, rounds=options.rounds,
    )  # fmt: skip
    speedup, mismatch, invariant = {}, {}, {}
    for dtype in options.dtypes:
        policy = load_policy(settings, dtype)
        prompts = policy.prompts(held_out)
        variants = make_variants(policy, settings)
        comparison = bench_long_tail(policy, prompts, variants, settings)
        speedup[dtype] = {name: record.ratio for name, record in comparison.records.items()}
        mismatch[dtype] = mismatch_per_token(comparison.records.values())
        invariant[dtype] = bench_batch_invariant(policy, prompts, settings)
    return {
        "decode_speedup": speedup,
        "mismatch_per_token": mismatch,
        "batch_invariant_price": invariant,
    }


def bench_step(options: argparse.Namespace) -> dict[str, object]:
    """Return the tables of tools/bench/step.py for this model."""
    own = (f"model.path={options.policy}", "data.eval=", "rollout.dtype=float32")
    with launching(options, *_QUIET, *own) as launch:
        return bench_speed(launch, options)


def bench_learn(options: argparse.Namespace) -> dict[str, object]:
    """Return held-out accuracy before and after `--learn-steps` of the example, and the reward by
    step.
    """
    with launching(options, *_QUIET) as launch:
        folder = launch("learn", options.learn_steps)
        rows = read_metrics(folder / "metrics.jsonl")
    measured = [row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None]
    rewards = [row["critic/rewards/mean"] for row in rows if "critic/rewards/mean" in row]
    print_by_step("learning", {"reward": rewards})
    accuracy = {"before": measured[0], "after": measured[-1]}
    print(f"held-out accuracy: {accuracy['before']:.3f} to {accuracy['after']:.3f}")
    return {"accuracy": accuracy, "reward_by_step": rewards}


PARTS = {"decode": bench_decode, "step": bench_step, "learn": bench_learn}


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add("--config", default="examples/smollm2.yaml")
    add("--policy", default="build/smollm2_sums/hf", help="of decode and step")
    add("--drafter", default="build/smollm2_drafter", help="warmed up")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--dtypes", nargs="+", choices=_DTYPES, default=list(_DTYPES))
    add("--ranks", type=int, default=2)
    add("--rounds", type=int, default=2, help="of decode and step")
    add("--steps", type=int, default=4, help="of a round; the first is not timed")
    add("--learn-steps", type=int, default=20)
    add("--num-requests", type=int, default=10, help="of decode; two of ten are long")
    add("--num-tokens", type=int, default=40, help="of a response of batch-invariant decoding")
    add("overrides", nargs="*", metavar="section.key=value")


def run(options: argparse.Namespace) -> dict[str, object]:
    """Run the parts and print their tables. Return the values of the JSON."""
    result = _warm_up_table(Path(options.drafter) / "warm_up.json")
    for name in options.parts:
        result |= PARTS[name](options)
    return result


def _warm_up_table(path: Path) -> dict[str, object]:
    """Return the accept lengths that the drafter's warm-up measured; nothing without its file."""
    if not path.is_file():
        return {}
    measured = json.loads(path.read_text(encoding="utf-8"))
    rows = [[each["training_s"], each["steps"], each["accept_length"]] for each in measured]
    columns = ("training s", "steps", "accept length")
    print_table("the drafter's warm-up", columns, rows, num_names=0)
    return {"accept_length_by_training_s": measured}
