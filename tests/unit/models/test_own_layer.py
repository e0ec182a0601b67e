"""The checkpoint's own layer against transformers and against its definition, in training's form
and the engine's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.slow_draft import make_sequence, slow_draft
from tests.tiny_models import make_tiny_hf
from tests.unit.models.test_draft_model import GrowingKv, check_inference_follows, draft
from tlt_megatron.config.own_layer import check_own_layer, note_own_layer
from tlt_megatron.drafter.drafter_loss import Objective, unroll_draft
from tlt_megatron.drafter.packing import pack_batch
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.models.own_drafter import load_own_drafter, own_tensors

KINDS = ("mimo", "glm4_moe")


def load_own(path: Path, dtype: torch.dtype = torch.float64) -> DraftModel:
    policy, reader = load_model_config(path), HfReader(path)
    check_own_layer(path, policy)
    embedding, head = reader["model.embed_tokens.weight"], reader["lm_head.weight"]
    return load_own_drafter(
        path, policy, embedding_VD=embedding.to(dtype), lm_head_VD=head.to(dtype), dtype=dtype
    )


def mimo_weights(path: Path) -> dict[str, Tensor]:
    """The layer's tensors under the names of `slow_draft`, by MiMo's own modeling code."""
    reader, prefix = HfReader(path), "model.mtp_layers.0."
    found = {n.removeprefix(prefix): reader[n].double() for n in reader.names()}
    hidden, embedding = found["input_proj.weight"].chunk(2, dim=1)
    special = {
        "fc.weight": torch.cat((embedding, hidden), dim=1),
        "enorm.weight": found["token_layernorm.weight"],
        "hnorm.weight": found["hidden_layernorm.weight"],
        "norm.weight": found["final_layernorm.weight"],
    }
    return {f"layers.0.{name}": tensor for name, tensor in found.items()} | special


def test_mimos_layer_equals_its_definition(tmp_path: Path) -> None:
    path = make_tiny_hf(tmp_path / "m", "mimo", num_layers=2, vocab_size=32, has_mtp=True)
    model = load_own(path)
    sequence = make_sequence(model, 8)
    view = DraftInference(model)
    view.rotary.reserve(64)
    objective = Objective(num_steps=3, feature_weight=0, decay=1, has_detached_steps=False)
    with torch.no_grad():
        actual = draft(view, sequence, 3, 3)
        outputs, heads = unroll_draft(model, pack_batch([sequence]), objective)
        expected = slow_draft(model, sequence, 3, 3, mimo_weights(path))
    for step, slow in enumerate(expected):
        torch.testing.assert_close(actual[step], slow, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close((outputs[step][3], heads[step][3]), slow, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("use_qk_norm", [False, True])
def test_glms_layer_equals_transformers(use_qk_norm: bool, tmp_path: Path) -> None:
    import transformers
    from transformers.modeling_layers import MtpModel

    changes = {"use_qk_norm": use_qk_norm, "attention_bias": not use_qk_norm}
    path = make_tiny_hf(
        tmp_path / "m", "glm4_moe", num_layers=2, vocab_size=96, has_mtp=True, **changes
    )
    policy = transformers.Glm4MoeForCausalLM.from_pretrained(path, dtype=torch.float32)
    policy._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]
    judge = MtpModel.from_pretrained(policy)
    model = load_own(path, torch.float32)
    view = DraftInference(model)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(96, (40,), generator=generator)
    hidden = torch.randn(40, model.config.hidden_size, generator=generator)
    positions = torch.arange(40)
    model.rotary.reserve(64)
    view.rotary.reserve(64)
    with torch.no_grad():
        expected = judge.forward_layer(
            0, hidden[None], positions[None] + 1, None, input_ids=tokens[None]
        )[0]
        for form in (model, view):
            output, head = form.forward(tokens, form.fuse(hidden), positions, GrowingKv())
            assert output is head
            torch.testing.assert_close(head, expected, rtol=1e-5, atol=1e-5)
            logits = judge._project_to_logits(expected)
            torch.testing.assert_close(form.logits(head), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_follows_trained_weights_and_they_come_home(kind: str, tmp_path: Path) -> None:
    path = make_tiny_hf(tmp_path / "m", kind, num_layers=2, vocab_size=32, has_mtp=True)
    model, reader = load_own(path), HfReader(path)
    home = dict(own_tensors(model.state_dict(), load_model_config(path)))
    for name, tensor in home.items():
        torch.testing.assert_close(tensor, reader[name].double(), rtol=0, atol=0)
    assert not [name for name in home if ".experts." in name or "mlp.gate." in name]
    check_inference_follows(model)


def test_the_gradient_passes_through_the_frozen_experts(tmp_path: Path) -> None:
    path = make_tiny_hf(tmp_path / "m", "glm4_moe", num_layers=2, vocab_size=32, has_mtp=True)
    model = load_own(path)
    model.rotary.reserve(8)
    tokens, positions = torch.arange(5), torch.arange(5)
    hidden = torch.randn(5, model.config.hidden_size, dtype=torch.float64)
    weight = model.layer.post_attention_layernorm.weight

    def loss(shift: float = 0.0) -> Tensor:
        weight.data[3] += shift
        result = model(tokens, hidden, positions, GrowingKv())[0].square()[:, :7].sum()
        weight.data[3] -= shift
        return result

    (gradient,) = torch.autograd.grad(loss(), [weight])
    numeric = (loss(1e-6) - loss(-1e-6)) / 2e-6
    torch.testing.assert_close(gradient[3], numeric, rtol=1e-5, atol=1e-7)


def test_a_user_is_told_where_a_checkpoint_has_a_layer(tmp_path: Path) -> None:
    """By the weights. A folder without weights has it if config.json says so."""
    for kind, has_mtp in (("mimo", True), ("mimo", False), ("glm4_moe", False), ("qwen3", False)):
        path = make_tiny_hf(
            tmp_path / f"{kind}{has_mtp}", kind, num_layers=2, vocab_size=32, has_mtp=has_mtp
        )
        note = note_own_layer(path, load_model_config(path))
        assert (note is not None) == has_mtp
        (path / "model.safetensors").unlink()
        says_so = "num_nextn_predict_layers" in (path / "config.json").read_text()
        assert (note_own_layer(path, load_model_config(path)) is not None) == says_so
