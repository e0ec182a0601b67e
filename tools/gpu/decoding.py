"""Stages 2b and 2c: plain and speculative decode passes of a 7B with random weights, as the engine
runs them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from tlt_megatron.config.schema import SpeculationSection
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.speculation.selector import FixedSelector
from tools.gpu.machine import Figures, Machine, seconds_of
from tools.gpu.random_engine import generate, make_engine
from tools.gpu.shapes import QWEN_2_5_7B, TINY

_ACCEPT_LENGTHS = (2.0, 4.5, 6.0)
_WARM_UP = 2  # passes: the drafter reads the context in the first one


def plain(machine: Machine, context: str) -> Iterator[Figures]:
    """Yield, by batch size, milliseconds of a pass and of its graph's replay, and the bytes of
    graphs.
    """
    config, sizes = machine.pick((QWEN_2_5_7B, (1, 8, 64)), (TINY, (1, 3)))
    num_new = machine.pick(64, 16)
    num_prompt = machine.pick(int(context), 128) - num_new
    with machine.gpu() as device, torch.no_grad():
        started = time.perf_counter()
        given: dict[str, Any] = {"num_prompt": num_prompt, "num_new": num_new}
        engine = make_engine(config, device, batch_size=max(sizes), **given)
        plan, free, graphs = engine.memory_plan(), device.free_bytes(), engine._graphs
        yield {"load_s": time.perf_counter() - started}
        summary = ""
        for batch_size in sizes:
            generate(engine, batch_size=batch_size, **given)  # captures
            (*_, captured), num_eager = graphs._captured.values(), engine.stats().eager_passes
            tokens, passes = generate(engine, batch_size=batch_size, **given)
            seconds = statistics.median(record.seconds for record in passes)
            device.release_cached()
            with torch.inference_mode():  # a pretended GPU runs the pass again
                replay_s = seconds_of(device, captured.replay)
            figures = {
                "pass_ms": 1e3 * seconds,
                "replay_ms": 1e3 * replay_s,
                "tokens_per_s": batch_size / seconds,
                "eager": num_eager,
                "distinct_tokens": len({token for row in tokens for token in row}),
                "graphs_gb": 1e-9 * (free - device.free_bytes() - plan.kv_bytes),
            }
            summary += f" b{batch_size}: {1e3 * seconds:.2f} ms, graph {1e3 * replay_s:.2f} ms,"
            summary += f" {batch_size / seconds:.0f} tok/s"
            yield {f"b{batch_size}": figures, "summary": summary}
        yield {
            "captures": len(graphs._captured),
            "capture_s": graphs.capture_s,
            "planned_shared_gb": 1e-9 * plan.graphs.shared_bytes(),
            "planned_pool_gb": 1e-9 * plan.graphs.bytes_pool(),
            "kv_gb": 1e-9 * plan.kv_bytes,
            "weights_gb": 1e-9 * plan.weights_bytes,
        }


def drafted(machine: Machine, batch_size_text: str) -> Iterator[Figures]:
    """Yield, by strategy, milliseconds of a step, and its speed over plain decoding at some accept
    lengths.

    The drafter is random, so little is accepted. A step costs the same whatever it accepts.
    """
    batch_size = machine.pick(int(batch_size_text), min(int(batch_size_text), 3))
    config = machine.pick(QWEN_2_5_7B, TINY)
    section = SpeculationSection(draft_vocab_size=machine.pick(None, 0))
    texts = machine.pick(section.strategies, ["6_1_6", "4_2_8"])
    strategies = [SpeculationStrategy.parse(text) for text in texts]
    # Short enough for 2048 positions with a tree behind them, and several steps of 7 tokens.
    num_new = machine.pick(100, 32)
    given: dict[str, Any] = {"num_prompt": machine.pick(2000, 100) - num_new, "num_new": num_new}
    with machine.gpu() as device, torch.no_grad():
        engine = make_engine(config, device, batch_size=batch_size, **given)
        embedding, head = engine.target_tensors()
        draft_config = make_draft_config(config, "eagle", embedding)
        model = DraftModel(
            draft_config, embedding_VD=embedding, lm_head_VD=head, dtype=torch.bfloat16
        )
        num_ids = section.num_draft_ids(config.vocab_size)
        draft = DraftInference(model, torch.bfloat16, num_ids=num_ids)
        speculation = Speculation(draft, FixedSelector(OFF), strategies)
        engine.set_speculation(speculation)
        plain_s, summary = 0.0, ""
        for strategy in (OFF, *strategies):  # all share one engine and its graphs
            speculation.selector = FixedSelector(strategy)
            generate(engine, batch_size=batch_size, **given)  # captures
            _, passes = generate(engine, batch_size=batch_size, **given)
            step_s = statistics.median(each.seconds for each in passes[_WARM_UP:])
            plain_s = plain_s or step_s
            reached = [n for n in _ACCEPT_LENGTHS if n <= strategy.depth + 1]
            figures = {
                "ms": 1e3 * step_s,
                "over_plain": {f"{n:g}": n * plain_s / step_s for n in reached},
                "eager": engine.stats().eager_passes,
            }
            summary += f" {strategy} {1e3 * step_s:.2f}ms"
            yield {str(strategy): figures, "summary": summary.strip()}
