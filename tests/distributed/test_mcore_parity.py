"""The Megatron policy against transformers: logits, gradients, and loading and exporting at every layout.

Each layout is one forked world that runs every model; the tests look at what it brought back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from tests.mcore_models import LAYOUTS, MODELS, build_on_rank, is_export_the_source, on_layout
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_hf
from tlt_megatron.config.schema import ParallelSection
from tlt_megatron.mcore.export import iter_hf_weights
from tlt_megatron.mcore.logprobs import vocab_parallel_logprobs
from tlt_megatron.runtime.process_groups import SINGLE, ProcessGroups

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


def _run_schedule(model: Any, ids_P: Tensor, loss: Callable | None = None) -> Tensor | None:
    """This rank's shard of the logits [1, P, V / tp] on the last stage; with a `loss`, also its gradients."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    positions_P = torch.cat([torch.arange(length) for length in LENGTHS])
    kept: list[Tensor] = []

    def finish(logits: Tensor, non_loss_data: bool = False) -> Any:
        kept.append(logits.detach())
        if loss is None:
            return logits
        return loss(logits), torch.tensor(1, dtype=torch.int32), {}

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
        forward_only=loss is None,
        collect_non_loss_data=loss is None,
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
            groups: ProcessGroups, parallel: ParallelSection = parallel
        ) -> dict[str, dict[str, Any]]:
            results = {}
            for name, reference in references.items():
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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_transformers(
    outcomes: dict[str, list[dict[str, Any]]], layout: str, name: str
) -> None:
    for rank in outcomes[layout]:
        assert rank[name]["has_logits"] == rank[name]["is_last"]
        assert rank[name]["difference"] <= 1e-4


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loading_and_exporting_is_the_identity_on_every_rank(
    outcomes: dict[str, list[dict[str, Any]]], layout: str, name: str
) -> None:
    assert all(rank[name]["round_trip"] for rank in outcomes[layout])


@pytest.mark.parametrize("name", ["llama_linear_rope", "llama_llama3_rope"])
def test_rope_scaling_changes_the_logits(references: dict[str, Reference], name: str) -> None:
    scaled = references[name]
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.AutoConfig.from_pretrained(scaled.path, rope_parameters=rope)
    model = transformers.AutoModelForCausalLM.from_pretrained(scaled.path, config=config)
    with torch.no_grad():
        logits_PV = _logits(model, scaled.ids_P)
    assert (logits_PV - scaled.logits_PV).abs().max() > 1e-2  # parity above is no accident


def _loss(ids_P: Tensor, groups: ProcessGroups) -> Callable[[Tensor], Tensor]:
    weights_P = torch.randn(ids_P.numel(), generator=torch.Generator().manual_seed(7))

    def loss(logits_1PV: Tensor) -> Tensor:
        result = vocab_parallel_logprobs(logits_1PV[0], ids_P.roll(-1), 0.7, groups.tp)
        return (result.logprobs * weights_P + result.entropy * weights_P.flip(0)).sum()

    return loss


def _gradients(
    reference: Reference, parallel: ParallelSection, groups: ProcessGroups, recompute: str
) -> tuple[int, dict[str, list[float]]]:
    """How often attention ran, and the full gradients under their Hugging Face names."""
    model, config = build_on_rank(reference.path, parallel, groups, recompute=recompute)
    calls: list[Any] = []
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.register_forward_hook(lambda *_: calls.append(None))
    _run_schedule(model, reference.ids_P, loss=_loss(reference.ids_P, groups))
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False):  # a rank has the part of its tokens
            dist.all_reduce(parameter.grad, group=groups.tp.of_torch)
        parameter.data = parameter.grad
    exported = iter_hf_weights(model, config, groups)
    return len(calls), {name: gradient.flatten().tolist() for name, gradient in exported}


def _dense_gradients(reference: Reference) -> dict[str, Tensor]:
    """The same by transformers, in a process of its own: autograd should not run before others fork."""

    def rank() -> dict[str, list[float]]:
        model = transformers.AutoModelForCausalLM.from_pretrained(reference.path)
        ids_P = reference.ids_P
        _loss(ids_P, ProcessGroups(world=SINGLE))(_logits(model, ids_P)[None]).backward()
        return {name: p.grad.flatten().tolist() for name, p in model.named_parameters()}

    return {name: torch.tensor(values) for name, values in run_ranks(1, rank)[0].items()}


@pytest.mark.parametrize("name", ["llama", "qwen2_tied"])
def test_gradients_equal_transformers_with_and_without_recompute(
    references: dict[str, Reference], name: str
) -> None:
    reference = references[name]

    def rank(groups: ProcessGroups) -> list[tuple[int, dict[str, list[float]]]]:
        modes = ("none", "selective", "full")
        return [_gradients(reference, LAYOUTS["tp2"], groups, mode) for mode in modes]

    (calls, plain), *recomputed = on_layout(LAYOUTS["tp2"], rank)[0]
    assert all(other == (2 * calls, plain) for other in recomputed)
    dense = _dense_gradients(reference)
    assert plain.keys() == dense.keys()
    for parameter, expected in dense.items():
        difference = (torch.tensor(plain[parameter]) - expected).abs().max()
        assert difference <= 1e-4 * expected.abs().max(), parameter
