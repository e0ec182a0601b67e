"""SGLang drafts with the checkpoint's own layer: its tokens and accept lengths are those of the
embedded engine, and an update of the drafter reaches the layer alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.sglang.rollouts import (
    SAMPLED,
    answers,
    check_accept_lengths,
    load_draft,
    make_prompts,
    mean_accept_length,
    start_sglang,
    token_lists,
    train_own_layer,
)
from tests.sglang.test_training import DRAFTING, check_same, run
from tests.tiny_models import change_json, make_tiny_hf
from tests.tiny_task import make_tiny_task, patient_engine
from tlt_megatron.config.own_layer import OWN, own_names
from tlt_megatron.engines.sglang.connection import TARGET
from tlt_megatron.engines.sglang.sglang_engine import SglangEngine
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.models.own_drafter import load_own_drafter, own_tensors

# SGLang pads experts to multiples of 32 on a CPU.
SIZES = {"vocab_size": 48, "moe_intermediate_size": 64, "intermediate_size": 192}
# As MiMo's repository has it: transformers lacks the family.
CODE = """from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
STRATEGY = "3_1_3"


@pytest.fixture(scope="module", params=["mimo", "glm4_moe"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def policy(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"), kind)


def make_policy(path: Path, kind: str, **config: int) -> Path:
    """A policy with a trained layer, which SGLang reads."""
    sizes = SIZES if kind == "glm4_moe" else {"vocab_size": 48, "intermediate_size": 192}
    make_tiny_hf(path, kind, num_layers=2, has_mtp=True, **sizes, **config)
    if kind == "mimo":
        (path / "configuration_mimo.py").write_text(CODE)
        change_json(path / "config.json", auto_map={"AutoConfig": "configuration_mimo.MiMoConfig"})
    train_own_layer(path)
    return path


@pytest.fixture(scope="module")
def engine(policy: Path) -> Iterator[SglangEngine]:
    trusted = {"trust_remote_code": True}
    engine = start_sglang(policy, drafter=Path(OWN), strategies=[STRATEGY], engine_args=trusted)
    yield engine
    engine.close()


def test_accept_lengths_are_those_of_the_embedded_engine(
    engine: SglangEngine, policy: Path
) -> None:
    check_accept_lengths(engine, policy, Path(OWN), STRATEGY, num_tokens=800)


def test_an_update_reaches_the_layer_alone_and_drops_what_it_had_cached(
    engine: SglangEngine, policy: Path
) -> None:
    reader = HfReader(policy)
    embedding, head = reader["model.embed_tokens.weight"], reader["lm_head.weight"]
    config = load_model_config(policy)
    model = load_own_drafter(policy, config, embedding_VD=embedding, lm_head_VD=head)
    own = [(name, tensor.clone()) for name, tensor in model.state_dict().items()]
    flipped = [(n, t.flip(0).contiguous() if t.ndim == 2 else t) for n, t in own]
    params, prompts = replace(SAMPLED, seed=3), make_prompts(12, seed=3)
    load_draft(engine, own)
    target = engine.checksum(TARGET)
    before = answers(engine, params, prompts=prompts)
    load_draft(engine, flipped, version=2)
    wrong = answers(engine, params, prompts=prompts)
    load_draft(engine, own, version=3)
    again = answers(engine, params, prompts=prompts)
    assert token_lists(before) == token_lists(wrong) == token_lists(again)
    assert mean_accept_length(wrong) < mean_accept_length(before) - 0.05
    assert mean_accept_length(again) == pytest.approx(mean_accept_length(before), rel=0.01)
    assert engine.checksum(TARGET) == target


def test_a_run_trains_it_exports_it_and_is_the_embedded_engines_plain_run(
    kind: str, tmp_path: Path
) -> None:
    """Each load of either model is compared with its checksum, or the run ends. So the exported
    layer is the one with which SGLang drafted last.
    """
    config = make_tiny_task(tmp_path / "task", kind=kind, has_mtp=True)
    model = make_policy(config.parent / "model", kind, eos_token_id=1, pad_token_id=0)
    run(config, tmp_path / "embedded")
    own = ("speculation.drafter=own", "drafter.algorithm=hass", "drafter.lr=0.005")
    engine = patient_engine(tmp_path, "sglang", (0, 60, 61))  # trained, then measured
    trusted = 'sglang.engine_args={"trust_remote_code": true}'
    run(config, tmp_path / "sglang", engine, *DRAFTING, *own, trusted)
    rows = check_same(tmp_path / "sglang", tmp_path / "embedded")
    assert all(row["rollout/spec_accept_length"] > 1.0 for row in rows)
    assert rows[-1]["drafter/version"] >= 1
    exported, policy = HfReader(tmp_path / "sglang" / "hf"), load_model_config(model)
    assert exported.names() == HfReader(model).names()
    published = load_file(tmp_path / "sglang" / "drafter" / "model.safetensors")
    for name, tensor in own_tensors(published, policy):
        assert torch.equal(exported[name], tensor), name
    source = HfReader(model)
    name = own_names(policy)["fc.weight"]
    assert not torch.equal(exported[name], source[name])
