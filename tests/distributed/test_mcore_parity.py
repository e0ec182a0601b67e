"""The Megatron policy against transformers: logits, and loading and exporting at every layout.

Each layout is one forked world that runs every model; the tests look at what it brought back.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.mcore_models import (
    CASES,
    LAYOUTS,
    MODELS,
    build_on_rank,
    is_export_the_source,
    on_layout,
)
from tests.tiny_models import make_tiny_hf
from tlt_megatron.config.schema import ParallelSection
from tlt_megatron.runtime.process_groups import ProcessGroups

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

# Uneven, summing to an even number for sequence parallelism; the longest tells scaled from plain
# rotary frequencies.
LENGTHS = [17, 300, 5, 34]


@dataclasses.dataclass(frozen=True)
class Reference:
    """A model on disk, inputs, and what transformers makes of them."""

    path: Path
    ids_P: Tensor
    logits_PV: Tensor


def _make_reference(path: Path, kind: str, config: dict[str, Any]) -> Reference:
    make_tiny_hf(path, kind, **config)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    ids_P = torch.randint(0, 512, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return Reference(path=path, ids_P=ids_P, logits_PV=_logits(model, ids_P))


def _logits(model: Any, ids_P: Tensor) -> Tensor:
    """The logits [P, V] of transformers, one sequence at a time."""
    return torch.cat([model(ids[None]).logits[0] for ids in ids_P.split(LENGTHS)])


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    folder = tmp_path_factory.mktemp("models")
    return {name: _make_reference(folder / name, *case) for name, case in MODELS.items()}


def _packing() -> PackedSeqParams:
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
    )


def _run_schedule(model: Any, ids_P: Tensor) -> Tensor | None:
    """This rank's shard of the logits [1, P, V / tp] on the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    positions_P = torch.cat([torch.arange(length) for length in LENGTHS])
    kept: list[Tensor] = []

    def finish(logits: Tensor, non_loss_data: bool = False) -> Tensor:
        kept.append(logits)
        return logits

    get_forward_backward_func()(
        forward_step_func=lambda _, m: (
            m(ids_P[None], positions_P[None], None, packed_seq_params=_packing()),
            finish,
        ),
        data_iterator=None,
        model=[model],
        num_microbatches=1,
        seq_length=ids_P.numel(),
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return kept[0] if kept else None


def _difference(logits: Tensor | None, expected: Tensor, groups: ProcessGroups) -> float:
    if logits is None:
        return 0.0
    mine = expected.chunk(groups.tp.size, dim=-1)[groups.tp.rank]
    assert logits.shape == mine.shape
    return (logits - mine).abs().max().item()


@pytest.fixture(scope="module")
def outcomes(references: dict[str, Reference]) -> dict[str, list[dict[str, Any]]]:
    """Per layout and rank, what every model gave."""
    found = {}
    for layout, parallel in LAYOUTS.items():

        def rank(
            groups: ProcessGroups, layout: str = layout, parallel: ParallelSection = parallel
        ) -> dict[str, dict[str, Any]]:
            results = {}
            for name, reference in references.items():
                if (layout, name) not in CASES:
                    continue
                model, config = build_on_rank(reference.path, parallel, groups)
                model.eval()
                with torch.no_grad():
                    logits = _run_schedule(model, reference.ids_P)
                results[name] = {
                    "is_last": groups.pp.is_last,
                    "has_logits": logits is not None,
                    "difference": _difference(logits, reference.logits_PV[None], groups),
                    "round_trip": is_export_the_source(model, config, reference.path, groups),
                }
            return results

        found[layout] = on_layout(parallel, rank)
    return found


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_logits_equal_transformers(
    outcomes: dict[str, list[dict[str, Any]]], layout: str, name: str
) -> None:
    for rank in outcomes[layout]:
        assert rank[name]["has_logits"] == rank[name]["is_last"]
        assert rank[name]["difference"] <= 1e-4


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_loading_and_exporting_is_the_identity_on_every_rank(
    outcomes: dict[str, list[dict[str, Any]]], layout: str, name: str
) -> None:
    assert all(rank[name]["round_trip"] for rank in outcomes[layout])


@pytest.mark.parametrize("name", ["llama_linear_rope", "llama_llama3_rope", "qwen2_yarn"])
def test_rope_scaling_changes_the_logits(references: dict[str, Reference], name: str) -> None:
    scaled = references[name]
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.AutoConfig.from_pretrained(scaled.path, rope_parameters=rope)
    model = transformers.AutoModelForCausalLM.from_pretrained(scaled.path, config=config)
    with torch.no_grad():
        logits_PV = _logits(model, scaled.ids_P)
    assert (logits_PV - scaled.logits_PV).abs().max() > 1e-2  # parity above is no accident
