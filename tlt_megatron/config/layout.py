"""Checks that need the number of ranks and the model's sizes, before anything expensive starts."""

from __future__ import annotations

from collections.abc import Sequence

from tlt_megatron.config.experts_shape import ExpertsConfig
from tlt_megatron.config.mcore_fields import layers_of_stages
from tlt_megatron.config.model_shape import ModelConfig, load_model_config
from tlt_megatron.config.ranges import require, require_divides
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.config.strategy import SpeculationStrategy

PAGE_TOKENS = 64  # positions of one KV page of the embedded engine


def check_layout(config: RunConfig, world_size: int) -> None:
    """Raise ValueError for ranks or a model that the layout or the lengths do not fit.

    Reads only config.json.
    """
    parallel = config.parallel
    tp, cp, pp = parallel.tensor, parallel.context, parallel.pipeline
    by_context = f" x parallel.context={cp}" if cp > 1 else ""
    cut = f"parallel.tensor={tp}{by_context} x parallel.pipeline={pp} = {tp * cp * pp}"
    require_divides(tp * cp * pp, world_size, cut, f"the {world_size} ranks")
    expert, stage = parallel.expert, world_size // pp
    whole = f"the {stage} ranks of a pipeline stage"
    require_divides(expert, stage, f"parallel.expert={expert}", whole)
    size = config.ranks_per_engine
    name = f"sglang.engine_args.tp_size={size}"
    require_divides(size, world_size, name, f"the {world_size} ranks")
    policy, rollout = load_model_config(config.model.path), config.rollout
    if policy.experts is None:
        has_none = f"{config.model.path} has no experts"
        coeff, name = config.mcore.moe_aux_loss_coeff, "mcore.transformer.moe_aux_loss_coeff"
        require(not coeff, name, coeff, f"0, {has_none}")
        rollout.require(not rollout.routing_replay, "routing_replay", f"false, {has_none}")
    else:
        if rollout.engine == "sglang":
            _check_sglang_experts(config, policy, policy.experts)
    for path in config.layout_paths:
        _check_cuts(config, path)
        slack = sglang_slack(config) if path == config.model.path else 0
        _check_positions(config, path, slack)
    longest = config.longest_context + rollout.max_new_tokens + sglang_slack(config)
    needed = _least_kv_tokens(config, longest)
    rule = f"0 or >= {needed} (one full sequence of {longest} tokens)"
    rollout.require(not 0 < rollout.kv_cache_tokens < needed, "kv_cache_tokens", rule)


def _check_sglang_experts(config: RunConfig, policy: ModelConfig, experts: ExpertsConfig) -> None:
    num_dense = policy.num_layers - len(experts.layers)
    if num_dense and policy.model_type == "qwen3_moe":
        raise ValueError(
            f"rollout.engine=sglang: takes all layers of {config.model.path} for mixtures, but"
            f" {num_dense} are dense; set rollout.engine=embedded"
        )
    ep_size = config.sglang.engine_args.get("ep_size", 1)
    rule = "1, tp_size cuts the experts of an engine"
    require(ep_size == 1, "sglang.engine_args.ep_size", ep_size, rule)


def _check_positions(config: RunConfig, path: str, slack: int) -> None:
    observations = config.rollout.observation_tokens
    longest = config.longest_context + config.rollout.max_new_tokens + slack
    most = load_model_config(path).max_position_embeddings
    behind = f" + rollout.max_observation_tokens={observations}" if observations else ""
    behind += f" + {slack} of sglang's slack" if slack else ""
    if longest > most:
        raise ValueError(
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} + rollout.max_new_tokens="
            f"{config.rollout.max_new_tokens}{behind} = {longest} exceeds max_position_embeddings={most} of {path}"
        )


def _least_kv_tokens(config: RunConfig, longest: int) -> int:
    """Return the KV memory of one sequence of `longest` tokens.

    Any prefix may be the prompt if turns or partial rollouts continue it.
    """
    rollout, most_prompt = config.rollout, config.data.max_prompt_tokens
    if rollout.engine == "sglang":
        return longest
    if rollout.has_conversations or rollout.partial_rollout_tokens:
        return PAGE_TOKENS * most_pages_of(longest)
    return PAGE_TOKENS * pages_of(most_prompt, rollout.max_new_tokens)


def pages_of(num_prompt: int, num_new: int) -> int:
    """Return the KV pages of a prompt, which its responses share, and of one response."""
    return -(-num_prompt // PAGE_TOKENS) + -(-num_new // PAGE_TOKENS)


def most_pages_of(num_tokens: int) -> int:
    """Return the KV pages that suffice for `num_tokens`, wherever in them a prompt ends.

    A prompt may hold earlier turns or tokens.
    """
    return -(-num_tokens // PAGE_TOKENS) + 1


def _check_cuts(config: RunConfig, path: str) -> None:
    model, tp = load_model_config(path), config.parallel.tensor
    for name, size in (
        ("num_attention_heads", model.num_heads),
        ("num_key_value_heads", model.num_kv_heads),
        ("vocab_size", model.vocab_size),
        ("intermediate_size", model.ffn_size),
    ):
        require_divides(tp, size, f"parallel.tensor={tp}", f"{name}={size} of {path}")
    num_experts = 1 if model.experts is None else model.experts.num_experts
    expert, whole = config.parallel.expert, f"num_experts={num_experts} of {path}"
    require_divides(expert, num_experts, f"parallel.expert={expert}", whole)
    if model.experts is not None and tp > expert == 1:
        # Megatron would take the copies of an expert for one, and not sum their gradients.
        raise ValueError(
            f"parallel.expert=1 with parallel.tensor={tp}: must be > 1 for the experts of {path}"
        )
    parallel = config.parallel
    for layers in layers_of_stages(
        model.num_layers,
        parallel.pipeline,
        parallel.virtual_pipeline,
        config.mcore.transformer,
        path=path,
    ):
        if model.experts and not {*model.experts.layers} & {*layers}:
            raise ValueError(
                f"parallel.pipeline={parallel.pipeline} makes a stage of the layers {layers} of {path},"
                " none of which has experts: each stage must have one"
            )


def sglang_slack(config: RunConfig) -> int:
    """Return the positions that SGLang needs after a full sequence; 0 with another engine."""
    if config.rollout.engine != "sglang":
        return 0
    section = config.speculation
    texts = section.strategies if section.enabled else []
    return draft_slack(texts[:1] if section.selector == "fixed" else texts)


def draft_slack(strategies: Sequence[str]) -> int:
    """Return the positions after a full sequence that SGLang's drafts write to.

    Two passes are in flight. Each writes the rows of the widest strategy, or all candidates of the
    deepest one. SGLang itself needs 4, also without drafts. Example: `["6_1_6"]` gives 18.
    """
    parsed = [SpeculationStrategy.parse(text) for text in strategies]
    widest = max((max(s.num_rows, s.num_steps * s.topk) for s in parsed if not s.is_off), default=0)
    return 2 * widest + 4
