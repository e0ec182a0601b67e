"""Stage 2b: plain decode passes of a 7B with random weights, as the engine runs them, and where
their time goes.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, supported_activities

from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.engines.embedded.graph_plan import GraphKey
from tools.gpu.machine import Figures, Machine, seconds_of
from tools.gpu.random_engine import generate, make_engine
from tools.gpu.shapes import QWEN_2_5_7B, TINY

_PROFILED = 10  # passes
_TOP = 15


def plain(machine: Machine, numbers: str) -> Iterator[Figures]:
    """Yield, by batch size, milliseconds of a pass, of its graph's replay and of its kernels, and
    the bytes of graphs. `numbers` are the context and the batch sizes.
    """
    context, *batches = map(int, numbers.split(","))
    config, sizes = machine.pick((QWEN_2_5_7B, batches), (TINY, [1, 3][: len(batches)]))
    num_new = machine.pick(64, 16)
    num_prompt = machine.pick(context, 128) - num_new
    with machine.gpu() as device, torch.no_grad():
        started = time.perf_counter()
        given: dict[str, Any] = {"num_prompt": num_prompt, "num_new": num_new}
        engine = make_engine(config, device, batch_size=max(sizes), **given)
        plan, free, graphs = engine.memory_plan(), device.free_bytes(), engine._graphs
        yield {"load_s": time.perf_counter() - started}
        summary = ""
        for batch_size in sizes:
            generate(engine, batch_size=batch_size, **given)  # captures
            num_eager = engine.stats().eager_passes
            tokens, passes = generate(engine, batch_size=batch_size, **given)
            captured = graphs._captured[replayed_graph(graphs.num_replays, batch_size)]
            seconds = statistics.median(record.seconds for record in passes)
            device.release_cached()
            with torch.inference_mode():  # a pretended GPU runs the pass again
                replay_s = seconds_of(captured.replay)
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
            figures |= _profiled(engine, batch_size, given, seconds)
            if "nodes" in figures:
                summary += f", {figures['nodes']:.0f} nodes, idle {figures['idle_share']:.0%}"
            yield {f"b{batch_size}": figures, "summary": summary}
        yield {
            "captures": len(graphs._captured),
            "capture_s": graphs.capture_s,
            "planned_shared_gb": 1e-9 * plan.graphs.shared_bytes(),
            "planned_pool_gb": 1e-9 * plan.graphs.bytes_pool(),
            "kv_gb": 1e-9 * plan.kv_bytes,
            "weights_gb": 1e-9 * plan.weights_bytes,
        }


def replayed_graph(num_replays: Counter[GraphKey], batch_size: int) -> GraphKey:
    """Return the graph of the plain passes of a call. AssertionError if it is not of this batch."""
    ((key, _),) = num_replays.most_common(1)
    assert (key.batch_size, key.num_rows) == (batch_size, 1), f"batch {batch_size} replayed {key}"
    return key


def _profiled(
    engine: EmbeddedEngine, batch_size: int, given: Mapping[str, int], seconds: float
) -> Figures:
    """Return what the GPU did in a few passes that take `seconds` each without the profiler."""
    if ProfilerActivity.CUDA not in supported_activities():
        return {"profiler": "none"}
    profiler, count = profile(activities=[ProfilerActivity.CUDA]), 0

    def count_pass() -> bool:
        """Start or end the profile between two passes, where the engine asks whether to stop."""
        nonlocal count
        count += 1
        if count == 2:
            profiler.start()
        elif count == 2 + _PROFILED:
            profiler.stop()
        return False

    generate(engine, batch_size=batch_size, **given, should_stop=count_pass)
    return kernel_figures(profiler.key_averages(), _PROFILED, seconds)


def kernel_figures(
    events: Iterable[FunctionEventAvg], num_passes: int, seconds: float, top: int = _TOP
) -> Figures:
    """Return kernels of a pass, their milliseconds, the share of `seconds` in which none runs, and
    the longest ones. Copies and fills of memory count as kernels.
    """
    kernels = [each for each in events if each.device_type == DeviceType.CUDA]
    if not kernels:
        return {"profiler": "saw no kernel"}
    kernels.sort(key=lambda each: -each.self_device_time_total)
    busy_s = 1e-6 * sum(each.self_device_time_total for each in kernels) / num_passes
    return {
        "nodes": sum(each.count for each in kernels) / num_passes,
        "kernels_ms": 1e3 * busy_s,
        "idle_share": 1.0 - busy_s / seconds,
        "top_us": dict(_kernel_us(each, num_passes) for each in kernels[:top]),
    }


def _kernel_us(kernel: FunctionEventAvg, num_passes: int) -> tuple[str, float]:
    name = f"{str(kernel.key)[:70]} x{kernel.count / num_passes:g}"
    return name, kernel.self_device_time_total / num_passes
