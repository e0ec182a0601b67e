"""Measures TLT on a real language model: SmolLM2-135M-Instruct learns to add (examples/smollm2.yaml).

    make bench-llm
    python -m tools.bench llm --parts cost decode    # without RL runs
    python -m tools.bench llm --quick --parts cost decode

Parts, each with a table and its keys in the JSON:

- `cost`: a draft step and sampling noise beside a decode pass of the same shapes, without context.
- `decode`: speed over plain decoding and differing tokens per token by dtype, and what batch-invariant decoding costs.
- `step`: RL steps by phase with speculation off, with a frozen drafter, with TLT, and from a random drafter. See
  tools/bench/step.py for how the variants alternate.
- `learn`: held-out accuracy before and after a run of the example.

The drafter is warmed up first, for `--warm-up-minutes`, if `--drafter` is not there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from tlt_megatron.config.load import load_config
from tlt_megatron.config.schema import RunConfig, SpeculationSection
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.models.transformer import Transformer
from tools import warmup_drafter
from tools.bench.batch_invariant import bench_batch_invariant
from tools.bench.interleaved import mismatch_per_token
from tools.bench.measure import cpu_seconds, interleave, print_table, ratios
from tools.bench.noise import NoContext, measure, random_model
from tools.bench.setting import make_drafts, make_setting, make_variants
from tools.bench.speed import bench_long_tail
from tools.bench.step import Launcher, bench_speed
from tools.bench.step_tables import print_by_step

QUICK = {
    "cost_rounds": 1,
    "rounds": 1,
    "steps": 2,
    "learn_steps": 2,
    "num_requests": 4,
    "num_tokens": 8,
    "warm_up_minutes": 0.01,
}
_BATCH_SIZES = (1, 8)  # of the part `cost`
_DTYPES = ("bfloat16", "float32")


def bench_cost(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Return the share of a decode pass that a draft step and that noise take, by dtype and batch size."""
    model = load_model_config(load_config(options.config, options.overrides).model.path)
    draft: dict[str, dict[str, dict[str, float]]] = {dtype: {} for dtype in options.dtypes}
    noise: dict[str, dict[str, dict[str, float]]] = {dtype: {} for dtype in options.dtypes}
    rows = []
    for dtype in options.dtypes:
        target = random_model(model, getattr(torch, dtype))
        for size in _BATCH_SIZES:
            shares = noise[dtype][str(size)] = measure(target, size, options.cost_rounds)[
                "search_share"
            ]
            steps = draft[dtype][str(size)] = _draft_step_share(target, size, options.cost_rounds)
            cells = [f"{value:.3f}" for each in (steps, shares) for value in each.values()]
            rows.append([dtype, str(size), *cells])
    title = (
        f"beside a pass of {model.num_layers} layers and {model.vocab_size:,} tokens, no context"
    )
    columns = ("dtype", "batch", "draft step", "min", "max", "noise", "min", "max")
    print_table(console, title, columns, rows)
    return {"draft_step_fraction": draft, "noise_fraction": noise}


@torch.no_grad()
def _draft_step_share(target: Transformer, batch_size: int, rounds: int) -> dict[str, float]:
    """Return draft step over decode pass, heads included; choosing tokens is in neither."""
    config = target.config
    drafter = DraftModel(
        make_draft_config(config, "eagle", target.embedding),
        embedding_VD=target.embedding,
        lm_head_VD=target.lm_head,
    )
    num_ids = SpeculationSection().num_draft_ids(config.vocab_size)
    draft = DraftInference(drafter, target.dtype, num_ids=num_ids)
    draft.rotary.reserve(1)
    token_ids_B = torch.arange(batch_size)
    first_B = torch.zeros(batch_size, dtype=torch.int64)
    hidden_BD = torch.randn(batch_size, config.hidden_size).to(target.dtype)
    variants = {
        "pass": lambda: target.logits(target.forward(token_ids_B, first_B, NoContext())),
        "draft": lambda: draft.logits(
            draft.forward(token_ids_B, hidden_BD, first_B, NoContext())[1]
        ),
    }
    seconds = interleave(variants, rounds, cpu_seconds)
    return ratios(seconds["draft"], seconds["pass"])


