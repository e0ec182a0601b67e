"""The ledger of a run against sums by hand, for the Qwen2.5-7B shape."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.qwen_shapes import QWEN_7B, QWEN_30B_A3B
from tests.ranks import run_ranks
from tlt_megatron.config.load import load_config
from tlt_megatron.config.model_shape import tensor_shapes
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.sizes import ModelSizes
from tlt_megatron.runtime.device import Device
from tlt_megatron.runtime.memory_claim import MemoryClaim, MemoryLedger, Phase
from tlt_megatron.runtime.process_groups import group_of
from tlt_megatron.trainer.before.memory_ledger import check_memory, describe_checkpoint, make_ledger
from tlt_megatron.trainer.flops import forward_flops

TOTAL = 7_615_616_512  # parameters, as the model card counts them
TABLE = 152064 * 3584
LAYER = 2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 3584 * 18944 + 2 * 3584 + 3584 + 2 * 512
DRAFTER = LAYER + 3 * 3584**2
# Elements of a layer that are kept for the backward pass, per token: norms, projections and
# attention, MLP.
MLP = 3 * 18944
KEPT = 4 * 3584 + 3 * 3584 + 3 * 512 + MLP
GPU = Device(torch_device=torch.device("cuda", 0), backend="cpu:gloo,cuda:nccl")
CPU = Device(torch_device=torch.device("cpu"), backend="gloo")


def ledger_of(
    tmp_path: Path,
    overrides: str = "",
    world_size: int = 1,
    device: Device = GPU,
    model: dict[str, Any] = QWEN_7B,
) -> MemoryLedger:
    (tmp_path / "config.json").write_text(json.dumps(model), encoding="utf-8")
    base = "model.dtype=bfloat16 rollout.dtype=bfloat16 rollout.kv_cache_tokens=102400"
    config = load_config(None, [f"model.path={tmp_path}", *base.split(), *overrides.split()])
    return make_ledger(config, world_size, device)


def claim(ledger: MemoryLedger, name: str) -> int:
    (num_bytes,) = (c.num_bytes for c in ledger.claims if c.name.startswith(name))
    return num_bytes


def test_a_second_model_is_on_the_device_in_its_passes_alone(tmp_path: Path) -> None:
    second = ledger_of(tmp_path, f"{FOLLOWS} algorithm.distill_coef=1")
    (claim,) = (c for c in second.claims if c.name == "second model")
    assert claim.num_bytes == pytest.approx(TOTAL * 2, rel=1e-4)
    assert claim.phases == {Phase.START, Phase.UPDATE}


KV_SLOT = 2 * (2 * 4 * 128 * 28 + 1)  # keys and values of a token in all layers
ADAPTERS = 32 * 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))  # of rank 32
SGLANG = 'rollout.engine=sglang sglang.engine_args={"tp_size":4}'
SMALL = "rollout.num_prompts=1 rollout.num_samples=2 data.max_prompt_tokens=512 rollout.max_new_tokens=512"
MLP_AGAIN = 'mcore.recompute=selective mcore.transformer={"recompute_modules":["mlp"]}'
VIRTUAL = "parallel.pipeline=2 parallel.virtual_pipeline=2"
AWAY = "mcore.offload_in_rollouts=true"
FOLLOWS = "algorithm.kl_coef=0.1 reference.refresh_steps=5 model.lora_rank=8"
TLT = "speculation.enabled=true spot.enabled=true"
TAPPED = (
    f"{TLT} spot.data_bytes=10000000000 rollout.num_prompts=2 rollout.num_samples=8"
    " data.max_prompt_tokens=400 rollout.max_new_tokens=600"
)


@pytest.mark.parametrize(
    "overrides, world_size, name, num_bytes",
    [
        ("", 1, "policy", TOTAL * 2),
        ("", 1, "gradients", TOTAL * 4),
        ("", 1, "optimizer", TOTAL * 12),
        ("", 1, "engine weights", TOTAL * 2),
        ("", 1, "engine KV (102400 tokens)", (102400 + 64) * KV_SLOT),  # and the graphs' scratch page
        ("", 1, "activations", 8192 * 28 * KEPT * 2),
        ("parallel.tensor=2", 2, "policy", TOTAL),
        ("parallel.tensor=2", 2, "engine weights", TOTAL * 2),
        ("parallel.tensor=2", 2, "activations", 8192 * 28 * KEPT),
        ("", 8, "optimizer", TOTAL * 12 / 8),
        ("", 8, "gradients", TOTAL * 4),
        ("rollout.kv_cache_tokens=51200", 1, "engine KV", (51200 + 64) * KV_SLOT),
        ("mcore.recompute=full", 1, "activations", 8192 * 28 * 3584 * 2),
        (MLP_AGAIN, 1, "activations", 8192 * 28 * (KEPT - MLP) * 2),  # beside the logits
        (VIRTUAL, 2, "activations", 8192 * 14 * KEPT * 2 * 2.5),  # 5 passes of half a stage
        (SMALL, 1, "activations", 2 * 1024 * 28 * KEPT * 2),  # less than a micro-batch
        (SMALL, 1, "logits", 2 * 1024 * 152064 * 4),
        ("algorithm.kl_coef=0.1", 1, "reference policy", TOTAL * 2),
        ("model.lora_rank=32", 1, "adapters", 2 * ADAPTERS),
        ("model.lora_rank=32", 8, "optimizer", 12 * ADAPTERS / 8),
        (f"{FOLLOWS} parallel.tensor=2", 2, "second model, away", TOTAL * 2 / 2),
        (SGLANG, 4, "engine weights", TOTAL * 2 / 4),
        (SGLANG, 4, "engine KV", 102400 * 1024 * 28 * 2 / 4),
        (SGLANG, 4, "engine graphs", (512 + 1.5 * 2048 + 4 * 128 + 2 * 64) * 2**20),
        (TLT, 1, "drafter in training", DRAFTER * 20),
        (TLT, 1, "engine drafter", (DRAFTER + 8192 * 3584) * 2),  # with rows of the head
        (f"{TLT} speculation.draft_vocab_size=0", 1, "engine drafter", DRAFTER * 2),
        (TAPPED, 1, "tapped states", 16 * 1000 * 3584 * 2),
        (f"{TAPPED} parallel.tensor=2", 4, "tapped states", 4 * 1000 * 3584 * 2),
        (f"{TAPPED} parallel.pipeline=2", 2, "tapped states", 16 * 1000 * 3584 * 2),
        (f"{TAPPED} drafter.algorithm=eagle3", 1, "tapped states", 4 * 16 * 1000 * 3584 * 2),
        (f"{TAPPED} spot.data_bytes=1000000", 1, "tapped states", 1000000),
        ("", 1, "checkpoint", 2 * 4 * TABLE),  # in the writer
        ("", 4, "checkpoint", 5 * 4 * TABLE),  # and one parameter that shards cut
        ("parallel.tensor=2", 4, "checkpoint", 5 * 2 * TABLE),
        ("checkpoint.resume=auto", 1, "loaded checkpoint", 20 * TOTAL),
        (f"checkpoint.resume=auto {AWAY}", 1, "loaded checkpoint", 8 * TOTAL),  # 12 away, before or after
        ("", 16, "copied parameters", TOTAL * (2 - 8 / 16)),  # beside gradients, before moments
    ],
)  # fmt: skip
def test_a_claim_by_hand(
    tmp_path: Path, overrides: str, world_size: int, name: str, num_bytes: float
) -> None:
    assert claim(ledger_of(tmp_path, overrides, world_size), name) == pytest.approx(num_bytes, rel=1e-4)  # fmt: skip


def test_a_checkpoint_takes_memory_of_the_host(tmp_path: Path) -> None:
    assert claim(ledger_of(tmp_path).of_host(), "checkpoint") > 0
    on_cpu = ledger_of(tmp_path, "", 4, CPU)
    assert claim(on_cpu, "checkpoint") == 5 * 4 * TABLE
    assert not on_cpu.of_host().claims


def test_the_fullest_of_uneven_stages_counts(tmp_path: Path) -> None:
    """Of 28 layers the first stage holds 18, and activations of two micro-batches, or the last one
    the logits.
    """
    first = "parallel.pipeline=2 mcore.transformer.num_layers_in_first_pipeline_stage"
    even, more, fewer = (ledger_of(tmp_path, f"{first}={n}", 2) for n in (14, 18, 10))
    assert claim(even, "policy") == 2 * (14 * LAYER + TABLE)
    for ledger in (more, fewer):
        assert claim(ledger, "policy") == 2 * (18 * LAYER + TABLE)
    per_layer = claim(even, "activations") / 28
    assert claim(more, "activations") == pytest.approx(36 * per_layer)
    assert claim(fewer, "activations") == pytest.approx(18 * per_layer)  # beside the logits


GLM_AIR = {
    "model_type": "glm4_moe",
    **{"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944},
    **{"num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8},
    **{"head_dim": 128, "attention_bias": True, "max_position_embeddings": 131072},
}


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_the_checkpoints_own_layer_is_counted_with_its_frozen_experts(
    engine: str, tmp_path: Path
) -> None:
    tlt = f"{TLT} rollout.engine={engine} parallel.tensor=8 drafter.algorithm=hass"
    plain = ledger_of(tmp_path, tlt, 8, model=GLM_AIR)
    own = ledger_of(tmp_path, f"{tlt} speculation.drafter=own", 8, model=GLM_AIR)
    experts = 2 * 128 * 3 * 4096 * 1408
    assert claim(own, "drafter's frozen experts") == experts  # beside the engine's copy
    name = "engine drafter" if engine == "embedded" else "engine weights"
    assert claim(own, name) - claim(plain, name) == experts
    assert claim(own, "drafter in training") == claim(plain, "drafter in training")


def test_shared_experts_and_dense_layers_are_counted(tmp_path: Path) -> None:
    """The sizes of GLM-4.5-Air, without the layer that predicts a further token."""
    (tmp_path / "config.json").write_text(json.dumps(GLM_AIR), encoding="utf-8")
    shapes = tensor_shapes(load_model_config(tmp_path))
    sizes = ModelSizes(load_model_config(tmp_path))
    assert sizes.total == sum(math.prod(shape) for shape in shapes.values())
    assert sizes.total == pytest.approx(106.9e9, rel=5e-3)


def test_experts_are_counted_where_they_are(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 30.5e9 parameters, of which 3.3e9 compute a token (model card)."""
    layout = "parallel.tensor=4 parallel.expert=8"
    ledger = ledger_of(tmp_path, layout, 16, model=QWEN_30B_A3B)
    model = load_model_config(tmp_path)
    sizes = ModelSizes(model)
    assert sizes.total == sum(math.prod(shape) for shape in tensor_shapes(model).values())
    assert sizes.total == pytest.approx(30.5e9, rel=2e-3)
    assert forward_flops(model, [1]) == pytest.approx(2 * 3.35e9, rel=1e-2)
    experts = 48 * sizes.experts
    rest = sizes.total - experts
    own = rest / 4 + experts / 8
    assert claim(ledger, "policy") == pytest.approx(2 * own, rel=1e-3)
    assert claim(ledger, "gradients") == pytest.approx(4 * own, rel=1e-3)
    # the rest has a copy on each of 4 data-parallel ranks, an expert on 2
    assert claim(ledger, "optimizer") == pytest.approx(12 * sizes.total / 16, rel=1e-3)


