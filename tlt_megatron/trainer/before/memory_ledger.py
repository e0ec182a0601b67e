"""The memory ledger of a run: the memory claims of every component, computed from the settings.

Called by the launcher before anything is allocated. The loop reports the measured peaks.
"""

from __future__ import annotations

import socket
from dataclasses import replace

import torch

from tlt_megatron.config.own_layer import OWN
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.drafter.drafter_memory import drafter_parameters, spot_claims
from tlt_megatron.engines.embedded.memory_plan import num_routes, plan_memory
from tlt_megatron.engines.sglang.adaptive_policy import adaptive_steps
from tlt_megatron.mcore.megatron_memory import Sharding, policy_claims, reference_claims
from tlt_megatron.models.config import ModelConfig, load_model_config
from tlt_megatron.models.matrix import packs
from tlt_megatron.models.sizes import ModelSizes
from tlt_megatron.policy.batching import batch_claims
from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.device import Device
from tlt_megatron.runtime.memory_claim import (
    ALL_PHASES,
    STEP_PHASES,
    MemoryClaim,
    MemoryLedger,
    Phase,
)
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.trainer.build_drafter import drafter_tap_layers

# Measured on x86-64: libraries that load after the check (Megatron-core, transformers, gloo), and
# on CUDA the context.
_LIBRARY_BYTES = {"cpu": 80 << 20, "cuda": 1 << 30}
# What one process wrote, measured on a CPU (docs/memory.md). A file system may be slower.
_WRITE_BYTES_PER_S = 0.6e9
# Phases with an awake engine. A sleeping engine keeps its weights on a CPU, and frees almost
# everything on a GPU.
_AWAKE = frozenset({Phase.ROLLOUT, Phase.SPOT, Phase.WEIGHT_SYNC, Phase.CHECKPOINT})


