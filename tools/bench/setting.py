"""The setting of the speed tables: an engine, its prompts, and drafters from good to useless.

tools/bench/speculation.py makes one for each dtype.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.prompts import load_prompts
from tlt_megatron.data.tokenizer import Tokenizer, load_tokenizer
from tlt_megatron.drafter.checkpoint import load_draft_weights, load_drafter
from tlt_megatron.engines.embedded.engine import EmbeddedEngine
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.speculation.beg_mab import BegMabSelector
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.selector import FixedSelector
from tlt_megatron.speculation.strategy import OFF, SpeculationStrategy
from tlt_megatron.types import FinishReason, Prompt, SamplingParams
from tools.bench.interleaved import Clock, Variant
from tools.bench.measure import cpu_seconds, wall_seconds
from tools.load_engine import MAX_PROMPT_TOKENS, VERSION, load_engine

GOOD, RANDOM, OTHER = "good", "random", "other_policy"
COST_MODEL, BEG_MAB = "cost_model", "beg_mab"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A policy in one dtype, ready to generate."""

    engine: EmbeddedEngine
    prompts: Sequence[Prompt]
    tokenizer: Tokenizer
    num_layers: int
    dtype: str
    model: Path
    clock: Clock = cpu_seconds
    num_warm_ups: int = 0  # see `Comparison`


def make_setting(
    options: argparse.Namespace, dtype: str, *, device: str = "cpu", **settings: int
) -> Setting:
    """Return the policy of `options.model` with `options.deepen` identity layers. `settings` go to RolloutSection.

    On a GPU, wall time is measured, and a variant captures its graphs before it is timed.
    """
    is_cuda = device == "cuda"
    engine = load_engine(
        options.model,
        dtype=dtype,
        num_identity_layers=options.deepen,
        max_new_tokens=options.max_new_tokens,
        device=device,
        **settings,
    )
    tokenizer = load_tokenizer(options.model)
    section = DataSection(max_prompt_tokens=MAX_PROMPT_TOKENS)
    return Setting(
        engine=engine,
        prompts=load_prompts(options.prompts, tokenizer, section).prompts(),
        tokenizer=tokenizer,
        num_layers=load_model_config(options.model).num_layers + options.deepen,
        dtype=dtype,
        model=Path(options.model),
        clock=wall_seconds if is_cuda else cpu_seconds,
        num_warm_ups=1 if is_cuda else 0,
    )


def make_drafts(
    setting: Setting, drafter: str | Path, other: Path | None
) -> dict[str, DraftInference]:
    """Return drafters by name: that of this policy, an untrained one, and (with `other`) one of another policy.

    The other policy has the same sizes. An engine would reject its drafter by the fingerprint.
    """
    embedding, head = setting.engine.target_tensors()
    config = make_draft_config(load_model_config(setting.model), "eagle", embedding)
    models = {
        GOOD: load_drafter(drafter, embedding_VD=embedding, lm_head_VD=head),
        RANDOM: DraftModel(config, embedding_VD=embedding, lm_head_VD=head, seed=1),
    }
    if other is not None:
        models[OTHER] = DraftModel(config, embedding_VD=embedding, lm_head_VD=head)
        load_draft_weights(models[OTHER], dict(HfReader(other).items()), source=str(other))
    return {name: DraftInference(model, embedding.dtype) for name, model in models.items()}


def make_variants(
    drafts: dict[str, DraftInference], strategies: Sequence[SpeculationStrategy]
) -> dict[str, Variant]:
    """Return every strategy and both selectors with the good drafter, and the cost model with every other drafter."""
    good = drafts[GOOD]
    variants = {
        str(s): Variant(speculation=Speculation(good, FixedSelector(s), [s])) for s in strategies
    }
    selector = BegMabSelector([*strategies, OFF])
    variants[BEG_MAB] = Variant(speculation=Speculation(good, selector, strategies), is_close=True)
    for name, draft in drafts.items():
        speculation = Speculation(draft, CostModelSelector(strategies), strategies)
        variants[adaptive_name(name)] = Variant(speculation=speculation, is_close=True)
    return variants


def adaptive_name(drafter: str) -> str:
    """Return the name of the variant in which the cost model uses this drafter."""
    return COST_MODEL if drafter == GOOD else f"{COST_MODEL}/{drafter}"


def long_prompts(setting: Setting, num_tokens: int) -> list[Prompt]:
    """Return prompts that the policy itself answers at length. Text forced after its end would not be representative."""
    params = SamplingParams(
        max_new_tokens=num_tokens, stop_token_ids=setting.tokenizer.stop_token_ids, seed=1
    )
    groups = setting.engine.generate(setting.prompts, params, policy_version=VERSION)
    ends = [group.rollouts[0].finish_reason for group in groups]
    return [p for p, end in zip(setting.prompts, ends, strict=True) if end == FinishReason.LENGTH]
