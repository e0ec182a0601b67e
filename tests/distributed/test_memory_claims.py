"""The ledger's claims for the GPU examples against what megatron-core allocates, with tensors that
have no numbers.
"""

from __future__ import annotations

import os

import pytest

from tests.fake_megatron import PolicyBytes, measure_policy
from tests.ranks import run_ranks
from tests.unit.config.test_example_settings import EXAMPLES, QWEN_7B, QWEN_32B, write_example
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.runtime.memory_claim import MemoryLedger
from tlt_megatron.trainer.before.memory_ledger import make_ledger

CASES = {
    "7b": ("qwen2_5_7b_8gpu", QWEN_7B, 8),
    "7b-no-recompute": ("qwen2_5_7b_8gpu", QWEN_7B, 8, "mcore.recompute=none"),
    "7b-lora": ("qwen2_5_7b_lora_1gpu", QWEN_7B, 1),
    "7b-lora-no-recompute": ("qwen2_5_7b_lora_1gpu", QWEN_7B, 1, "mcore.recompute=none"),
    "32b": ("qwen2_5_32b_slurm", QWEN_32B, 32),
}
Measured = dict[str, tuple[MemoryLedger, list[PolicyBytes]]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """The ledger of each case, and the bytes of its pipeline stages. Two stages are measured at a
    time.
    """
    found: Measured = {}
    stages: list[tuple[str, RunConfig, int, int]] = []
    for case, (name, sizes, world_size, *overrides) in CASES.items():
        folder = tmp_path_factory.mktemp(case)
        config, gpu = write_example(folder, EXAMPLES / f"{name}.yaml", sizes, *overrides)
        found[case] = make_ledger(config, world_size, gpu), []
        stages += [(case, config, world_size, i) for i in range(config.parallel.pipeline)]

    def measure(two: list[tuple[str, RunConfig, int, int]]) -> PolicyBytes:
        _, config, world_size, stage = two[int(os.environ["RANK"])]
        return measure_policy(config, world_size, stage)

    for first in range(0, len(stages), 2):
        two = stages[first : first + 2]
        results = run_ranks(len(two), measure, two, has_world=False)
        for (case, *_), result in zip(two, results, strict=True):
            found[case][1].append(result)
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_claims_of_the_policy_are_what_megatron_allocates(
    measured: Measured, case: str
) -> None:
    ledger, stages = measured[case]

    def claimed(*names: str) -> int:
        return sum(c.num_bytes for c in ledger.claims if c.name in names)

    for part, claim in (
        ("parameters", "policy"),
        ("adapters", "adapters"),
        ("gradients", "gradients"),
        ("optimizer", "optimizer"),
    ):
        largest = max(getattr(stage, part) for stage in stages)
        assert claimed(claim) == pytest.approx(largest, rel=0.1), part
    passes = claimed("activations", "logits and their gradient")
    assert passes == pytest.approx(max(stage.activations for stage in stages), rel=0.1)
