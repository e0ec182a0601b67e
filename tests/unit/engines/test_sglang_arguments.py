"""What an SGLang engine is started with, without SGLang."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_files import write_drafter
from tlt_megatron.config.schema import RolloutSection, SglangSection, SpeculationSection
from tlt_megatron.engines.sglang.arguments import (
    engine_arguments,
    free_port,
    plan_speculation,
)
from tlt_megatron.speculation.sampling import gumbel_noise, request_seed, seed_at_origin


@pytest.fixture
def drafter(tmp_path: Path) -> str:
    write_drafter(tmp_path)
    return str(tmp_path)


def speculate(drafter: str, *strategies: str, **settings: Any) -> SpeculationSection:
    return SpeculationSection(
        enabled=True, drafter=drafter, strategies=list(strategies), **settings
    )


def arguments(section: SpeculationSection | None = None, **settings: Any) -> dict[str, Any]:
    return engine_arguments(
        "models/policy",
        RolloutSection(max_batch_size=8, max_new_tokens=100, **settings.pop("rollout", {})),
        SglangSection(engine_args=settings.pop("engine_args", {})),
        speculation=None if section is None else plan_speculation(section),
        device_type=settings.pop("device_type", "cpu"),
        device_index=3,
        rank=5,
        max_prompt_tokens=28,
    )


def test_options_follow_from_the_sections_and_the_rank() -> None:
    found = arguments(engine_args={"schedule_policy": "lpm", "attention_backend": "triton"})
    assert found["model_path"] == "models/policy"
    assert (found["device"], found["base_gpu_id"]) == ("cpu", 3)
    assert found["max_running_requests"] == 8
    assert found["max_total_tokens"] >= 8 * 128
    assert found["schedule_policy"] == "lpm"
    assert found["attention_backend"] == "triton"  # a default of ours, not a setting
    assert "enable_memory_saver" not in found


def test_keys_that_other_sections_set_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="dtype, model_path follow from other sections"):
        arguments(engine_args={"model_path": "x", "dtype": "float16", "tp_size": 2})


@pytest.mark.parametrize(
    "dtype, device, known",
    [
        ("float64", "cpu", "float32 or bfloat16"),
        ("float64", "cuda", "bfloat16"),
        ("float32", "cuda", "bfloat16"),
    ],
)
def test_a_dtype_without_kernels_is_refused(dtype: str, device: str, known: str) -> None:
    text = f"rollout.dtype='{dtype}': must be {known} where rollout.engine='sglang' and the device is {device}"
    with pytest.raises(ValueError, match=text):
        arguments(rollout={"dtype": dtype}, device_type=device)


def test_a_gpu_gives_its_memory_back_and_keeps_the_drafter(drafter: str) -> None:
    section = speculate(drafter, "4_1_4", selector="fixed")
    found = arguments(section, device_type="cuda", rollout={"dtype": "bfloat16"})
    assert found["enable_memory_saver"]
    assert found["disable_prefill_cuda_graph"]
    assert found["enable_draft_weights_cpu_backup"]
    assert (
        "enable_weights_cpu_backup" not in found
    )  # the policy is sent anew: parking it would cost host memory
    assert "disable_cuda_graph" not in found


TREE = {"algorithm": "EAGLE", "num_steps": 4, "eagle_topk": 2, "num_draft_tokens": 9}
CHAINS = {"adaptive": True, "num_steps": 4}  # starts with the longest


@pytest.mark.parametrize(
    "strategies, selector, expected",
    [
        (["4_2_8", "6_1_6"], "fixed", TREE | {"adaptive": False}),  # with its root
        *((["4_1_4", "2_1_2"], name, CHAINS) for name in ("cost_model", "beg_mab", "fixed")),
        (["ngram_6"], "fixed", {"algorithm": "NGRAM", "num_draft_tokens": 7}),
    ],
)
def test_strategies_become_sglangs_options(
    drafter: str, strategies: list[str], selector: str, expected: dict[str, object]
) -> None:
    is_learned = strategies != ["ngram_6"]
    found = arguments(speculate(drafter if is_learned else "", *strategies, selector=selector))
    assert found.get("speculative_draft_model_path") == (drafter if is_learned else None)
    assert {name: found[f"speculative_{name}"] for name in expected} == expected


@pytest.mark.parametrize(
    "strategies, selector, reason",
    [
        (["4_2_8", "4_1_4"], "cost_model", "speculation.strategies=4_2_8.*chains alone"),
        (["ngram_4", "4_1_4"], "cost_model", "n-gram cache alone"),
        (["off"], "fixed", "all are off"),
    ],
)
def test_what_sglang_cannot_hold_is_refused(
    drafter: str, strategies: list[str], selector: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        plan_speculation(speculate(drafter, *strategies, selector=selector))


@pytest.mark.parametrize(
    "strategies, rows, message",
    [
        (["4_2_8"], 2048, "strategies=4_2_8: sglang returns the routes of learned chains alone"),
        (["ngram_4"], 2048, "strategies=ngram_4: sglang returns the routes of learned chains"),
        (["4_1_4"], 32, "prefill_chunk_tokens=32: must be >= 40 with rollout.routing_replay"),
        (["4_1_4"], 40, ""),
        ([], 1, ""),
    ],
)
def test_routes_that_sglang_would_lose_are_refused(
    drafter: str, strategies: list[str], rows: int, message: str
) -> None:
    section = speculate(drafter, *strategies, selector="fixed") if strategies else None
    rollout = {"routing_replay": True, "prefill_chunk_tokens": rows}
    if message:
        with pytest.raises(ValueError, match=message):
            arguments(section, rollout=rollout)
    else:
        assert arguments(section, rollout=rollout)["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in arguments(section)


def test_ranks_look_for_ports_in_ranges_of_their_own_and_skip_taken_ones() -> None:
    first = free_port(40)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        assert first < free_port(40) < first + 16
    assert free_port(41) >= 21_000 + 41 * 16


@pytest.mark.parametrize("num_prompt_tokens", [1, 7, 30000])
def test_a_shifted_seed_makes_the_same_noise(num_prompt_tokens: int) -> None:
    seed = request_seed(3, 11, 2)
    places = torch.tensor([0, 1, 500])
    expected = gumbel_noise(torch.full((3,), seed), places, 64)
    shifted = seed_at_origin(seed, num_prompt_tokens)
    # The token at place t of the response follows position num_prompt_tokens - 1 + t of the
    # sequence.
    found = gumbel_noise(torch.full((3,), shifted), places + num_prompt_tokens - 1, 64)
    assert torch.equal(found, expected)
