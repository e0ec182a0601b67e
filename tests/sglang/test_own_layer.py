"""SGLang drafts with the checkpoint's own layer: its tokens and accept lengths are those of the
embedded engine, and an update of the drafter reaches the layer alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

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
from tests.tiny_models import change_json, make_tiny_hf
from tlt_megatron.config.own_layer import OWN
from tlt_megatron.engines.sglang.connection import TARGET
from tlt_megatron.engines.sglang.sglang_engine import SglangEngine
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.models.own_drafter import load_own_drafter

# SGLang pads experts to multiples of 32 on a CPU.
SIZES = {"vocab_size": 48, "moe_intermediate_size": 64, "intermediate_size": 192}
# As MiMo's repository has it: transformers lacks the family.
CODE = """from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
STRATEGY = "3_1_3"


@pytest.fixture(scope="module", params=["mimo", "glm4_moe"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = SIZES if request.param == "glm4_moe" else {"vocab_size": 48}
    path = make_tiny_hf(
        tmp_path_factory.mktemp("policy"), request.param, num_layers=2, has_mtp=True, **sizes
    )
    if request.param == "mimo":
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
