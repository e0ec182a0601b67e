"""The Megatron policy against transformers: log-probs, entropies, and the weights that it exports.

Each layout is one forked world that runs every model; the tests look at what it brought back.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.mcore_policy import (
    Layout,
    build_policy,
    exports_source,
    hf_logits,
    load_hf,
    make_batch,
    make_micro_batch,
)
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_hf
from tlt_megatron.mcore.initialize import destroy_model_parallel
from tlt_megatron.types import MicroBatch, TokenLogprobs

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 8192,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 0.9,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tied": True}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tied": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    # dense layers between, and the weights of a token's experts do not add up to 1
    "qwen3_moe_mixed": ("qwen3_moe", {"mlp_only_layers": [0, 3], "norm_topk_prob": False}),
    "glm4_moe": ("glm4_moe", {}),
    "llama_linear_rope": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "llama_llama3_rope": (
        "llama",
        {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 16384},
    ),
    "mistral": ("mistral", {}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN_ROPE}),
}
LAYOUTS = {
    "tp1": Layout(world=1),
    "tp2_pp2": Layout(world=4, tensor=2, pipeline=2),
    "cp2_tp2": Layout(world=4, context=2, tensor=2),
    "tp2_pp2_ep2": Layout(world=4, tensor=2, pipeline=2, expert=2),
}
CASES = [  # dense models have no experts to share, and a mixture shares them if tensors are cut
    (layout, name)
    for layout, ranks in LAYOUTS.items()
    for name, (kind, _) in MODELS.items()
    if (ranks.expert == 1 if not kind.endswith("_moe") else ranks.expert > 1 or ranks.tensor == 1)
]
# The longest sequence tells scaled from plain rotary frequencies.
LONG = make_micro_batch((17, 300, 5, 34), seed=3)
# All rows of the long micro-batch count.
BATCH = [dataclasses.replace(LONG, loss_mask=torch.ones(LONG.num_tokens)), *make_batch(1)]
TEMPERATURES = (0.7, 1.0)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the models."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny_hf(folder / name, kind, **config) for name, (kind, config) in MODELS.items()
    }


def _by_transformers(path: Path) -> list[list[TokenLogprobs]]:
    """What transformers gives at each temperature where `loss_mask` is 1, and 0 elsewhere."""
    model = load_hf(path)
    with torch.no_grad():
        pairs = [(hf_logits(model, each), each) for each in BATCH]
    return [[_logprobs(*pair, temperature) for pair in pairs] for temperature in TEMPERATURES]


def _logprobs(
    logits_PV: torch.Tensor, micro_batch: MicroBatch, temperature: float
) -> TokenLogprobs:
    log_p_PV = torch.log_softmax(logits_PV / temperature, dim=-1)
    labels_P1, mask_P = micro_batch.labels[:, None], micro_batch.loss_mask
    policy_log_p_PV = torch.log_softmax(logits_PV, dim=-1)
    return TokenLogprobs(
        logprobs=log_p_PV.gather(1, labels_P1)[:, 0] * mask_P,
        entropy=-(log_p_PV.exp() * log_p_PV).sum(-1) * mask_P,
        policy_logprobs=policy_log_p_PV.gather(1, labels_P1)[:, 0] * mask_P,
    )


@pytest.fixture(scope="module")
def expected(paths: dict[str, Path]) -> dict[str, list[list[TokenLogprobs]]]:
    return {name: _by_transformers(path) for name, path in paths.items()}


Found = dict[str, tuple[list[list[TokenLogprobs]], bool]]


def _run(paths: dict[str, Path], layout: Layout) -> Found:
    """By model: its log-probs at each temperature, and whether it exports what it has loaded."""
    found: Found = {}
    for name, path in paths.items():
        policy, _ = build_policy(path, layout)
        assert policy.infer_logprobs([], 1.0) == []
        logprobs = [policy.infer_logprobs(BATCH, temperature) for temperature in TEMPERATURES]
        found[name] = logprobs, exports_source(policy, path)
        destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def outcomes(paths: dict[str, Path]) -> dict[str, list[Found]]:
    """Per layout and rank, what every model gave."""
    return {
        name: run_ranks(
            layout.world, _run, {model: paths[model] for at, model in CASES if at == name}, layout
        )
        for name, layout in LAYOUTS.items()
    }


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_logprobs_on_every_rank_equal_transformers(
    outcomes: dict[str, list[Found]],
    expected: dict[str, list[list[TokenLogprobs]]],
    layout: str,
    name: str,
) -> None:
    for rank in outcomes[layout]:
        for mine, theirs in zip(rank[name][0], expected[name], strict=True):
            for value, reference in zip(mine, theirs, strict=True):
                for field in ("logprobs", "entropy", "policy_logprobs"):
                    torch.testing.assert_close(
                        getattr(value, field), getattr(reference, field), atol=1e-4, rtol=0
                    )


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_loading_and_exporting_is_the_identity_on_every_rank(
    outcomes: dict[str, list[Found]], layout: str, name: str
) -> None:
    assert all(rank[name][1] for rank in outcomes[layout])


@pytest.mark.parametrize("name", ["llama_linear_rope", "llama_llama3_rope", "qwen2_yarn"])
def test_rope_scaling_changes_the_logits(paths: dict[str, Path], name: str) -> None:
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.AutoConfig.from_pretrained(paths[name], rope_parameters=plain)
    model = transformers.AutoModelForCausalLM.from_pretrained(paths[name], config=config)
    with torch.no_grad():
        difference = hf_logits(model, LONG) - hf_logits(load_hf(paths[name]), LONG)
    assert difference.abs().max() > 1e-2  # parity above is no accident
