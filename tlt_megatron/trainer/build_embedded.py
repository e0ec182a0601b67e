"""Builds the embedded engine of a run, and its speculation, for `rollout.engine=embedded`."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from torch import Tensor

from tlt_megatron.config.schema import RunConfig
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.config import ModelConfig, load_model_config
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.runtime.device import Device
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.speculation.selector import make_selector
from tlt_megatron.trainer.build_drafter import drafter_tap_layers, make_drafter

log = logging.getLogger(__name__)


def build_embedded_engine(
    config: RunConfig,
    device: Device,
    run_dir: Path,  # noqa: ARG001
    world: Group,  # noqa: ARG001
) -> EmbeddedEngine:
    """Build the engine of this rank. Ranks have one each, independent of the others."""
    model = load_model_config(config.model.path)
    is_on = config.speculation.enabled
    engine = EmbeddedEngine(
        model,
        config.rollout,
        device,
        max_prompt_tokens=config.longest_context,
        tap_layers=drafter_tap_layers(config, model),
        make_speculation=partial(_speculation_over, config, model) if is_on else None,
    )
    if engine.has_graphs:
        plan = engine.memory_plan(config.speculation.parsed_strategies if is_on else ())
        log.info("graphs of the rollout engine: %s", plan.graphs.describe())
    return engine


def _speculation_over(
    config: RunConfig, target: ModelConfig, embedding_VD: Tensor, lm_head_VD: Tensor
) -> Speculation:
    """Build the speculation of an embedded engine over its policy's embedding and LM head.

    ValueError for a drafter of another policy, or for unknown strategies."""
    draft = None
    if config.speculation.is_learned:
        drafter = make_drafter(config, target, embedding_VD, lm_head_VD)
        num_ids = config.speculation.num_draft_ids(target.vocab_size)
        draft = DraftInference(drafter, num_ids=num_ids)
    return make_speculation(config, draft)


def make_speculation(config: RunConfig, draft: DraftInference | None) -> Speculation:
    """Build the speculation of `config.speculation`. `draft` is the learned drafter, or None."""
    strategies, most = config.speculation.parsed_strategies, config.rollout.max_batch_size
    selector = make_selector(config.speculation.selector, strategies, max_batch_size=most)
    return Speculation(draft, selector, strategies)
