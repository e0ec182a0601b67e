"""The draft layer against its definition, and the refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.slow_draft import (
    HIDDEN_SIZE,
    VOCAB_SIZE,
    make_draft_model,
    make_sequence,
    slow_draft,
)
from tests.tiny_models import tiny_config
from tlt_megatron.config.draft_folder import default_aux_layer_ids
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import (
    DraftModel,
    fingerprint_target,
    make_draft_config,
)
from tlt_megatron.types import DraftSequence


class GrowingKv:
    """One sequence whose keys and values are kept, as an engine keeps them."""

    def __init__(self) -> None:
        self.kv_SKH: Tensor | None = None

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        """See `Attention`; new tokens see each other causally."""
        past = [] if self.kv_SKH is None else [self.kv_SKH]
        self.kv_SKH = torch.cat([*past, kv_PKH]).detach()
        key, value = self.kv_SKH.transpose(0, 1).unsqueeze(0).chunk(2, dim=1)
        query = query_PNH.transpose(0, 1).unsqueeze(0)
        num_new, num_kept = len(query_PNH), len(self.kv_SKH)
        is_visible = torch.ones(num_new, num_kept, dtype=torch.bool).tril(num_kept - num_new)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=is_visible, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)


def draft(
    view: DraftInference, sequence: DraftSequence, position: int, num_steps: int
) -> list[tuple[Tensor, Tensor]]:
    """Prefill the pairs up to `position`, then draft step by step over kept keys and values."""
    kv = GrowingKv()
    positions = torch.arange(position + 1)
    tokens = sequence.token_ids[1 : position + 2]
    results = []
    hidden = view.fuse(sequence.features[: position + 1])
    for k in range(num_steps):
        hidden, head = view.forward(tokens, hidden, positions, kv)
        hidden, head = hidden[-1:], head[-1:]
        results.append((hidden[0], head[0]))
        positions = torch.tensor([position + 1 + k])
        tokens = sequence.token_ids[position + 2 + k : position + 3 + k]
    return results


@pytest.mark.parametrize(
    ("architecture", "config"),
    [("eagle", {}), ("eagle3", {}), ("eagle3", {"norm_before_residual": True})],
)
def test_steps_equal_the_definition(architecture: str, config: dict[str, bool]) -> None:
    """This is the engine's form of the layer. test_draft_loss.py compares the form for training."""
    model = make_draft_model(architecture, **config)
    sequence = make_sequence(model, 12)
    view = DraftInference(model)
    view.rotary.reserve(64)
    with torch.no_grad():
        actual = draft(view, sequence, 5, 4)
        expected = slow_draft(model, sequence, 5, 4)
    for ours, slow in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, slow, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("architecture", ["eagle", "eagle3"])
def test_inference_follows_changed_weights_and_embedding(architecture: str) -> None:
    check_inference_follows(make_draft_model(architecture))


def check_inference_follows(model: DraftModel) -> None:
    """Check that the engine's form computes as the model after its weights and tables change."""
    view = DraftInference(model)
    sequence = make_sequence(model, 8)
    model.rotary.reserve(64)
    view.rotary.reserve(64)
    with torch.no_grad():
        for tensor in (model.embedding_VD, model.lm_head_VD):
            tensor.mul_(1.25).add_(0.01)
        view.load({name: weight * 1.25 + 0.01 for name, weight in model.state_dict().items()})
        positions, tokens = torch.arange(6), sequence.token_ids[1:7]
        features = sequence.features[:6]
        expected = model(tokens, model.fuse(features), positions, GrowingKv())
        actual = view.forward(tokens, view.fuse(features), positions, GrowingKv())
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(view.logits(actual[1]), model.logits(expected[1]))


