"""The settings of the examples, as SGLang itself reads them: `config.json` of that shape, no weights."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_task import REPO
from tlt_megatron.config.layout import check_layout
from tlt_megatron.config.load import load_config
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.drafter.eagle_folder import save_draft_config
from tlt_megatron.engines.sglang import sglang_engine as engine_module
from tlt_megatron.engines.sglang.sglang_engine import SglangEngine
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_model import make_draft_config
from tlt_megatron.runtime.device import Device

# (ranks, sizes) of Qwen2.5-7B-Instruct and Qwen2.5-32B-Instruct, from config.json in their Hugging Face repositories
# (Qwen/Qwen2.5-7B-Instruct, Qwen/Qwen2.5-32B-Instruct). The CPU examples get a tiny policy.
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
TINY = {"num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 64}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
SHAPES |= {"quickstart": (2, TINY), "bench_step": (2, TINY)}
GPU_EXAMPLES = ("qwen2_5_7b_8gpu", "qwen2_5_32b_slurm")
_GPU = Device(torch_device=torch.device("cuda", 0), backend="cpu:gloo,cuda:nccl")
_CPU = Device(torch_device=torch.device("cpu"), backend="gloo")


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
    save_draft_config(folder, config, torch.bfloat16)


class Started:
    """An engine of an example up to the start of SGLang's processes: the options that they would get."""

    def __init__(self, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        num_ranks, sizes = SHAPES[name]
        self.policy, self.drafter, data = folder / "policy", folder / "drafter", folder / "d.jsonl"
        write_policy(self.policy, sizes)
        write_drafter(self.drafter, self.policy)
        data.write_text("{}\n", encoding="utf-8")
        paths = {"model.path": self.policy, "data.train": data, "data.eval": data}
        overrides = [f"{key}={path}" for key, path in paths.items()]
        overrides.append("rollout.engine=sglang")
        self.config: RunConfig = load_config(REPO / "examples" / f"{name}.yaml", overrides)
        check_layout(self.config, num_ranks)
        self.arguments: dict[str, Any] = {}
        monkeypatch.setattr(engine_module, "Connection", self._note)
        speculation = dataclasses.replace(self.config.speculation, drafter=str(self.drafter))
        self._engine = SglangEngine(  # it owns the folder of SGLang's adaptive configuration
            str(self.policy),
            self.config.rollout,
            self.config.sglang,
            _GPU if name in GPU_EXAMPLES else _CPU,
            rank=0,
            max_prompt_tokens=self.config.data.max_prompt_tokens,
            speculation=speculation,
        )

    def _note(self, arguments: dict[str, Any], *_: object, **__: object) -> None:
        self.arguments |= arguments


@pytest.mark.parametrize("name", GPU_EXAMPLES)
def test_an_example_passes_sglangs_own_model_config(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    started = Started(name, tmp_path, monkeypatch)
    config, arguments = started.config, started.arguments
    needed = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    for folder, is_draft in ((started.policy, False), (started.drafter, True)):
        found = ModelConfig(
            str(folder),
            context_length=arguments["context_length"],
            dtype=arguments["dtype"],
            is_draft_model=is_draft,
        )
        assert needed < found.context_len == arguments["context_length"] <= 32768


@pytest.mark.parametrize("name", SHAPES)
def test_sglang_resolves_the_options_of_an_example_and_changes_none(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started(name, tmp_path, monkeypatch)
    asked, is_gpu = started.arguments, name in GPU_EXAMPLES
    (tmp_path / "options.json").write_text(json.dumps(asked), encoding="utf-8")
    machine = "H100" if is_gpu else "cpu"
    command = [sys.executable, "-W", "ignore", "-m", "tests.sglang.resolve_arguments"]
    told = subprocess.run(
        [*command, str(tmp_path / "options.json"), machine],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-3000:]
    resolved = json.loads(told.stdout.splitlines()[-1])
    assert {key: resolved[key] for key in asked} == asked
    if started.config.speculation.enabled:  # SGLang turns it off in silence where it cannot adapt
        assert resolved["speculative_adaptive"]
        assert resolved["speculative_num_draft_tokens"] == resolved["speculative_num_steps"] + 1
        steps = json.loads(Path(asked["speculative_adaptive_config"]).read_text(encoding="utf-8"))
        depths = [int(text.split("_")[0]) for text in started.config.speculation.strategies]
        assert steps["1"]["candidate_steps"] == sorted({0, *depths})
    if is_gpu:
        assert not resolved["disable_overlap_schedule"]
        graphs = resolved["cuda_graph_config"]
        assert graphs["prefill"]["backend"] == "disabled"  # others refuse the memory saver
        decode = graphs["decode"]
        assert decode["backend"] == "full"
        assert max(decode["bs"]) == started.config.rollout.max_batch_size  # no batch runs without
