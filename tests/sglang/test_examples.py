"""The settings of the examples for GPUs, as SGLang itself reads them: `config.json` of that shape,
no weights.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.qwen_shapes import QWEN_7B, QWEN_30B_A3B, QWEN_32B, QWEN_235B_A22B
from tests.tiny_task import python
from tests.unit.config.test_example_settings import EXAMPLES, write_example
from tlt_megatron.config.layout import check_layout
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.drafter.eagle_folder import save_draft_config
from tlt_megatron.engines.sglang import sglang_engine as engine_module
from tlt_megatron.engines.sglang.sglang_engine import SglangEngine
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_model import make_draft_config

SHAPES = {
    "qwen2_5_7b_8gpu": (8, QWEN_7B),
    "qwen2_5_32b_slurm": (32, QWEN_32B),
    "qwen3_30b_a3b_slurm": (16, QWEN_30B_A3B),
    "qwen3_235b_a22b_slurm": (64, QWEN_235B_A22B),
}
TOKENS = {"bos_token_id": 151643, "eos_token_id": 151645}


def write_drafter(folder: Path, policy: Path) -> None:
    target = load_model_config(policy)
    embedding = torch.zeros(1, 1).expand(target.vocab_size, target.hidden_size)
    folder.mkdir()
    config = make_draft_config(target, "eagle", embedding)
    save_draft_config(folder, config, torch.bfloat16)


class Started(NamedTuple):
    """An engine of an example up to the start of SGLang's processes, and the options that they
    would get.
    """

    config: RunConfig
    folders: dict[str, Path]  # the policy's and the drafter's
    arguments: dict[str, Any]
    engine: SglangEngine  # owns the folder of SGLang's adaptive configuration


@pytest.fixture(params=SHAPES)
def started(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Started:
    num_ranks, sizes = SHAPES[request.param]
    policy, drafter = tmp_path / "policy", tmp_path / "drafter"
    policy.mkdir()
    name = "Qwen3MoeForCausalLM" if "num_experts" in sizes else "Qwen2ForCausalLM"
    sizes = {"architectures": [name], "rms_norm_eps": 1e-6} | sizes | TOKENS
    config, gpu = write_example(policy, EXAMPLES / f"{request.param}.yaml", sizes)
    write_drafter(drafter, policy)
    check_layout(config, num_ranks)
    arguments: dict[str, Any] = {}
    monkeypatch.setattr(
        engine_module, "Connection", lambda asked, *_, **__: arguments.update(asked)
    )
    engine = SglangEngine(
        str(policy),
        config.rollout,
        config.sglang,
        gpu,
        rank=0,
        max_prompt_tokens=config.data.max_prompt_tokens,
        speculation=dataclasses.replace(config.speculation, drafter=str(drafter)),
    )
    return Started(config, {"policy": policy, "drafter": drafter}, arguments, engine)


def test_an_example_passes_sglangs_own_model_config(started: Started) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    needed = started.config.data.max_prompt_tokens + started.config.rollout.max_new_tokens
    asked = {key: started.arguments[key] for key in ("context_length", "dtype")}
    for name, folder in started.folders.items():
        found = ModelConfig(str(folder), is_draft_model=name == "drafter", **asked)
        assert needed < found.context_len == asked["context_length"] <= 32768


def test_sglang_resolves_the_options_of_an_example_and_changes_none(
    started: Started, tmp_path: Path
) -> None:
    asked = started.arguments
    (tmp_path / "options.json").write_text(json.dumps(asked), encoding="utf-8")
    program = ("-W", "ignore", "-m", "tests.sglang.resolve_arguments", tmp_path / "options.json")
    told = python(*program, PYTHONPATH=os.environ["PYTHONPATH"])
    assert told.returncode == 0, told.stderr[-3000:]
    resolved = json.loads(told.stdout.splitlines()[-1])
    assert {key: resolved[key] for key in asked} == asked
    assert resolved["speculative_adaptive"]  # SGLang turns it off in silence where it cannot adapt
    assert resolved["speculative_num_draft_tokens"] == resolved["speculative_num_steps"] + 1
    steps = json.loads(Path(asked["speculative_adaptive_config"]).read_text(encoding="utf-8"))
    depths = [int(text.split("_")[0]) for text in started.config.speculation.strategies]
    assert steps["1"]["candidate_steps"] == sorted({0, *depths})
    assert not resolved["disable_overlap_schedule"]
    graphs = resolved["cuda_graph_config"]
    assert graphs["prefill"]["backend"] == "disabled"  # others refuse the memory saver
    assert graphs["decode"]["backend"] == "full"
    # no batch runs without a graph
    assert max(graphs["decode"]["bs"]) == started.config.rollout.max_batch_size
