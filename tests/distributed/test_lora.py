"""LoRA on Megatron's linears: equal to transformers with PEFT at every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.mcore_policy import (
    LENGTHS,
    OPTIMIZER,
    Layout,
    build_policy,
    check_same_bits,
    check_trained,
    check_weights,
    hf_logits,
    load_hf,
    make_batch,
    tiny_loss,
    train,
)
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_hf
from tlt_megatron.config.schema import OptimizerSection
from tlt_megatron.mcore.policy_model import McorePolicyModel
from tlt_megatron.models.hf_io import save_hf_model
from tlt_megatron.types import TokenLogprobs

ALL = (len(LENGTHS),)
RANK, ALPHA = 4, 8.0
LORA = {"lora_rank": RANK, "lora_alpha": ALPHA}
SEEDS = (1, 2, 3)


def _train(
    path: Path, layout: Layout, shares: tuple[int, ...], settings: dict[str, Any]
) -> dict[str, Any]:
    """Three steps with adapters; also the adapters before and after, and the optimizer's size."""
    policy, groups = build_policy(path, layout, **LORA | settings)
    before = policy.gather_adapters()
    result = train(policy, groups, SEEDS, shares)
    groups_of_adam = policy._optimizer.megatron.param_groups
    return result | {
        "before": before,
        "adapters": policy.gather_adapters(),
        "num_trained": sum(p.numel() for each in groups_of_adam for p in each["params"]),
    }


class LinearExperts(nn.ModuleList):
    """The experts of a layer as linears under the names of a checkpoint, so that PEFT adapts each.
    transformers joins them.
    """

    def __init__(self, joined: Any) -> None:
        super().__init__()
        for gate_up, down in zip(joined.gate_up_proj, joined.down_proj, strict=True):
            weights = dict(zip(("gate_proj", "up_proj"), gate_up.chunk(2), strict=True))
            expert = nn.ModuleDict()
            for name, weight in (weights | {"down_proj": down}).items():
                linear = nn.Linear(*reversed(weight.shape), bias=False)
                linear.weight = nn.Parameter(weight.detach().clone())
                expert[name] = linear
            self.append(expert)

    def forward(self, hidden_PD: Tensor, chosen_PK: Tensor, weights_PK: Tensor) -> Tensor:
        total_PD = torch.zeros_like(hidden_PD)
        for index, expert in enumerate(self):
            assert isinstance(expert, nn.ModuleDict)
            share_P1 = (weights_PK * (chosen_PK == index)).sum(-1, keepdim=True)
            inner_PF = nn.functional.silu(expert["gate_proj"](hidden_PD)) * expert["up_proj"](
                hidden_PD
            )
            total_PD = total_PD + share_P1 * expert["down_proj"](inner_PF)
        return total_PD


def _load_with_linears(path: Path) -> Any:
    model = load_hf(path)
    model.config.model_type = "linears"  # so that PEFT does not look for joined experts
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = LinearExperts(layer.mlp.experts)
    return model