@pytest.mark.parametrize("architecture", ["eagle", "eagle3"])
def test_borrowed_parts_are_frozen_and_not_saved(architecture: str) -> None:
    embedding = torch.nn.Parameter(torch.randn(VOCAB_SIZE, HIDDEN_SIZE))
    lm_head = torch.nn.Parameter(torch.randn(VOCAB_SIZE, HIDDEN_SIZE))
    config = make_draft_config(tiny_config(), architecture, embedding)
    model = DraftModel(config, embedding_VD=embedding, lm_head_VD=lm_head)
    model.rotary.reserve(8)
    hidden = model.fuse(torch.randn(4, config.feature_size))
    _, head = model(torch.arange(4), hidden, torch.arange(4), GrowingKv())
    model.logits(head).square().sum().backward()
    assert embedding.grad is None
    assert lm_head.grad is None
    assert model.fc.weight.grad is not None
    assert not [name for name in model.state_dict() if "embed" in name or "head" in name]
    assert len(list(model.parameters())) == len(model.state_dict())


def test_parameter_names_are_sglangs() -> None:
    attention = [f"self_attn.{p}_proj.weight" for p in "qkvo"]
    rest = [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    rest.append("post_attention_layernorm.weight")
    eagle = {"fc.weight", "fc.bias"} | {f"layers.0.{name}" for name in attention + rest}
    norms = ["input_layernorm.weight", "hidden_norm.weight"]
    eagle3 = {f"midlayer.{name}" for name in attention + rest + norms}
    eagle3 |= {"fc.weight", "norm.weight"}
    assert set(make_draft_model("eagle").state_dict()) == eagle
    state = make_draft_model("eagle3").state_dict()
    assert set(state) == eagle3
    assert state["midlayer.self_attn.k_proj.weight"].shape == (12, 2 * HIDDEN_SIZE)
    assert state["fc.weight"].shape == (HIDDEN_SIZE, 3 * HIDDEN_SIZE)


def test_small_embeddings_weigh_as_much_as_features_at_the_start() -> None:
    embedding = 0.02 * torch.randn(64, HIDDEN_SIZE)
    config = make_draft_config(tiny_config(vocab_size=64), "eagle", embedding)
    model = DraftModel(config, embedding_VD=embedding, lm_head_VD=embedding)
    from_token, from_feature = model.fc.weight.chunk(2, dim=1)
    token_part = embedding @ from_token.t()
    feature_part = torch.randn(64, HIDDEN_SIZE) @ from_feature.t()
    assert 0.7 < token_part.std() / feature_part.std() < 1.4


def test_embedding_hash_survives_training_and_rounding_and_tells_targets_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(300, 24, generator=generator) + 0.3
    base = int(fingerprint_target(embedding), 16)
    drifted = embedding + 0.1 * torch.randn(embedding.shape, generator=generator)
    other = torch.randn(300, 24, generator=generator) + 0.3

    def distance(tensor: Tensor) -> int:
        return (base ^ int(fingerprint_target(tensor), 16)).bit_count()

    assert distance(embedding.clone()) == 0
    assert distance(embedding.bfloat16()) <= 4
    assert distance(drifted) <= 32
    assert distance(other) >= 90
    assert distance(embedding.roll(1, 0)) >= 90


@pytest.mark.parametrize(
    "num_layers, expected",
    [(4, (0, 1, 2)), (6, (0, 2, 4)), (7, (1, 2, 3)), (28, (1, 13, 24)), (32, (1, 15, 28))],
)
def test_default_aux_layers_are_sglangs_where_it_has_three(num_layers: int, expected) -> None:
    assert default_aux_layer_ids(num_layers) == expected


def test_wrong_aux_layers_are_refused() -> None:
    target, embedding = tiny_config(), torch.randn(VOCAB_SIZE, HIDDEN_SIZE)
    with pytest.raises(ValueError, match="must be eagle or hass for a policy of 3 layers"):
        default_aux_layer_ids(3)
    for architecture, ids in (("eagle", (0, 1, 2)), ("eagle3", (0, 1)), ("eagle3", (1, 1, 2))):
        with pytest.raises(ValueError, match="rising layer numbers"):
            make_draft_config(target, architecture, embedding, ids)
    with pytest.raises(ValueError, match="at most 2"):
        make_draft_config(target, "eagle3", embedding, (0, 1, 3))
    with pytest.raises(ValueError, match="architecture='medusa'"):
        make_draft_config(target, "medusa", embedding)