def test_adapters_of_experts_are_counted_where_they_are(tmp_path: Path) -> None:
    words = "parallel.tensor=4 parallel.expert=8 model.lora_rank=8"
    ledger = ledger_of(tmp_path, words, 16, model=QWEN_30B_A3B)
    attention = 2 * (2048 + 4096 // 4) + 2 * (2048 + 512 // 4)
    experts = 128 // 8 * 3 * (2048 + 768)
    assert claim(ledger, "adapters") == 2 * 8 * 48 * (attention + experts)
    assert claim(ledger, "optimizer") == 12 * 8 * 48 * (attention // 4 + experts // 2)
    shared = ledger_of(
        tmp_path, "parallel.tensor=4 parallel.expert=8 model.lora_rank=8", 16, model=GLM_AIR
    )
    mlp = 10944 // 4 + 4096 + 45 * (4096 + 1408 // 4)  # one dense layer, 45 with a shared expert
    experts = 45 * 128 // 8 * (4096 + 1408)
    attention = 46 * (2 * (4096 + 96 * 128 // 4) + 2 * (4096 + 8 * 128 // 4))
    assert claim(shared, "adapters") == 2 * 8 * (attention + 3 * (mlp + experts))


def test_the_frozen_weights_of_adapters_are_away_in_rollouts(tmp_path: Path) -> None:
    words = "mcore.offload_in_rollouts=true parallel.tensor=2"
    for rank, phases in ((0, {*Phase}), (8, {Phase.START, Phase.UPDATE})):
        ledger = ledger_of(tmp_path, f"{words} model.lora_rank={rank}", 2)
        (policy,) = (each for each in ledger.claims if each.name == "policy")
        assert policy.phases == phases
        in_host = [each.num_bytes for each in ledger.claims if each.name == "policy, offloaded"]
        assert in_host == [policy.num_bytes] * (rank > 0)


def test_the_table_fits_80_columns(tmp_path: Path) -> None:
    overrides = "algorithm.advantage=gae mcore.offload_in_rollouts=True rollout.engine=embedded"
    lines = ledger_of(tmp_path, overrides, 4).lines()
    assert max(map(len, lines)) <= 80, lines


def test_the_bytes_and_seconds_of_a_checkpoint_are_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B), encoding="utf-8")
    config = load_config(None, [f"model.path={tmp_path}", "model.dtype=bfloat16"])
    told = describe_checkpoint(config, 4)
    assert "106.6 GB" in told  # 7.615e9 x (2 + 12)
    assert "38.1 GB" in told  # 7.615e9 x (2 + 12 / 4)
    critic = load_config(
        None, [f"model.path={tmp_path}", "model.dtype=bfloat16", "algorithm.advantage=gae"]
    )
    assert "205.6 GB" in describe_checkpoint(critic, 4)  # and 7.070e9 x (2 + 12)


@pytest.mark.parametrize("is_away", [False, True])
def test_a_critic_takes_what_a_policy_without_output_layer_does(
    tmp_path: Path, is_away: bool
) -> None:
    overrides = f"mcore.offload_in_rollouts={is_away}"
    plain = ledger_of(tmp_path, overrides, 4)
    ledger = ledger_of(tmp_path, f"{overrides} algorithm.advantage=gae", 4)
    own = TOTAL - TABLE
    added = {phase: ledger.bytes_in(phase) - plain.bytes_in(phase) for phase in Phase}
    host = {p: ledger.of_host().bytes_in(p) - plain.of_host().bytes_in(p) for p in Phase}
    # away, its gradients and optimizer take the place of the policy's, and the larger optimizer of
    # both is counted
    expected = own * (2 if is_away else 2 + 4 + 12 / 4)
    assert list(added.values()) == pytest.approx([expected] * len(Phase), rel=1e-3)
    # and a few bytes a token for values and returns
    assert list(host.values()) == pytest.approx(
        [TOTAL * 3 * is_away] * len(Phase), rel=1e-3, abs=2e6
    )


def test_a_resume_takes_what_an_update_does_without_its_activations(tmp_path: Path) -> None:
    """The engine sleeps, and there is no drafter yet."""
    for more in (AWAY, f"{AWAY} algorithm.advantage=gae", f"{AWAY} {SGLANG}"):
        ledger = ledger_of(tmp_path, f"{more} {TLT} checkpoint.resume=auto", 4)
        held = [c.name for c in ledger.claims if Phase.START in c.phases and not c.in_host]
        critic = ["critic"] if "gae" in more else []
        assert sorted(held) == sorted(["libraries", "policy", *critic, "gradients", "optimizer"])
        assert ledger.bytes_in(Phase.START) < ledger.bytes_in(Phase.UPDATE)


@pytest.mark.parametrize(
    ("settings", "num_sets"),
    [
        ("speculation.enabled=false spot.enabled=false", 1),
        ('speculation.strategies=["2_1_2","4_1_4","6_1_6"]', 4),  # with plain decoding
        ('speculation.strategies=["2_1_2","off","6_1_6"]', 3),
        ('speculation.strategies=["4_1_4","6_1_6"] speculation.selector=fixed', 2),
        ('speculation.strategies=["4_2_8"] speculation.selector=fixed', 1),
        ("speculation.strategies=[ngram_8] speculation.selector=fixed spot.enabled=false", 1),
    ],
)
def test_sglang_has_graphs_for_each_chain_and_for_none(
    tmp_path: Path, settings: str, num_sets: int
) -> None:
    words = f"{SGLANG} {TLT} {settings}"
    graphs = claim(ledger_of(tmp_path, words, 4), "engine graphs")
    assert graphs == (512 + 1.5 * 2048 + 4 * 128 + 2 * 64 * num_sets) * 2**20


def test_sglang_keeps_routes_in_host_memory(tmp_path: Path) -> None:
    """An int32 for each of the 8 experts of a token in all 48 layers, at every KV slot."""
    words = f"{SGLANG} rollout.routing_replay=true parallel.expert=4"
    ledger = ledger_of(tmp_path, words, 4, model=QWEN_30B_A3B)
    assert claim(ledger.of_host(), "engine routes") == 102400 * 48 * 8 * 4
    without = ledger_of(tmp_path, f"{SGLANG} parallel.expert=4", 4, model=QWEN_30B_A3B)
    assert "engine routes" not in [each.name for each in without.claims]


def test_routes_and_advantages_of_a_batch_are_in_host_memory(tmp_path: Path) -> None:
    """2 bytes for each of 8 experts in 48 layers of a token, where it was drawn and where owned."""
    words = "rollout.num_prompts=128 rollout.num_samples=8 data.max_prompt_tokens=2048 rollout.max_new_tokens=30700"
    words += f" parallel.tensor=4 parallel.expert=8 rollout.routing_replay=true {SGLANG}"
    ledger = ledger_of(tmp_path, words, 16, model=QWEN_30B_A3B).of_host()
    longest = 2048 + 30700
    assert claim(ledger, "routes of responses") == 1024 // 4 * longest * 48 * 8 * 2  # four engines
    assert claim(ledger, "routes of the update") == 2 * 1024 // 4 * longest * 48 * 8 * 2  # packed
    assert claim(ledger, "advantages") == 1024 // 4 * longest * 24
    assert claim(ledger, "tokens of responses") == 1024 // 4 * longest * 32
    assert claim(ledger, "exchange of tokens") == 4 * (4 * longest * (32 + 768))  # one response
    words += (
        " rollout.partial_rollout_tokens=512 rollout.over_sampling_prompts=256 algorithm.tis_cap=2"
    )
    ledger = ledger_of(tmp_path, words, 16, model=QWEN_30B_A3B).of_host()
    assert claim(ledger, "routes of responses") == 2048 // 4 * longest * 48 * 8 * 2
    plain = ledger_of(tmp_path, "algorithm.advantage=gae", 4)
    assert claim(plain.of_host(), "advantages") == 32 * (1024 + 512) * 56
    assert "routes of responses" not in [each.name for each in plain.claims]
    assert claim(plain, "exchange of tokens") == 4 * min(32 * 1536 * 32, 64 << 20)
    assert "exchange of tokens" not in [each.name for each in ledger_of(tmp_path).claims]


def test_an_idle_rank_trains_the_drafter_without_its_kv(tmp_path: Path) -> None:
    speculates, plain = ledger_of(tmp_path, TLT), ledger_of(tmp_path)
    kept = plain.bytes_in(Phase.SPOT) - claim(plain, "engine KV") - claim(plain, "engine graphs")
    assert speculates.bytes_in(Phase.SPOT) > kept + DRAFTER * 16
    for name, in_spot in (("engine KV", False), ("engine weights", True)):
        (phases,) = (c.phases for c in speculates.claims if c.name.startswith(name))
        assert (Phase.SPOT in phases) is in_spot


def test_an_engine_that_keeps_its_graphs_is_counted_in_updates_too(tmp_path: Path) -> None:
    base, kept = ledger_of(tmp_path), ledger_of(tmp_path, "rollout.graphs=keep")
    parts = ("engine weights", "engine KV", "engine graphs")
    more = kept.bytes_in(Phase.UPDATE) - base.bytes_in(Phase.UPDATE)
    assert more == sum(claim(kept, part) for part in parts)
    assert kept.bytes_in(Phase.ROLLOUT) == base.bytes_in(Phase.ROLLOUT)


def test_verify_passes_are_counted_row_by_row(tmp_path: Path) -> None:
    plain = ledger_of(tmp_path)
    speculating = ledger_of(
        tmp_path, 'speculation.enabled=true speculation.strategies=["ngram_7","ngram_3"]'
    )
    rows = 64 * (8 - 1)  # seven drafted tokens and the root, in place of one row
    more = claim(speculating, "decode and verify") - claim(plain, "decode and verify")
    assert more > rows * 152064 * 34  # logits, log-probs and noise alone


def test_states_tapped_in_the_update_lie_beside_its_activations(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path, TAPPED, 1, CPU)
    assert claim(ledger, "tapped states") == 16 * 1000 * 3584 * 4
    (phases,) = (each.phases for each in ledger.claims if each.name == "tapped states")
    assert phases == {Phase.UPDATE}
    before = ledger_of(
        tmp_path, f"{TAPPED} algorithm.num_epochs=2"
    )  # tapped when there are none yet
    assert all(each.name != "tapped states" for each in before.claims)


def test_too_little_memory_on_one_rank_is_refused_with_the_same_words_on_all() -> None:
    ledger = MemoryLedger(
        [MemoryClaim(name="policy", num_bytes=900 << 20, lower="parallel.tensor=1")]
    )

    def body() -> str:
        free_bytes = (1000 if dist.get_rank() == 0 else 500) << 20
        with pytest.raises(
            ValueError, match=r"475 MiB are usable: change parallel\.tensor=1"
        ) as told:
            check_memory(ledger, free_bytes, 0, group_of(dist.group.WORLD))
        return str(told.value)

    first, second = run_ranks(2, body)
    assert first == second
