"""The Megatron policy against transformers: logits, gradients, and loading and exporting at every layout.

Each layout is one forked world that runs every model; the tests look at what it brought back.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_hf
from tlt_megatron.config.schema import McoreSection, ParallelSection
from tlt_megatron.mcore import cpu
from tlt_megatron.mcore.export import iter_hf_weights
from tlt_megatron.mcore.initialize import destroy_model_parallel, initialize_model_parallel
from tlt_megatron.mcore.logprobs import vocab_parallel_logprobs
from tlt_megatron.mcore.model import build_model
from tlt_megatron.mcore.weight_map import load_hf_weights
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.runtime.device import select_device
from tlt_megatron.runtime.process_groups import SINGLE, ProcessGroups, group_of

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

CPU = select_device("cpu")
LENGTHS = [17, 40, 5, 34]  # uneven, summing to an even number for sequence parallelism
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tied": True}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tied": True}),
    "llama_linear_rope": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "llama_llama3_rope": (
        "llama",
        {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 16384},
    ),
}
LAYOUTS = {
    "tp1": ParallelSection(),
    "tp2": ParallelSection(tensor=2),
    "tp2_sp": ParallelSection(tensor=2, sequence=True),
    "pp2": ParallelSection(pipeline=2),
    "tp2_pp2": ParallelSection(tensor=2, pipeline=2),
    "tp2_pp2_sp": ParallelSection(tensor=2, pipeline=2, sequence=True),
}


@dataclasses.dataclass(frozen=True)
class Reference:
    """A model on disk, inputs, and what transformers makes of them."""

    path: Path
    plain_ids_BT: Tensor
    plain_logits_BTV: Tensor
    packed_ids_P: Tensor
    packed_logits_PV: Tensor


def _make_reference(path: Path, kind: str, config: dict[str, Any]) -> Reference:
    make_tiny_hf(path, kind, **config)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(3)
    # Long enough to tell scaled from plain rotary frequencies.
    plain_ids_BT = torch.randint(0, 512, (2, 300), generator=generator)
    sequences = [torch.randint(0, 512, (length,), generator=generator) for length in LENGTHS]
    with torch.no_grad():
        return Reference(
            path=path,
            plain_ids_BT=plain_ids_BT,
            plain_logits_BTV=model(plain_ids_BT).logits,
            packed_ids_P=torch.cat(sequences),
            packed_logits_PV=torch.cat([model(ids[None]).logits[0] for ids in sequences]),
        )


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    """Imports it once in this process, so that forked ranks need not."""
    cpu.install()
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    folder = tmp_path_factory.mktemp("models")
    return {name: _make_reference(folder / name, *case) for name, case in MODELS.items()}


def _build(
    path: Path, parallel: ParallelSection, groups: ProcessGroups, **section: Any
) -> tuple[Any, Any]:
    config = load_model_config(path)
    model = build_model(
        config,
        parallel=parallel,
        section=McoreSection(**section),
        dtype=torch.float32,
        device=CPU,
    )
    load_hf_weights(model, config, HfReader(path), groups)
    return model, config


def _on_ranks(parallel: ParallelSection, function: Callable[[ProcessGroups], Any]) -> list[Any]:
    """`function` on every rank of the layout."""

    def rank() -> Any:
        return function(initialize_model_parallel(parallel, group_of(dist.group.WORLD), seed=1))

    return run_ranks(parallel.tensor * parallel.pipeline, rank)


def _packing(lengths: list[int]) -> PackedSeqParams:
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def _run_schedule(
    model: Any, ids_BT: Tensor, packing: PackedSeqParams | None, loss: Callable | None = None
) -> Tensor | None:
    """This rank's shard of the logits [B, T, V / tp] on the last stage; with a `loss`, also its gradients."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    positions = torch.arange(ids_BT.size(1)).expand_as(ids_BT)
    kept: list[Tensor] = []

    def finish(logits: Tensor, non_loss_data: bool = False) -> Any:
        kept.append(logits.detach())
        if loss is None:
            return logits
        return loss(logits), torch.tensor(1, dtype=torch.int32), {}

    get_forward_backward_func()(
        forward_step_func=lambda _, m: (
            m(ids_BT, positions, None, packed_seq_params=packing),
            finish,
        ),
        data_iterator=None,
        model=[model],
        num_microbatches=1,
        seq_length=ids_BT.size(1),
        micro_batch_size=ids_BT.size(0),
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


def _is_export_the_source(model: Any, config: Any, path: Path, groups: ProcessGroups) -> bool:
    source = load_file(path / "model.safetensors")
    exported = dict(iter_hf_weights(model, config, groups))
    same_bits = [torch.equal(exported[name], tensor) for name, tensor in source.items()]
    return exported.keys() == source.keys() and all(same_bits)


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
                model, config = _build(reference.path, parallel, groups)
                model.eval()
                with torch.no_grad():
                    plain = _run_schedule(model, reference.plain_ids_BT, None)
                    packed = _run_schedule(model, reference.packed_ids_P[None], _packing(LENGTHS))
                results[name] = {
                    "is_last": groups.pp.is_last,
                    "has_logits": plain is not None,
                    "plain": _difference(plain, reference.plain_logits_BTV, groups),
                    "packed": _difference(packed, reference.packed_logits_PV[None], groups),
                    "round_trip": _is_export_the_source(model, config, reference.path, groups),
                }
            return results

        found[layout] = _on_ranks(parallel, rank)
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_transformers(
    outcomes: dict[str, list[dict[str, Any]]], layout: str, name: str
) -> None:
    for rank in outcomes[layout]:
        assert rank[name]["has_logits"] == rank[name]["is_last"]
        assert rank[name]["plain"] <= 1e-4
        assert rank[name]["packed"] <= 1e-4


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
        logits = model(scaled.plain_ids_BT).logits
    assert (logits - scaled.plain_logits_BTV).abs().max() > 1e-2  # parity above is no accident


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
    model, config = _build(reference.path, parallel, groups, recompute=recompute)
    calls: list[Any] = []
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.register_forward_hook(lambda *_: calls.append(None))
    ids_P = reference.packed_ids_P
    _run_schedule(model, ids_P[None], _packing(LENGTHS), loss=_loss(ids_P, groups))
    for parameter in model.parameters():
        parameter.data = parameter.grad
    exported = iter_hf_weights(model, config, groups)
    return len(calls), {name: gradient.flatten().tolist() for name, gradient in exported}


def _dense_gradients(reference: Reference) -> dict[str, Tensor]:
    """The same by transformers, in a process of its own: autograd should not run before others fork."""

    def rank() -> dict[str, list[float]]:
        model = transformers.AutoModelForCausalLM.from_pretrained(reference.path)
        ids_P = reference.packed_ids_P
        parts = [model(ids[None]).logits for ids in ids_P.split(LENGTHS)]
        groups = ProcessGroups(world=SINGLE)
        _loss(ids_P, groups)(torch.cat(parts, dim=1)).backward()
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

    (calls, plain), *recomputed = _on_ranks(LAYOUTS["tp2"], rank)[0]
    assert all(other == (2 * calls, plain) for other in recomputed)
    dense = _dense_gradients(reference)
    assert plain.keys() == dense.keys()
    for parameter, expected in dense.items():
        difference = (torch.tensor(plain[parameter]) - expected).abs().max()
        assert difference <= 1e-4 * expected.abs().max(), parameter


def test_transformer_engines_fused_norm_names_load_and_export(
    references: dict[str, Reference],
) -> None:
    reference = references["qwen3"]

    def rank(groups: ProcessGroups) -> tuple[bool, bool]:
        model, config = _build(reference.path, LAYOUTS["tp2"], groups)
        loaded = []
        for layer in model.decoder.layers:  # move the norms to where Transformer Engine has them
            for norm, linear in (
                ("input_layernorm", layer.self_attention.linear_qkv),
                ("pre_mlp_layernorm", layer.mlp.linear_fc1),
            ):
                weight = getattr(layer, norm).weight
                delattr(layer, norm)
                loaded.append((weight.data.clone(), weight))
                linear.register_parameter("layer_norm_weight", weight)
                weight.data.zero_()
        load_hf_weights(model, config, HfReader(reference.path), groups)
        is_loaded = all(torch.equal(before, weight) for before, weight in loaded)
        return is_loaded, _is_export_the_source(model, config, reference.path, groups)

    assert _on_ranks(LAYOUTS["tp2"], rank) == [(True, True)] * 2


def test_exported_tensors_are_copies(references: dict[str, Reference]) -> None:
    reference = references["llama"]

    def rank(groups: ProcessGroups) -> bool:
        model, config = _build(reference.path, LAYOUTS["tp1"], groups)
        for _, tensor in iter_hf_weights(model, config, groups):
            tensor.zero_()
        return _is_export_the_source(model, config, reference.path, groups)

    assert _on_ranks(LAYOUTS["tp1"], rank) == [True]


def _edit(source: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_missing_and_misshaped_tensors_are_named_on_every_rank(
    references: dict[str, Reference], tmp_path: Path
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.0.self_attn.k_proj.weight"]  # of the first stage
        del tensors["lm_head.weight"]  # of the last stage
        tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(7, 64)

    path = _edit(references["qwen2"].path, tmp_path / "broken", change)

    def rank(groups: ProcessGroups) -> str:
        with pytest.raises(ValueError, match="is missing") as error:
            _build(path, LAYOUTS["pp2"], groups)
        return str(error.value)

    messages = _on_ranks(LAYOUTS["pp2"], rank)
    assert messages[0] == messages[1]
    assert messages[0].endswith(
        "/broken': lm_head.weight is missing; "
        "model.layers.0.self_attn.k_proj.weight is missing; "
        "model.layers.3.mlp.up_proj.weight has shape [7, 64], must be [160, 64]"
    )


@pytest.mark.parametrize("is_equal", [True, False])
def test_tied_embeddings_with_another_head_in_the_files_are_refused_on_every_rank(
    tmp_path: Path, is_equal: bool
) -> None:
    """The ends of the head are those of the embedding, so that the comparison before launch cannot see it."""
    source = make_tiny_hf(tmp_path / "source", "qwen2", tied=True, num_layers=2)

    def change(tensors: dict[str, Tensor]) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head[256, 3] += 0.0 if is_equal else 1.0
        tensors["lm_head.weight"] = head

    path = _edit(source, tmp_path / "edited", change)

    def rank(groups: ProcessGroups) -> str:
        try:
            _build(path, LAYOUTS["pp2"], groups)
        except ValueError as error:
            return str(error)
        return ""

    first, second = _on_ranks(LAYOUTS["pp2"], rank)
    assert first == second
    assert bool(first) != is_equal
    assert is_equal or "tie_word_embeddings=true, but lm_head.weight is not model.embed" in first


def test_a_parameter_that_the_table_does_not_know_is_refused(
    references: dict[str, Reference],
) -> None:
    reference = references["llama"]

    def rank(groups: ProcessGroups) -> None:
        model, config = _build(reference.path, LAYOUTS["tp1"], groups)
        model.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
        del model.decoder.layers[0].mlp.linear_fc2.weight
        with pytest.raises(ValueError, match="extra has no Hugging Face counterpart") as error:
            load_hf_weights(model, config, HfReader(reference.path), groups)
        assert "no decoder.layers.0.mlp.linear_fc2.weight" in str(error.value)

    _on_ranks(LAYOUTS["tp1"], rank)


def test_users_transformer_fields_reach_the_model(
    references: dict[str, Reference],
) -> None:
    """Uneven stages: three layers, then one; exporting follows them."""
    reference = references["llama_tied"]
    uneven = {"num_layers_in_first_pipeline_stage": 3}

    def rank(groups: ProcessGroups) -> tuple[int, bool]:
        model, config = _build(reference.path, LAYOUTS["pp2"], groups, transformer=uneven)
        is_same = _is_export_the_source(model, config, reference.path, groups)
        return len(model.decoder.layers), is_same

    assert _on_ranks(LAYOUTS["pp2"], rank) == [(3, True), (1, True)]


def test_llama3_scaling_that_megatron_fixes_otherwise_is_refused_when_building(
    references: dict[str, Reference], tmp_path: Path
) -> None:
    path = _edit(references["llama_llama3_rope"].path, tmp_path / "other", lambda tensors: None)
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"]["original_max_position_embeddings"] = 4096
    (path / "config.json").write_text(json.dumps(config))

    def rank(groups: ProcessGroups) -> None:
        with pytest.raises(ValueError, match="original_max_position_embeddings=4096"):
            _build(path, LAYOUTS["tp1"], groups)

    _on_ranks(LAYOUTS["tp1"], rank)


def test_groups_are_megatrons_layout_and_can_be_formed_again() -> None:
    def rank() -> list[tuple[Any, ...]]:
        world = group_of(dist.group.WORLD)
        with pytest.raises(ValueError, match=r"parallel\.tensor=3 .* does not divide the 4 ranks"):
            initialize_model_parallel(ParallelSection(tensor=3), world, seed=0)
        first = initialize_model_parallel(ParallelSection(tensor=2, pipeline=2), world, seed=0)
        with pytest.raises(RuntimeError, match="destroy_model_parallel"):
            initialize_model_parallel(ParallelSection(), world, seed=0)
        timeout = first.tp.handle._get_backend(torch.device("cpu")).options._timeout
        assert timeout == datetime.timedelta(seconds=60)  # of the world, see tests/ranks.py
        destroy_model_parallel()
        second = initialize_model_parallel(ParallelSection(tensor=2), world, seed=0)
        return [(g.tp.global_ranks, g.pp.global_ranks, g.dp.global_ranks) for g in (first, second)]

    ranks = run_ranks(4, rank)
    assert [rank[0] for rank in ranks] == [
        ((0, 1), (0, 2), (0,)),
        ((0, 1), (1, 3), (1,)),
        ((2, 3), (0, 2), (2,)),
        ((2, 3), (1, 3), (3,)),
    ]
    assert ranks[3][1] == ((2, 3), (3,), (1, 3))