def _train_with_peft(path: Path, adapters: dict[str, Tensor]) -> dict[str, Any]:
    """The same three steps by transformers and PEFT, from the same adapters."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    targets = sorted({name.split(".")[-3] for name in adapters})
    config = LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules=targets)
    model: Any = get_peft_model(_load_with_linears(path), config).double()
    set_peft_model_state_dict(model, adapters)
    learned = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(learned, lr=OPTIMIZER.lr, betas=(0.9, 0.95), weight_decay=0.1)
    norms = []
    for seed in SEEDS:
        batch, loss = make_batch(seed), torch.zeros(())
        for micro_batch in batch:
            logprobs_PV = (hf_logits(model, micro_batch) / 0.8).log_softmax(-1)
            logprobs = logprobs_PV.gather(1, micro_batch.labels[:, None])[:, 0]
            entropy = -(logprobs_PV.exp() * logprobs_PV).sum(-1)
            found = TokenLogprobs(logprobs=logprobs, entropy=entropy, policy_logprobs=logprobs)
            loss = loss + tiny_loss(found, micro_batch).loss_sum
        (loss / sum(each.loss_count for each in batch)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(learned, OPTIMIZER.clip_grad)))
        adam.step()
        adam.zero_grad()
    state = {
        name.replace(".default", ""): p.detach()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    merged = model.merge_and_unload().state_dict()
    return {"norms": norms, "adapters": state, "merged": merged}


@pytest.fixture(scope="module")
def paths(model_path: Path, tied_path: Path, glm: Path) -> dict[str, Path]:
    return {"dense": model_path, "tied": tied_path, "mixture": glm}


@pytest.fixture(scope="module")
def by_peft(paths: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """The results of PEFT, and the adapters that a policy of one rank begins with."""
    found = {}
    for name, path in paths.items():
        (one,) = run_ranks(1, _train, path, Layout(world=1), ALL, {})
        found[name] = _train_with_peft(path, one["before"]) | {"one": one}
    return found


@pytest.mark.parametrize(
    ("model", "layout", "shares", "settings"),
    [
        ("dense", Layout(world=1), ALL, {"recompute": "full"}),
        ("dense", Layout(world=2, tensor=2), ALL, {"recompute": "full"}),
        ("dense", Layout(world=2), (3, 2), {}),
        ("dense", Layout(world=2, context=2), ALL, {}),
        ("dense", Layout(world=4, tensor=2, pipeline=2), ALL, {"recompute": "selective"}),
        ("dense", Layout(world=2, pipeline=2, virtual=2), ALL, {}),
        ("tied", Layout(world=4, pipeline=2), (4, 1), {}),
        ("mixture", Layout(world=1), ALL, {"recompute": "full"}),
        ("mixture", Layout(world=2, expert=2), (3, 2), {}),
        ("mixture", Layout(world=2, tensor=2, expert=2), ALL, {}),
        ("mixture", Layout(world=4, expert=2), (2, 1, 1, 1), {}),
        ("mixture", Layout(world=4, pipeline=2, expert=2), (4, 1), {"recompute": "selective"}),
    ],
    ids=str,
)
def test_three_steps_at_any_layout_equal_peft(
    paths: dict[str, Path],
    by_peft: dict[str, dict[str, Any]],
    model: str,
    layout: Layout,
    shares: tuple[int, ...],
    settings: dict[str, Any],
) -> None:
    """With full recomputation, Megatron would give no gradient behind frozen embeddings."""
    theirs = by_peft[model]
    results = run_ranks(layout.world, _train, paths[model], layout, shares, settings)
    check_trained(results, theirs["one"], 1e-5)
    for result in results:
        assert [each.grad_norm for each in result["stats"]] == pytest.approx(theirs["norms"], 1e-5)
        assert result["adapters"].keys() == theirs["adapters"].keys()
        # Few tokens of a batch meet an expert, and Adam enlarges the rounding of small gradients.
        one_expert = {n: a for n, a in theirs["adapters"].items() if ".experts." in n}
        check_weights(result["adapters"], one_expert, 1e-3)
        rest = {n: a for n, a in theirs["adapters"].items() if n not in one_expert}
        # Compiled loops differ from float64 by up to 2.5e-5 here, and torch's operators by 1.2e-5.
        check_weights(result["adapters"], rest, 4e-5)
        check_weights(result["weights"], {n: theirs["merged"][n] for n in result["weights"]}, 2e-5)
        if layout.world == 1:  # the optimizer has the adapters alone
            assert result["num_trained"] == sum(a.numel() for a in theirs["adapters"].values())


def _save(path: Path, layout: Layout, folder: Path) -> dict[str, Any]:
    """Two steps, a save, two more."""
    policy, groups = build_policy(path, layout, **LORA)
    train(policy, groups, (1, 2))
    policy.save(folder)
    return train(policy, groups, (3, 4))


def _load(path: Path, layout: Layout, folder: Path) -> dict[str, Any]:
    policy, groups = build_policy(path, layout, **LORA)
    policy.load(folder)
    return train(policy, groups, (3, 4))


@pytest.mark.parametrize("model, expert, most", [("dense", 1, 1), ("mixture", 2, 2)])
def test_a_checkpoint_of_adapters_loads_at_its_layout_and_at_one_rank(
    paths: dict[str, Path], tmp_path: Path, model: str, expert: int, most: int
) -> None:
    """Megatron's linears would save a cut factor as one that all ranks share. All weights with
    their moments would take three times the bytes of the weights.
    """
    model_path, layout = paths[model], Layout(world=2, tensor=2, expert=expert)
    # a forked rank once stood still in torch's writer of checkpoints
    straight = run_ranks(2, _save, model_path, layout, tmp_path, method="spawn")
    resumed = run_ranks(2, _load, model_path, layout, tmp_path)
    for expected, result in zip(straight, resumed, strict=True):
        assert (result["sums"], result["stats"]) == (expected["sums"], expected["stats"])
        check_same_bits(result["weights"], expected["weights"])
    check_trained(run_ranks(1, _load, model_path, Layout(world=1), tmp_path), straight[0])
    weights = sum(file.stat().st_size for file in model_path.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < most * weights


def _learn_little(path: Path, folder: Path) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Log-probs before three small steps in bfloat16, after them, and of the reference; the
    weights that an engine gets go to `folder`.
    """
    small = OptimizerSection(lr=1e-5)
    policy, groups = build_policy(
        path, Layout(world=1), dtype="bfloat16", optimizer=small, keep_reference=True, **LORA
    )
    before = _logprobs(policy)
    train(policy, groups, SEEDS)
    save_hf_model(folder, policy.export_hf_weights(), path, dtype=torch.bfloat16)
    reference = policy.infer_logprobs(make_batch(7), 1.0, reference=True)
    return before, _logprobs(policy), [each.logprobs for each in reference]


def _plain_logprobs(path: Path) -> list[Tensor]:
    policy, _ = build_policy(path, Layout(world=1), dtype="bfloat16")
    return _logprobs(policy)


def _logprobs(policy: McorePolicyModel) -> list[Tensor]:
    return [each.logprobs for each in policy.infer_logprobs(make_batch(7), 1.0)]


def test_training_uses_the_rounded_weights_that_an_engine_gets(
    model_path: Path, tmp_path: Path
) -> None:
    """With adapters beside the weights, bfloat16 engines would miss most of a small update. The
    reference is the policy without adapters.
    """
    folder = tmp_path / "exported"
    (found,) = run_ranks(1, _learn_little, model_path, folder)
    before, trained, reference = found
    assert all(map(torch.equal, trained, run_ranks(1, _plain_logprobs, folder)[0]))
    assert all(map(torch.equal, before, reference))
    assert not any(map(torch.equal, before, trained))


@pytest.mark.parametrize("targets", [("q_proj", "v_proj", "o_proj"), ("up_proj", "down_proj")])
def test_attention_or_experts_alone_have_adapters(tmp_path: Path, targets: tuple[str, ...]) -> None:
    """One of Megatron's two optimizers, of experts and of the rest, has no parameters."""
    path, some = make_tiny_hf(tmp_path / "qwen3_moe", "qwen3_moe"), {"lora_targets": targets}
    expected, *_ = run_ranks(1, _train, path, Layout(world=1), ALL, some)
    results = run_ranks(2, _train, path, Layout(world=2, expert=2), (3, 2), some)
    check_trained(results, expected, 1e-5)
    assert all(a.any() for name, a in expected["adapters"].items() if "lora_B" in name)
