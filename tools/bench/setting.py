"""The setting of the speed tables: a policy, and drafters from good to useless."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from tlt_megatron.config.schema import SpeculationSection
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.speculation.beg_mab import BegMabSelector
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.selector import FixedSelector
from tlt_megatron.types import FinishReason, Prompt
from tools.bench.measure import add_policy_options
from tools.load_engine import LoadedPolicy

GOOD, RANDOM = "good", "random"
COST_MODEL, BEG_MAB = "cost_model", "beg_mab"
UNHELPED = f"{COST_MODEL}/{RANDOM}"


def add_setting_options(add: Callable[..., object]) -> None:
    """Add the options of a setting and of the table of batch sizes."""
    add_policy_options(add, "eval")
    add("--deepen", type=int, default=20, help="identity layers behind the policy's own")
    add("--strategies", nargs="+", default=["3_1_3", "6_1_6", "10_1_10", "14_1_14", "4_2_8"])
    add("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    add("--num-tokens", type=int, default=120, help="of each response, by batch size")
    add("--max-new-tokens", type=int, default=600)
    add("--temperature", type=float, default=1.0)
    add("--rounds", type=int, default=4, help="after one that warms up")


def load_policy(options: argparse.Namespace, dtype: str, **settings: Any) -> LoadedPolicy:
    """Return the policy of `options.model` with `options.deepen` identity layers. `settings` go to
    RolloutSection.
    """
    return LoadedPolicy(
        options.model,
        dtype=dtype,
        num_identity_layers=options.deepen,
        max_new_tokens=options.max_new_tokens,
        **settings,
    )


def make_drafts(policy: LoadedPolicy, drafter: str) -> dict[str, DraftInference]:
    """Return drafters by name: the policy's own in the folder `drafter`, and an untrained one."""
    models = {GOOD: policy.load_drafter(drafter), RANDOM: policy.new_drafter(seed=1)}
    num_ids = SpeculationSection().num_draft_ids(models[GOOD].config.vocab_size)
    return {name: DraftInference(model, num_ids=num_ids) for name, model in models.items()}


def make_variants(
    drafts: dict[str, DraftInference], options: argparse.Namespace
) -> dict[str, Speculation]:
    """Return every strategy and both selectors with the good drafter, and the cost model with the
    untrained one.
    """
    strategies = parse_strategies(options)
    good = drafts[GOOD]
    return {
        **{str(s): Speculation(good, FixedSelector(s), [s]) for s in strategies},
        BEG_MAB: Speculation(good, BegMabSelector([*strategies, OFF]), strategies),
        COST_MODEL: Speculation(good, CostModelSelector(strategies), strategies),
        UNHELPED: Speculation(drafts[RANDOM], CostModelSelector(strategies), strategies),
    }


def parse_strategies(options: argparse.Namespace) -> list[SpeculationStrategy]:
    """Return the strategies of the options."""
    return [SpeculationStrategy.parse(text) for text in options.strategies]


def long_prompts(policy: LoadedPolicy, prompts: Sequence[Prompt], num_tokens: int) -> list[Prompt]:
    """Return prompts that the policy itself answers at length.

    Text forced after its end would not be representative.
    """
    groups = policy.generate(prompts, policy.params(num_tokens, seed=1))
    ends = [group.rollouts[0].finish_reason for group in groups]
    return [p for p, end in zip(prompts, ends, strict=True) if end == FinishReason.LENGTH]