def bench_decode(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Return speed over plain decoding, mismatch per token and the price of batch invariance, by dtype."""
    config = load_config(options.config, options.overrides)
    settings = _decode_settings(options, config)
    speedup, mismatch, invariant = {}, {}, {}
    for dtype in options.dtypes:
        setting = make_setting(settings, dtype)
        variants = make_variants(make_drafts(setting, options.drafter, None), settings)
        comparison = bench_long_tail(setting, variants, settings, console)
        speedup[dtype] = {name: record.ratio for name, record in comparison.records.items()}
        mismatch[dtype] = mismatch_per_token(comparison.records.values())
        invariant[dtype] = bench_batch_invariant(setting, settings, console)
    return {
        "decode_speedup": speedup,
        "mismatch_per_token": mismatch,
        "batch_invariant_price": invariant,
    }


def _decode_settings(options: argparse.Namespace, config: RunConfig) -> argparse.Namespace:
    """Return the options that tools/bench/setting.py reads, from those of the run."""
    return argparse.Namespace(
        model=config.model.path,
        drafter=options.drafter,
        prompts=config.data.eval,
        deepen=0,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        num_tokens=options.num_tokens,
        num_requests=options.num_requests,
        num_samples=2,
        strategies=config.speculation.strategies,
        rounds=options.rounds,
        fixed_rounds=options.rounds,
    )


def bench_step(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Return the tables of tools/bench/step.py for this model."""
    with tempfile.TemporaryDirectory(prefix="bench-llm-") as root:
        launcher = _launcher(options, console, Path(root), "data.eval=", "checkpoint.keep=1")
        return bench_speed(launcher, options)


def bench_learn(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Return held-out accuracy before and after `--learn-steps` of the example, and the reward by step."""
    with tempfile.TemporaryDirectory(prefix="bench-llm-") as temporary:
        root = Path(temporary)
        launcher = _launcher(options, console, root, "checkpoint.keep=1")
        run = launcher.run("learn", options.learn_steps)
        lines = (root / "learn" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    measured = [row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None]
    rewards = [record.metrics["critic/rewards/mean"] for record in run.values()]
    print_by_step(console, "learning", {"reward": rewards})
    accuracy = {"before": measured[0], "after": measured[-1]}
    console.print(f"held-out accuracy: {accuracy['before']:.3f} to {accuracy['after']:.3f}")
    return {"accuracy": accuracy, "reward_by_step": rewards}


def _launcher(
    options: argparse.Namespace, console: Console, root: Path, *overrides: str
) -> Launcher:
    quiet = ("logging.rollouts=true", "logging.progress=none", "logging.tensorboard=false")
    return Launcher(
        root=root,
        config=options.config,
        ranks=options.ranks,
        overrides=[*quiet, *overrides, *options.overrides],
        console=console,
    )


PARTS: dict[str, Callable[[argparse.Namespace, Console], dict[str, object]]] = {
    "cost": bench_cost,
    "decode": bench_decode,
    "step": bench_step,
    "learn": bench_learn,
}


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add("--config", default="examples/smollm2.yaml")
    add("--drafter", default="build/smollm2_drafter", help="warmed up here if absent")
    add("--warm-up-minutes", type=float, default=10.0)
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--dtypes", nargs="+", choices=_DTYPES, default=list(_DTYPES))
    add("--ranks", type=int, default=2)
    add("--cost-rounds", type=int, default=15)
    add("--rounds", type=int, default=2, help="of decode and step")
    add("--steps", type=int, default=4, help="of a round; the first is not timed")
    add("--learn-steps", type=int, default=24)
    add("--num-requests", type=int, default=16, help="of decode")
    add("--num-tokens", type=int, default=40, help="of a response of batch-invariant decoding")
    add("overrides", nargs="*", metavar="section.key=value")


def run(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Warm the drafter up, run the parts and print their tables. Return the values of the JSON."""
    needs_drafter = {"decode", "step"} & set(options.parts)
    if needs_drafter and not (Path(options.drafter) / "config.json").is_file():
        minutes = ("--minutes", str(options.warm_up_minutes), "--steps", "1000000")
        folders = ("--config", options.config, "--out", options.drafter)
        warmup_drafter.main([*folders, *minutes, "--strategy", "4_1_4"])
    result: dict[str, object] = {}
    for name in options.parts:
        result |= PARTS[name](options, console)
    return result
