"""The settings of the examples, as SGLang itself reads them: `config.json` of that shape, no weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.tiny_task import REPO
from tlt_megatron.config.layout import check_layout
from tlt_megatron.config.load import load_config
from tlt_megatron.drafter.checkpoint import save_draft_config
from tlt_megatron.engines.sglang.arguments import engine_arguments, plan_speculation
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_model import fingerprint_target, make_draft_config

# (ranks, layers, sizes) of Qwen2.5-7B-Instruct and Qwen2.5-32B-Instruct.
SHAPES = {
    "qwen2_5_7b_8gpu": (
        8,
        {"num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944}
        | {"num_attention_heads": 28, "num_key_value_heads": 4},
    ),
    "qwen2_5_32b_slurm": (
        32,
        {"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 27648}
        | {"num_attention_heads": 40, "num_key_value_heads": 8},
    ),
}


def write_policy(folder: Path, sizes: dict[str, int]) -> None:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 152064,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | sizes), encoding="utf-8")


def write_drafter(folder: Path, policy: Path) -> None:
    target = load_model_config(policy)
    embedding = torch.zeros(1, 1).expand(target.vocab_size, target.hidden_size)
    folder.mkdir()
    config = make_draft_config(target, "eagle", embedding)
    save_draft_config(folder, config, fingerprint_target(embedding), torch.bfloat16)


@pytest.mark.parametrize("name", SHAPES)
def test_an_example_passes_sglangs_own_model_config(name: str, tmp_path: Path) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    num_ranks, sizes = SHAPES[name]
    policy, drafter, data = tmp_path / "policy", tmp_path / "drafter", tmp_path / "data.jsonl"
    write_policy(policy, sizes)
    write_drafter(drafter, policy)
    data.write_text("{}\n", encoding="utf-8")
    overrides = [f"model.path={policy}", f"data.train={data}", f"data.eval={data}"]
    config = load_config(REPO / "examples" / f"{name}.yaml", overrides)
    check_layout(config, num_ranks)
    section = type(config.speculation)(
        enabled=True,
        drafter=str(drafter),
        strategies=config.speculation.strategies,
        selector=config.speculation.selector,
    )
    arguments = engine_arguments(
        str(policy),
        config.rollout,
        config.sglang,
        speculation=plan_speculation(section),
        device_type="cuda",
        device_index=0,
        rank=0,
        max_prompt_tokens=config.data.max_prompt_tokens,
    )
    needed = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    for folder, is_draft in ((policy, False), (drafter, True)):
        found = ModelConfig(
            str(folder),
            context_length=arguments["context_length"],
            dtype=arguments["dtype"],
            is_draft_model=is_draft,
        )
        assert needed < found.context_len == arguments["context_length"] <= 32768
