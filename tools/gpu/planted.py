"""Stage 2c: speculation at the cost of a 7B, with an accept length that is chosen: true step times
without real weights.

The layers of the target add nothing (`o_proj` and `down_proj` are 0) and cost as much as any. So
the next token depends on the last one alone, and the head is planted: each token of a cycle has one
successor, far ahead of all others. The drafter sees one half of an embedding. For a share of the
tokens that half is another token's, and the drafter's guess is wrong.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tlt_megatron.config.schema import SpeculationSection
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.speculation.beg_mab import BegMabSelector
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.selector import FixedSelector, StrategySelector
from tools.gpu.machine import Figures, Machine
from tools.gpu.random_engine import generate, make_engine
from tools.gpu.shapes import QWEN_2_5_7B, TINY

# Share of tokens that the drafter gets right, for these accept lengths of 6_1_6: the sum of its
# powers 0 to 6.
_SHARES = {"2": 0.505, "4.5": 0.85, "6": 0.95}
_MARGIN = 30.0  # the right logit minus the next. Noise of 152,064 tokens spans about 15.
_WARM_UP = 2  # passes: the drafter reads the context in the first one


def planted(machine: Machine, batch_size_text: str) -> Iterator[Figures]:
    """Yield, by accept length and strategy or selector, milliseconds of a step, accept length and
    speed over plain decoding.
    """
    batch_size = machine.pick(int(batch_size_text), min(int(batch_size_text), 3))
    config = machine.pick(QWEN_2_5_7B, TINY)
    section = SpeculationSection(draft_vocab_size=machine.pick(None, 0))
    texts = machine.pick(section.strategies, ["6_1_6", "4_2_8"])
    strategies = [SpeculationStrategy.parse(text) for text in texts]
    # Short enough for 2048 positions with a tree behind them, and for the time that there is.
    num_new = machine.pick(240 if batch_size < 64 else 100, 12)
    given: dict[str, Any] = {"num_prompt": machine.pick(2000, 100) - num_new, "num_new": num_new}
    shares = dict(list(_SHARES.items())[1:2]) if batch_size > 1 or machine.is_tiny else _SHARES
    with machine.gpu() as device, torch.no_grad():
        zeros = ("o_proj.weight", "down_proj.weight")
        engine = make_engine(config, device, batch_size=batch_size, zeros=zeros, **given)
        num_ids = section.num_draft_ids(config.vocab_size)
        draft = DraftInference(_make_drafter(engine, config), num_ids=num_ids)
        selectors: dict[str, StrategySelector] = {
            str(s): FixedSelector(s) for s in (OFF, *strategies)
        }
        speculation = Speculation(draft, selectors["off"], strategies)
        engine.set_speculation(speculation)
        cycle_ids = num_ids or config.vocab_size
        plant(*engine.target_tensors(), 1.0, cycle_ids)
        for speculation.selector in selectors.values():  # captures
            generate(engine, batch_size=batch_size, **given)
        selectors["beg_mab"] = BegMabSelector([*strategies, OFF], max_batch_size=64)
        selectors["cost_model"] = CostModelSelector(strategies)
        summary = ""
        for accept_length, share in shares.items():
            plant(*engine.target_tensors(), share, cycle_ids)
            speculation.target_changed()
            expected: list[list[int]] = []
            plain, summary = 0.0, f"{summary} accept {accept_length}:"
            for name, selector in selectors.items():
                speculation.selector = selector  # all share one engine and its graphs
                tokens, passes = generate(engine, batch_size=batch_size, **given)
                passes, expected = passes[_WARM_UP:], expected or tokens
                committed = sum(each.num_committed for each in passes)
                speed = committed / sum(each.seconds for each in passes)
                plain = plain or speed
                figures = {
                    "ms": 1e3 * statistics.median(each.seconds for each in passes),
                    "accept": committed / sum(each.batch_size for each in passes),
                    "tokens_per_s": speed,
                    "over_plain": speed / plain,
                    "eager": engine.stats().eager_passes,
                    "differing": sum(a != b for a, b in zip(tokens, expected, strict=True)),
                }
                summary += f" {name} x{speed / plain:.2f} {figures['ms']:.1f}ms"
                yield {f"accept_{accept_length}": {name: figures}, "summary": summary.strip()}


def _make_drafter(engine: EmbeddedEngine, config: ModelConfig) -> DraftModel:
    """Return an EAGLE drafter whose output is the first half of its token's embedding."""
    embedding, head = engine.target_tensors()
    draft_config = make_draft_config(config, "eagle", embedding)
    model = DraftModel(draft_config, embedding_VD=embedding, lm_head_VD=head, dtype=torch.bfloat16)
    half = torch.arange(config.hidden_size // 2, device=embedding.device)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight", "fc.bias")):
            parameter.zero_()
        if name.endswith("fc.weight"):
            parameter[half, half] = 1.0
    return model


def plant(embedding_VD: Tensor, head_VD: Tensor, share: float, num_ids: int) -> None:
    """Write a cycle through the tokens 1 to `num_ids` - 1. The drafter's guess is right for `share`
    of them.

    Token 0, which ends the prompt, has many equally likely successors, so that responses differ.
    """
    size, device = embedding_VD.shape[1], embedding_VD.device
    generator = torch.Generator().manual_seed(0)

    def shuffled() -> Tensor:
        return 1 + torch.randperm(num_ids - 1, generator=generator)

    order, mixed = shuffled(), shuffled()
    num_hard = round((1.0 - share) * len(mixed))
    hard, easy = mixed[:num_hard], mixed[num_hard:]
    codes_CD = torch.randn(num_ids, size, generator=generator)
    successor_rows_CD = codes_CD * (2 * _MARGIN / size)
    # What the drafter sees of a hard token says nothing of its own successor, but names another
    # token's.
    successor_rows_CD[hard, : size // 2] = 0.0
    successor_rows_CD[hard, size // 2 :] *= 2.0
    decoys = easy[torch.randint(len(easy), (num_hard,), generator=generator)]
    codes_CD[hard, : size // 2] = codes_CD[decoys, : size // 2]
    codes_CD /= codes_CD.square().mean(dim=1, keepdim=True).sqrt()
    rows_CD = torch.zeros(num_ids, size)
    rows_CD[order.roll(-1)] = successor_rows_CD[order]
    rows_CD[shuffled()[: num_ids // 8]] += successor_rows_CD[0]
    head_VD.zero_()
    for target_VD, values_CD in ((embedding_VD, codes_CD), (head_VD, rows_CD)):
        target_VD[:num_ids].copy_(values_CD.to(device, target_VD.dtype))
