"""Where the CPU time of a plain decode pass goes: weights, attention, noise and sampling, and the rest."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from rich.console import Console
from torch import Tensor

from tlt_megatron.models.arithmetic import Arithmetic
from tlt_megatron.models.attention.lanes import LaneTreeAttention, LaneView
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.matrix import Matrix
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.speculation.sampling import sample
from tools.bench.measure import cpu_seconds, print_table, spread

PARTS = ("weights", "attention", "noise and sampling")
_CONTEXT = 128  # positions of each sequence
_T = TypeVar("_T")


class _Timer:
    """The CPU seconds of calls, by name."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def timed(self, name: str, call: Callable[..., _T]) -> Callable[..., _T]:
        """Return `call` with its time added to `name`."""

        def run(*arguments: object) -> _T:
            started = time.process_time()
            result = call(*arguments)
            self.seconds[name] += time.process_time() - started
            return result

        return run


class _TimedAttention:
    """Attention of one token per sequence, over a context of _CONTEXT positions."""

    def __init__(self, cache: KvCache, batch_size: int, timer: _Timer) -> None:
        view = LaneView(cache, num_rows=batch_size, lane=_CONTEXT)
        self.positions_B = torch.full((batch_size,), _CONTEXT - 1)
        slots_P = view.slots(self.positions_B.unsqueeze(1))
        lanes = LaneTreeAttention(view, slots_P, view.committed_bias(_CONTEXT))
        self._attend = timer.timed("attention", lanes.attend)

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        """Return the attention of a layer."""
        return self._attend(layer, query_PNH, kv_PKH)


@torch.no_grad()
def bench_decode_pass(
    config: ModelConfig,
    dtype: str,
    vocab_sizes: list[int],
    batch_sizes: tuple[int, ...],
    rounds: int,
    console: Console,
) -> dict[str, dict[str, float]]:
    """Return, by vocabulary / batch size, the median milliseconds of a pass and the share of each part in it."""
    found: dict[str, dict[str, float]] = {}
    rows = []
    for vocab_size in vocab_sizes:
        for batch_size in batch_sizes:
            shapes = dataclasses.replace(config, vocab_size=vocab_size)
            shares = _measure(shapes, getattr(torch, dtype), batch_size, rounds)
            found[f"{vocab_size}/{batch_size}"] = shares
            cells = (f"{value:.1%}" for name, value in shares.items() if name != "pass_ms")
            rows.append([vocab_size, batch_size, shares["pass_ms"], *cells])
    title = f"where the time of a decode pass goes, {dtype}, context {_CONTEXT}, {rounds} rounds"
    columns = ("vocabulary", "batch", "pass ms", *PARTS, "rest")
    print_table(console, title, columns, rows, num_names=0)
    return found


def _measure(
    config: ModelConfig, dtype: torch.dtype, batch_size: int, rounds: int
) -> dict[str, float]:
    timer, device = _Timer(), torch.device("cpu")
    arithmetic = Arithmetic(matrix=lambda w, bias: timer.timed("weights", Matrix(w, bias)))
    model = Transformer(config, dtype, device, arithmetic)
    for _, tensor in model.named_hf_tensors():
        tensor.normal_(std=0.02)
    model.rotary.reserve(_CONTEXT)
    model.pack()
    cache = KvCache(config, num_pages=batch_size, page_size=_CONTEXT, dtype=dtype, device=device)
    cache.bias_T.zero_()
    attention = _TimedAttention(cache, batch_size, timer)
    draw = timer.timed("noise and sampling", sample)
    rows_B = torch.arange(batch_size)

    def decode() -> None:
        hidden_BD = model.forward(rows_B, attention.positions_B, attention)
        draw(model.logits(hidden_BD), rows_B, rows_B, 1.0, 1.0, 0)

    decode()
    passes: list[dict[str, float]] = []
    for _ in range(rounds):
        timer.seconds.update(dict.fromkeys(PARTS, 0.0))
        seconds = cpu_seconds(decode)
        shares = {name: part / seconds for name, part in timer.seconds.items()}
        rest = 1.0 - sum(shares.values())
        passes.append({"pass_ms": 1e3 * seconds, **shares, "rest": rest})
    return {name: spread([each[name] for each in passes])["median"] for name in passes[0]}
