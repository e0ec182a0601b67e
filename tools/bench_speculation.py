"""What speculation brings on this machine: speed by batch size, and a long-tailed set of requests end to end.

    python tools/bench_speculation.py --model build/tiny_policy --drafter build/tiny_drafter --deepen 20

Every round runs all variants one after the other in one process, and ratios are taken within a round. `--deepen N` puts N
identity layers (attention output and MLP output zero) behind the policy's own: its tokens stay what they are, its cost
becomes that of a model N layers deeper, as the drafter's one layer is meant to be small beside its target. The tables say
so. Writes build/bench/speculation.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.table import Table

from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.prompts import load_prompts
from tlt_megatron.data.tokenizer import Tokenizer, load_tokenizer
from tlt_megatron.drafter.checkpoint import load_drafter
from tlt_megatron.engines.embedded.engine import EmbeddedEngine
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.speculation.beg_mab import BegMabSelector
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.selector import FixedSelector
from tlt_megatron.speculation.strategy import OFF, SpeculationStrategy
from tlt_megatron.types import FinishReason, Prompt, RolloutGroup, SamplingParams
from tools.load_engine import MAX_PROMPT_TOKENS, VERSION, load_engine
from tools.warmup_drafter import accept_length

PLAIN = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All variants on the same requests. By variant, plain decoding left out."""

    ratios: dict[
        str, dict[str, float]
    ]  # CPU time of plain decoding over the variant's: median, min, max over rounds
    plain_tokens_per_s: float
    accept_lengths: dict[str, float]
    mismatch_per_token: dict[str, float]


def main() -> None:
    """Measure, print two tables, write JSON."""
    options = _parse()
    torch.set_num_threads(1)
    console = Console()
    engine = load_engine(
        options.model,
        dtype=options.dtype,
        num_identity_layers=options.deepen,
        max_new_tokens=options.max_new_tokens,
    )
    tokenizer = load_tokenizer(options.model)
    section = DataSection(max_prompt_tokens=MAX_PROMPT_TOKENS)
    prompts = load_prompts(options.prompts, tokenizer, section).prompts()
    long_prompts = _long_prompts(engine, prompts, tokenizer, options)
    variants = _make_variants(engine, options)
    result: dict[str, object] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "command": " ".join(["python", *sys.argv]),
        "num_layers": load_model_config(options.model).num_layers + options.deepen,
        "dtype": options.dtype,
        "speedup_by_batch": {},
    }
    table = Table(
        title=f"speed-up over plain decoding, {result['num_layers']} layers, {options.dtype}"
    )
    for column in ("batch", PLAIN + " tok/s", *(name for name in variants if name != PLAIN)):
        table.add_column(column, justify="right")
    for batch_size in options.batch_sizes:
        params = SamplingParams(
            max_new_tokens=options.num_tokens, temperature=options.temperature, seed=1
        )
        chosen = [
            dataclasses.replace(long_prompts[i % len(long_prompts)], draw_index=i)
            for i in range(batch_size)
        ]
        measured = _compare(engine, variants, chosen, params, options.rounds)
        result["speedup_by_batch"][str(batch_size)] = measured.ratios
        cells = [
            f"{ratio['median']:.2f} ({measured.accept_lengths[name]:.1f})"
            for name, ratio in measured.ratios.items()
        ]
        table.add_row(str(batch_size), f"{measured.plain_tokens_per_s:,.0f}", *cells)
    console.print(table)
    console.print("in brackets: tokens out per verify pass")
    tail = _long_tail(engine, variants, prompts, tokenizer, options, console)
    result["long_tail_speedup"] = tail.ratios
    result["mismatch_per_token"] = tail.mismatch_per_token
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _long_prompts(
    engine: EmbeddedEngine,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    options: argparse.Namespace,
) -> list[Prompt]:
    """Prompts that the policy itself answers at length: what it is made to write after its end is nothing to measure."""
    params = SamplingParams(
        max_new_tokens=options.num_tokens,
        temperature=options.temperature,
        stop_token_ids=tokenizer.stop_token_ids,
        seed=1,
    )
    groups = engine.generate(prompts, params, policy_version=VERSION)
    ends = [group.rollouts[0].finish_reason for group in groups]
    return [p for p, end in zip(prompts, ends, strict=True) if end == FinishReason.LENGTH]


