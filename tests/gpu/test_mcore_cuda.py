"""The Megatron policy on a GPU says of a packed batch what the CPU's plain forward pass says. In
bfloat16 it has Transformer Engine's layers where that is installed, else the local ones.

It runs in a process of its own, as Megatron keeps its groups for the life of a process.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.gpu.cuda_ranks import needs_gpus, run_cuda_ranks
from tests.tiny_models import make_tiny_hf
from tlt_megatron.models.hf_io import HfReader

pytestmark = needs_gpus()
# Of one log-prob near -5: float32 rounds at 1e-6 a sum; bfloat16 keeps 8 bits of every activation.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}
SEED = 3


def log_probs_on_the_gpu(path: Path, dtype: str, recompute: str) -> dict[str, object]:
    """Log-probs of all micro-batches, before and after two optimizer steps."""
    from tests.mcore_policy import OPTIMIZER, make_batch, tiny_loss
    from tlt_megatron.config.schema import McoreSection, ModelSection, ParallelSection
    from tlt_megatron.mcore.initialize import initialize_model_parallel
    from tlt_megatron.mcore.model import has_transformer_engine
    from tlt_megatron.mcore.policy_model import McorePolicyModel
    from tlt_megatron.runtime.device import select_device
    from tlt_megatron.runtime.process_groups import init_world

    device = select_device("cuda")
    world = init_world(device.backend, 60.0)
    parallel = ParallelSection()
    policy = McorePolicyModel(
        model=ModelSection(path=str(path), dtype=dtype),
        parallel=parallel,
        mcore=McoreSection(recompute=recompute),
        optimizer=OPTIMIZER,
        groups=initialize_model_parallel(parallel, world, seed=1),
        device=device,
        keep_reference=True,
    )
    batch = make_batch(SEED)
    found = policy.infer_logprobs(batch, 0.7)
    reference = policy.infer_logprobs(batch, 0.7, reference=True)
    stats = []
    for _ in range(2):
        policy.forward_backward(batch, 0.7, tiny_loss)
        stats.append(policy.optimizer_step())
    after = policy.infer_logprobs(batch, 0.7)
    return {
        "layers": "Transformer Engine"
        if has_transformer_engine(getattr(torch, dtype))
        else "local",
        "logprobs": [value.policy_logprobs.tolist() for value in found],
        "entropy": [value.entropy.tolist() for value in found],
        "reference": [value.policy_logprobs.tolist() for value in reference],
        "after": [value.policy_logprobs.tolist() for value in after],
        "grad_norms": [step.grad_norm for step in stats],
        "exported": {n: t.float().cpu().tolist() for n, t in policy.export_hf_weights()},
    }


def log_probs_by_definition(path: Path, dtype: torch.dtype) -> list[list[float]]:
    """Log-probs by transformers, with `dtype`'s weights and float64 arithmetic, on the CPU."""
    from transformers import AutoModelForCausalLM

    from tests.mcore_policy import make_batch

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).double()
    results = []
    for micro_batch in make_batch(SEED):
        values = []
        for start, end in itertools.pairwise(micro_batch.cu_seqlens.tolist()):
            with torch.no_grad():
                logprobs = model(micro_batch.token_ids[None, start:end]).logits[0].log_softmax(-1)
            labels = micro_batch.labels[start:end].unsqueeze(1)
            values += logprobs.gather(1, labels).squeeze(1).tolist()
        results.append(values)
    return results


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_are_those_of_the_cpu(tmp_path: Path, kind: str, dtype: str) -> None:
    path = make_tiny_hf(tmp_path / "m", kind, num_layers=2, hidden_size=128, head_dim=32)
    recompute = "selective" if kind == "llama" else "none"
    (found,) = run_cuda_ranks(1, log_probs_on_the_gpu, path, dtype, recompute)
    expected = log_probs_by_definition(path, getattr(torch, dtype))
    for ours, theirs in zip(found["logprobs"], expected, strict=True):
        difference = (torch.tensor(ours) - torch.tensor(theirs)).abs()
        assert difference.median() < TOLERANCE[dtype] / 4, found["layers"]
        assert difference.max() < TOLERANCE[dtype] * 4, found["layers"]
    assert found["reference"] == found["logprobs"]
    assert found["after"] != found["logprobs"]
    assert all(0 < norm < 1e4 for norm in found["grad_norms"])
    assert found["exported"].keys() == {name for name, _ in HfReader(path).items()}
