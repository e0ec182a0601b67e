"""The ledger's claims for the GPU examples against what megatron-core allocates, with tensors that have no numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_megatron import measure_policy
from tests.ranks import run_ranks
from tests.unit.config.test_cluster_examples import EXAMPLES, QWEN_7B, QWEN_32B, write_example
from tlt_megatron.runtime.memory import MemoryLedger
from tlt_megatron.trainer.memory_ledger import make_ledger


def claimed(ledger: MemoryLedger, *names: str) -> int:
    return sum(c.num_bytes for c in ledger.claims if c.name in names)


@pytest.mark.parametrize(
    "name, sizes, world_size, overrides",
    [
        ("qwen2_5_7b_8gpu", QWEN_7B, 8, []),
        ("qwen2_5_7b_8gpu", QWEN_7B, 8, ["mcore.recompute=none"]),
        ("qwen2_5_32b_slurm", QWEN_32B, 32, []),
    ],
    ids=["7b", "7b-no-recompute", "32b"],
)
def test_the_claims_of_the_policy_are_what_megatron_allocates(
    tmp_path: Path, name: str, sizes: dict[str, object], world_size: int, overrides: list[str]
) -> None:
    config, gpu = write_example(tmp_path, EXAMPLES / f"{name}.yaml", sizes, *overrides)
    ledger = make_ledger(config, world_size, gpu)
    stages = [
        run_ranks(
            1,
            measure_policy,
            config,
            world_size,
            stage,
            config.mcore.micro_batch_tokens,
            2,
            has_world=False,
        )[0]
        for stage in range(config.parallel.pipeline)
    ]
    for part, claim in (
        ("parameters", "policy"),
        ("gradients", "gradients"),
        ("optimizer", "optimizer"),
    ):
        largest = max(getattr(stage, part) for stage in stages)
        assert claimed(ledger, claim) == pytest.approx(largest, rel=0.1), part
    passes = claimed(ledger, "activations", "logits and their gradient")
    assert passes == pytest.approx(max(stage.activations for stage in stages), rel=0.1)