def _long_tail(
    engine: EmbeddedEngine,
    variants: dict[str, Speculation | None],
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    options: argparse.Namespace,
    console: Console,
) -> Comparison:
    params = SamplingParams(
        num_samples=options.num_samples,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        stop_token_ids=tokenizer.stop_token_ids,
        seed=2,
    )
    chosen = prompts[: options.num_requests // options.num_samples]
    measured = _compare(engine, variants, chosen, params, options.rounds)
    rate = f"{measured.plain_tokens_per_s:,.0f} tok/s"
    table = Table(title=f"{options.num_requests} long-tailed requests, plain {rate}")
    for column in (
        "variant",
        "speed-up median",
        "min",
        "max",
        "accept length",
        "mismatch per token",
    ):
        table.add_column(column, justify="right")
    for name, ratio in measured.ratios.items():
        cells = [f"{ratio[key]:.2f}" for key in ("median", "min", "max")]
        mismatch = measured.mismatch_per_token[name]
        table.add_row(name, *cells, f"{measured.accept_lengths[name]:.2f}", f"{mismatch:.1e}")
    console.print(table)
    return measured


def _compare(
    engine: EmbeddedEngine,
    variants: dict[str, Speculation | None],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    rounds: int,
) -> Comparison:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    accepted: dict[str, float] = {}
    tokens: dict[str, list[list[int]]] = {}
    num_tokens = 0
    warm_up = dataclasses.replace(params, num_samples=1, max_new_tokens=1)
    for round_index in range(rounds + 1):
        for name, speculation in variants.items():
            engine.set_speculation(speculation)
            engine.generate(prompts[:1], warm_up, policy_version=VERSION)  # allocates the KV
            groups: list[RolloutGroup] = []
            spent = _time(
                lambda g=groups: g.extend(engine.generate(prompts, params, policy_version=VERSION))
            )
            accepted[name] = accept_length(groups)
            tokens[name] = [r.token_ids.tolist() for g in groups for r in g.rollouts]
            num_tokens = engine.stats().num_generated_tokens
            if round_index > 0:  # the first round warms up, the adaptive selectors too
                seconds[name].append(num_tokens and spent / num_tokens)
    plain = seconds[PLAIN]
    ratios = {}
    for name, values in seconds.items():
        if name != PLAIN:
            each = [p / v for p, v in zip(plain, values, strict=True)]
            ratios[name] = {"median": statistics.median(each), "min": min(each), "max": max(each)}
    return Comparison(
        ratios=ratios,
        plain_tokens_per_s=1.0 / statistics.median(plain),
        accept_lengths=accepted,
        mismatch_per_token={name: _mismatch(tokens[PLAIN], tokens[name]) for name in ratios},
    )


def _mismatch(plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """First differences per token compared: two candidates closer than the rounding error may swap, and what follows such
    a token is another text."""
    num_compared = num_mismatches = 0
    for a, b in zip(plain, other, strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        num_mismatches += first is not None
        num_compared += len(a) if first is None else first + 1
    return num_mismatches / num_compared


def _time(run: Callable[[], None]) -> float:
    """Seconds of this process alone: what else the machine does does not count."""
    started = time.process_time()
    run()
    return time.process_time() - started


def _make_variants(
    engine: EmbeddedEngine, options: argparse.Namespace
) -> dict[str, Speculation | None]:
    strategies = [SpeculationStrategy.parse(text) for text in options.strategies]
    embedding, head = engine.target_tensors()
    model = load_drafter(options.drafter, embedding_VD=embedding, lm_head_VD=head)
    draft = DraftInference(model, embedding.dtype)
    variants: dict[str, Speculation | None] = {PLAIN: None}
    for strategy in strategies:
        variants[str(strategy)] = Speculation(draft, FixedSelector(strategy), [strategy])
    budgets = sorted({s.num_draft_tokens for s in strategies}, reverse=True)
    thresholds = [
        *(1, 3, 5, 9, 17)[: len(budgets)],
        33,
    ]  # the paper's elastic switch: off from 33 on
    variants["beg_mab"] = Speculation(
        draft, BegMabSelector([*strategies, OFF], thresholds), strategies
    )
    variants["cost_model"] = Speculation(draft, CostModelSelector(strategies), strategies)
    return variants


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="build/tiny_policy")
    parser.add_argument("--drafter", default="build/tiny_drafter")
    parser.add_argument("--prompts", default="build/tiny_policy/eval.jsonl")
    parser.add_argument(
        "--deepen", type=int, default=20, help="identity layers put behind the policy"
    )
    parser.add_argument(
        "--strategies", nargs="+", default=["3_1_3", "6_1_6", "10_1_10", "14_1_14", "4_2_8"]
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument(
        "--num-tokens", type=int, default=120, help="of each response, by batch size"
    )
    parser.add_argument("--num-requests", type=int, default=128)
    parser.add_argument("--num-samples", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=600)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--out", default="build/bench/speculation.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