def make_ledger(config: RunConfig, world_size: int, device: Device) -> MemoryLedger:
    """Return the ledger of the rank with the highest use. Allocates nothing."""
    model = load_model_config(config.model.path)
    sizes = ModelSizes(model)
    sharding = _sharding(config, world_size, is_cuda=device.is_cuda)
    longest = config.longest_context + config.rollout.max_new_tokens
    sequences = config.rollout.num_prompts * config.rollout.num_samples
    num_drawn = config.rollout.over_sampling_prompts or config.rollout.num_prompts
    generated = num_drawn * config.rollout.num_samples
    per_update = -(-sequences // config.algorithm.num_minibatches)
    library_bytes = _LIBRARY_BYTES[device.torch_device.type] + device.process_bytes()
    claims = [
        MemoryClaim("libraries", library_bytes, is_estimate=True),
        *policy_claims(
            sizes,
            _critic_sizes(config),
            sharding,
            has_reference=config.has_reference and not config.second_path,
            batch_tokens=-(-per_update // sharding.num_data_parallel) * longest,
            longest=longest,
            resumes=config.checkpoint.resume != "never",
        ),
        *batch_claims(
            num_generated=-(-generated // (world_size // config.ranks_per_engine)),
            num_own=-(-sequences // sharding.num_data_parallel),
            num_copies=world_size // sharding.num_data_parallel if world_size > 1 else 0,
            longest=longest,
            route_bytes=num_routes(model, config.rollout) * torch.int16.itemsize,
            has_critic=config.has_critic,
            is_cuda=device.is_cuda,
            lower=f"rollout.max_new_tokens={config.rollout.max_new_tokens}",
        ),
    ]
    if path := config.second_path:
        claims += reference_claims(ModelSizes(load_model_config(path)), sharding, path)
    if config.algorithm.is_sft:
        pass  # no engine
    elif config.rollout.engine == "sglang":
        claims += _sglang_claims(config, sizes, device)
    else:
        claims += _engine_claims(config, model, sizes, device)
    if config.spot.enabled:
        # The responses of a data-parallel rank are distributed over those that share its passes.
        sharers = world_size // config.parallel.pipeline
        if config.rollout.engine != "embedded":  # in another process: the tables are here as well
            tables = 2 * sizes.table * _item_bytes(config)
            claims.append(MemoryClaim("drafter, borrowed tables", tables, STEP_PHASES))
        claims += spot_claims(
            sizes,
            drafter=config.drafter,
            spot=config.spot,
            item_bytes=_item_bytes(config),
            step_tokens=-(-sequences // sharers) * longest,
            taps_in_update=not config.algorithm.has_logprob_pass,
            has_pipeline=config.parallel.pipeline > 1,
            is_cuda=device.is_cuda,
        )
        frozen = _frozen_experts(config, sizes) * _item_bytes(config)
        claims.append(MemoryClaim("drafter's frozen experts", frozen, STEP_PHASES))
    return MemoryLedger(claims)


def describe_checkpoint(config: RunConfig, world_size: int) -> str:
    """Return two lines about the bytes of a checkpoint and the seconds for which it blocks the
    run.
    """
    total, fullest = checkpoint_bytes(config, world_size)
    return (
        f"A checkpoint has {total / 1e9:,.1f} GB.\nThe fullest rank writes {fullest / 1e9:,.1f} GB:"
        f" {fullest / _WRITE_BYTES_PER_S:,.0f} s at {_WRITE_BYTES_PER_S / 1e9:g} GB/s of a rank."
    )


def checkpoint_bytes(config: RunConfig, world_size: int) -> tuple[int, int]:
    """Return the bytes of a checkpoint, and those that the fullest rank writes."""
    sharding = _sharding(config, world_size, is_cuda=False)
    models = (ModelSizes(load_model_config(config.model.path)), _critic_sizes(config))
    parts = [sharding.checkpoint_bytes(sizes) for sizes in models if sizes is not None]
    total, fullest = map(sum, zip(*parts, strict=True))
    if config.second_path and config.reference.refresh_steps:  # weights alone, also with adapters
        sizes = ModelSizes(load_model_config(config.second_path))
        total += sizes.total * sharding.item_bytes
        fullest += sharding.parameters(sizes) * sharding.item_bytes
    return total, fullest


def _sharding(config: RunConfig, world_size: int, *, is_cuda: bool) -> Sharding:
    parallel = config.parallel
    return Sharding(
        model=config.model,
        parallel=parallel,
        mcore=config.mcore,
        num_data_parallel=world_size // (parallel.tensor * parallel.context * parallel.pipeline),
        is_cuda=is_cuda,
    )


def _critic_sizes(config: RunConfig) -> ModelSizes | None:
    """Return the sizes of the critic, which has an embedding and no output layer."""
    if not config.has_critic:
        return None
    model = load_model_config(config.critic_path)
    return ModelSizes(replace(model, tie_word_embeddings=True))


def check_memory(ledger: MemoryLedger, free_bytes: int, host_free_bytes: int, world: Group) -> None:
    """Raise ValueError on all ranks if the run does not fit on one of them. A collective."""
    problem = None
    try:
        ledger.check(free_bytes)
        ledger.of_host().check(host_free_bytes, "host ")
    except ValueError as error:
        problem = f"{error} (on host {socket.gethostname()})"
    for found in gather_objects(problem, world):
        if found is not None:
            raise ValueError(found)


def _engine_claims(
    config: RunConfig, model: ModelConfig, sizes: ModelSizes, device: Device
) -> list[MemoryClaim]:
    rollout = config.rollout
    strategies = config.speculation.parsed_strategies if config.speculation.enabled else []
    has_graphs = rollout.graphs != "off" and device.is_cuda
    plan = plan_memory(
        model,
        rollout,
        strategies,
        device=device,
        has_graphs=has_graphs,
        max_prompt_tokens=config.longest_context,
        num_taps=len(drafter_tap_layers(config, model)),
    )
    weights_in = _AWAKE if device.is_cuda else STEP_PHASES
    # A rank that trains the drafter frees its KV first.
    kv_in = {Phase.ROLLOUT} if config.spot.enabled else {Phase.ROLLOUT, Phase.SPOT}
    if rollout.graphs == "keep" and has_graphs:
        weights_in = kv_in = STEP_PHASES
    graphs = plan.graphs.bytes_pool() if has_graphs else 0
    drafter = 0
    if config.speculation.enabled and config.speculation.is_learned:
        is_packed = packs(getattr(torch, rollout.dtype), device.torch_device)
        drafter = drafter_parameters(sizes) + _frozen_experts(config, sizes)
        drafter += config.speculation.num_draft_ids(sizes.vocab) * sizes.hidden
        drafter *= _item_bytes(config) * (2 if is_packed else 1)
    batch, kv = _engine_settings(config)
    passes, strategy = f"{batch} or speculation.strategies", "speculation.strategies"
    return [
        MemoryClaim("engine weights", plan.weights_bytes, weights_in),
        MemoryClaim(f"engine KV ({plan.kv_tokens} tokens)", plan.kv_bytes, kv_in, lower=kv),
        MemoryClaim(
            "decode and verify passes",
            plan.activations_bytes,
            {Phase.ROLLOUT},
            lower=passes,
            is_estimate=True,
        ),
        MemoryClaim("engine graphs", graphs, kv_in, lower=strategy, is_estimate=True),
        MemoryClaim("engine drafter", drafter, weights_in),
    ]


def _sglang_claims(config: RunConfig, sizes: ModelSizes, device: Device) -> list[MemoryClaim]:
    """Return the claims of the SGLang process, which shares the rank's device.

    Graphs and workspaces are what SGLang itself reserves for them (arg_groups/memory_hook.py).
    """
    rollout, item, ranks = config.rollout, _item_bytes(config), config.ranks_per_engine
    kv_tokens = rollout.kv_cache_tokens or rollout.max_batch_size * (
        config.longest_context + rollout.max_new_tokens
    )
    kv_layers, weights = sizes.num_layers, sizes.total
    if config.speculation.enabled and config.speculation.is_learned:
        kv_layers += 1
        weights += drafter_parameters(sizes) + _frozen_experts(config, sizes)
    # Its memory saver, which frees a sleeping engine's memory, does nothing on a CPU.
    held_in = _AWAKE if device.is_cuda else ALL_PHASES
    graphs_mib = 512 + 1.5 * max(rollout.prefill_chunk_tokens, 2048) + 1024 * ranks / 8
    graphs_mib += 2 * rollout.max_batch_size * _num_graph_sets(config)
    graphs = int(graphs_mib * 2**20) if device.is_cuda else 0
    # It keeps the routes of all KV slots in each of its processes.
    routes = kv_tokens * sizes.num_layers * sizes.num_routed * torch.int32.itemsize
    routes *= rollout.routing_replay
    batch, kv = _engine_settings(config)
    tp = f"sglang.engine_args.tp_size={ranks}"
    chunk = f"{batch} or rollout.prefill_chunk_tokens={rollout.prefill_chunk_tokens}"
    return [
        MemoryClaim("engine weights", weights * item // ranks, held_in, lower=tp),
        MemoryClaim(
            f"engine KV ({kv_tokens} tokens)",
            kv_tokens * sizes.kv * kv_layers * item // ranks,
            held_in,
            lower=f"{kv} or {tp}",
        ),
        MemoryClaim("engine graphs, workspaces", graphs, held_in, lower=chunk, is_estimate=True),
        MemoryClaim("engine routes", routes, in_host=device.is_cuda, lower=kv),
    ]


def _frozen_experts(config: RunConfig, sizes: ModelSizes) -> int:
    """Return the number of parameters of a drafter's routed experts, which are not trained."""
    return sizes.experts if config.speculation.drafter == OWN else 0


def _num_graph_sets(config: RunConfig) -> int:
    """Return how often SGLang captures its graphs: once, or for each chain that it may choose and
    for none.
    """
    section = config.speculation
    if not section.enabled:
        return 1
    chosen = section.parsed_strategies[: 1 if section.selector == "fixed" else None]
    drafting = [each for each in chosen if not each.is_off]
    is_adaptive = all(each.is_learned and each.is_chain for each in drafting)
    return len(adaptive_steps(drafting)) if is_adaptive else 1


def _engine_settings(config: RunConfig) -> tuple[str, str]:
    """Return the settings that make passes and KV of an engine smaller, as a message names them."""
    batch = f"rollout.max_batch_size={config.rollout.max_batch_size}"
    return batch, f"{batch} or rollout.kv_cache_tokens={config.rollout.kv_cache_tokens}"


def _item_bytes(config: RunConfig) -> int:
    dtype: torch.dtype = getattr(torch, config.rollout.dtype)
    return dtype.itemsize
