"""A roofline in place of recorded runs: seconds from the data sheet of a GPU and the sizes of a
model. Real steps take longer: see roofline.py for what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

from tlt_megatron.config.schema import RunConfig
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.data.prompts import load_prompts
from tlt_megatron.data.tokenizer import load_tokenizer
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.sizes import ModelSizes
from tlt_megatron.saved_files import errors_named, is_number
from tools.gpu.shapes import QWEN_2_5_7B
from tools.planner.roofline import ITEM_BYTES, Decoding, Gpu
from tools.run_report.files import read_lines

_CHECKED = (1, 8, 64)  # batches of the GPU check
_CONTEXT_STEP = 256  # tokens to which contexts are rounded, so that passes are computed once


def read_slowness(path: Path, gpu: Gpu) -> dict[int, float]:
    """Return by batch size how many times the seconds of the roofline a plain pass of the 7B takes.

    `path` is the GPU check's results.jsonl. ValueError if its item 2b.plain_2048 did not end.
    """
    figures = {}
    with errors_named(path):
        for row in read_lines(path):
            if (row.get("stage"), row.get("item")) == ("2b", "plain_2048"):
                figures = row.get("figures", {})
    found = {batch: figures.get(f"b{batch}", {}).get("pass_ms") for batch in _CHECKED}
    batches = [batch for batch, value in found.items() if is_number(value) and value > 0]
    if len(batches) < len(_CHECKED):
        raise ValueError(
            f"--gpu-check {path}: has no pass_ms of all batches of item 2b.plain_2048, which needs a GPU"
        )
    slowness = {}
    for batch in batches:
        decoding = Decoding(model=QWEN_2_5_7B, num_gpus=1, batch=batch, context=2048)
        slowness[batch] = 1e-3 * found[batch] / decoding.pass_s(gpu, 1)
    return slowness


def mean_prompt_tokens(config: RunConfig) -> float | None:
    """Return the mean tokens of the prompts of `data.train`. None if they or the tokenizer are not
    on this machine.
    """
    if not (config.data.train and Path(config.data.train).is_file()):
        return None
    if not any(Path(config.model.path).glob("tokenizer*")):
        return None
    prompts = load_prompts(config.data.train, load_tokenizer(config.model.path), config.data)
    return float(np.mean([len(prompt.token_ids) for prompt in prompts.rows]))


class ComputedMachine:
    """GPUs whose drafter has one acceptance, which is assumed."""

    max_updates = updates_per_idle_s = 0.0  # how a drafter learns cannot be computed

    def __init__(
        self,
        gpu: Gpu,
        config: RunConfig,
        ranks: int,
        *,
        accept_rate: float,
        slowness: Mapping[int, float],
        prompt_tokens: float | None = None,
    ) -> None:
        """`accept_rate` is the chance that a pass accepts a depth if it accepts the one above.
        `slowness` is that of `read_slowness`; {}: as fast as the roofline. `prompt_tokens` is the
        mean length of prompts; None: of the prompts in `data.train`, or else the longest.

        ValueError for a mixture of experts or a critic, whose passes are not computed.
        """
        self.gpu, self.config, self.ranks = gpu, config, ranks
        self.accept_rate = accept_rate
        self.slowness = dict(sorted(slowness.items())) or {1: 1.0}
        scaled = ", scaled to measured passes of a 7B" if slowness else ", not measured"
        known, assumed = prompt_tokens or mean_prompt_tokens(config), ""
        most = config.data.max_prompt_tokens
        self.prompt_tokens = known or float(most)
        if self.prompt_tokens > most:
            raise ValueError(
                f"--prompt-tokens {self.prompt_tokens:g}: must be <= data.max_prompt_tokens={most}"
            )
        if known is None:
            assumed = f", all prompts of {most} tokens"
        self.source = f"computed{scaled}{assumed}"
        self.model = load_model_config(config.model.path)
        if self.model.experts is not None or config.has_critic:
            raise ValueError("--machine: computes neither mixtures of experts nor a critic")
        if not 0.0 <= accept_rate < 1.0:
            raise ValueError(f"--accept-rate {accept_rate}: must be in [0, 1)")
        self._pass_s = cache(self._compute)

    def accepted(self, strategy: SpeculationStrategy, updates: float) -> list[float]:  # noqa: ARG002
        return [self.accept_rate**depth for depth in range(1, strategy.depth + 1)]

    def pass_seconds(self, strategy: SpeculationStrategy, batch_size: int, cached: float) -> float:
        steps = round((self.prompt_tokens + cached / batch_size) / _CONTEXT_STEP)
        return self._pass_s(strategy, batch_size, steps * _CONTEXT_STEP)

    def _compute(self, strategy: SpeculationStrategy, batch_size: int, context: int) -> float:
        decoding = Decoding(
            model=self.model,
            num_gpus=self.config.ranks_per_engine,
            batch=batch_size,
            context=context,
        )
        draft_s = decoding.pass_s(self.gpu, max(strategy.topk, 1), is_draft=True)
        roofline_s = strategy.num_steps * draft_s + decoding.pass_s(self.gpu, strategy.num_rows)
        batches, times = list(self.slowness), list(self.slowness.values())
        return roofline_s * float(np.interp(batch_size, batches, times))

    def phase_seconds(self, phase: str, tokens: float) -> float:
        """Return the operations of the weights over the peak of all ranks, without attention; of a
        weight synchronization the bytes over the bandwidth.
        """
        rollout, algorithm = self.config.rollout, self.config.algorithm
        replicas = self.ranks // self.config.ranks_per_engine
        prompts = rollout.num_prompts * self.prompt_tokens
        trained = tokens * replicas + prompts * rollout.num_samples
        params = ModelSizes(self.model).total
        token_s = 2 * params / (self.gpu.peak * self.ranks)  # for a forward pass
        if phase == "gen_rest":
            return prompts * token_s
        if phase == "old_log_prob":
            second = self.config.second_path or self.config.model.path
            reference = ModelSizes(load_model_config(second)).total / params
            passes = algorithm.has_logprob_pass + reference * self.config.has_reference
            return passes * trained * token_s
        if phase == "update_actor":
            passes = 4 if self.config.mcore.recompute == "full" else 3
            return passes * algorithm.num_epochs * trained * token_s
        if phase == "update_weights":
            return ITEM_BYTES * params / self.gpu.bandwidth / self.config.ranks_per_engine
        return 0.0
