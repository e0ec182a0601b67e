"""Writes a drafter in the format of SGLang or vLLM, and checks that it loads as the same drafter.

    python tools/export_drafter.py --from build/tiny_drafter --to build/exported --format vllm --target build/tiny_policy

`--from`: a drafter's folder, a run, its checkpoints or one of them. `--target`: the policy, as a Hugging Face folder. With it,
the fingerprint is checked too, and outputs are compared on the policy's embedding and head. vLLM's EAGLE needs it.

The layouts differ as follows (read in the sources of both; no engine is started here):
- architectures: LlamaForCausalLMEagle(3) in SGLang, EagleLlamaForCausalLM and Eagle3LlamaForCausalLM in vLLM;
- EAGLE-3 layer numbers: ours and SGLang's `eagle_config.eagle_aux_hidden_state_layer_ids` name the layer after which the
  residual stream is taken. vLLM's `eagle_aux_hidden_state_layer_ids` name the layer before which it is taken: one more;
- draft_vocab_size: with `--draft-vocab-size N` an EAGLE-3 drafter proposes only the N token ids that are most frequent in the
  run's rollouts (speculation.draft_vocab_size counts them). Its folder then has these rows of the target's head, `d2t` (id minus
  row) and `t2d` (whether an id has a row), as SGLang and vLLM read them. Without it, null makes SGLang take the target's head. vLLM takes it for any drafter without one, and gets the number;
- EAGLE's fc has a bias in SGLang and none in vLLM. fc(e, h) + b = fc(e + d, h) if d solves W_e d = b. So the drafter gets its
  own embedding: the target's plus d. (Older vLLM versions ignore it and take the target's.)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from tlt_megatron.drafter.checkpoint import WEIGHTS_FILE, load_drafter
from tlt_megatron.models.attention.packed import UnrolledAttention
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.runtime.durable import save_tensors
from tlt_megatron.speculation.token_counts import TokenCounts
from tlt_megatron.spot.checkpoint import find_best, find_newest
from tlt_megatron.trainer.checkpoint import STATE_FILE

FORMATS = ("sglang", "vllm")
_OWN_KEY = "tlt_megatron"  # in config.json: the target's fingerprint
_EMBEDDING = "embed_tokens.weight"
_IDS = "eagle_aux_hidden_state_layer_ids"
_VLLM_NAMES = {
    "LlamaForCausalLMEagle": "EagleLlamaForCausalLM",
    "LlamaForCausalLMEagle3": "Eagle3LlamaForCausalLM",
}
_USAGE = {
    "sglang": "--speculative-algorithm {upper} --speculative-draft-model-path {path}",
    "vllm": '--speculative-config \'{{"method": "{lower}", "model": "{path}", "num_speculative_tokens": 4}}\'',
}
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # for a folded bias


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A drafter's folder in memory: config.json and the tensors of model.safetensors."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def is_eagle3(self) -> bool:
        """Return whether the drafter fuses the features of three layers."""
        return "Eagle3" in self.config["architectures"][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The tensors that the drafter borrows."""

    embedding_VD: Tensor
    lm_head_VD: Tensor


def main() -> None:
    """Export, check, and print how to use the result."""
    options = _parse()
    console = Console()
    source = find_drafter(Path(options.source))
    target = load_target(Path(options.target)) if options.target else None
    dtype = getattr(torch, options.dtype) if options.dtype else None
    try:
        ids_C = frequent_ids(source, options.draft_vocab_size) if options.draft_vocab_size else None
        difference = export_drafter(
            source, Path(options.to), options.format, target, dtype=dtype, ids_C=ids_C
        )
    except ValueError as error:
        sys.exit(f"export_drafter: {error}")
    layout = read_layout(Path(options.to))
    num_bytes = sum(tensor.nbytes for tensor in layout.tensors.values())
    console.print(f"{source} -> {options.to}: {len(layout.tensors)} tensors, {num_bytes:,} bytes")
    console.print(
        f"checked: names, shapes, dtypes, outputs after reload (largest difference {difference:.1e})"
    )
    method = "eagle3" if layout.is_eagle3 else "eagle"
    usage = _USAGE[options.format].format(upper=method.upper(), lower=method, path=options.to)
    console.print(f"{options.format}: {usage}", highlight=False, soft_wrap=True)


def find_drafter(path: Path) -> Path:
    """Return the drafter's folder in `path`: itself, of a run's last checkpoint, or the best (else newest) saved one."""
    pointers = [path / "latest_checkpointed_iteration.txt"]
    pointers.append(path / "checkpoints" / pointers[0].name)
    for pointer in pointers:
        if pointer.is_file():
            step = int(pointer.read_text(encoding="utf-8"))
            path = pointer.parent / f"iter_{step:07d}"
    for folder in (path, path / "drafter"):
        if (folder / "config.json").is_file() and (folder / WEIGHTS_FILE).is_file():
            return folder
        found = find_best(folder) or find_newest(folder)
        if found is not None:
            return found
    raise ValueError(
        f"--from {path}: must be a drafter's folder (config.json, {WEIGHTS_FILE}), a run with one in its last"
        " checkpoint, or a folder of saved drafters"
    )


def load_target(path: Path) -> Target:
    """Return embedding and head of the policy in the Hugging Face folder `path`, in float32."""
    reader = HfReader(path)
    embedding = reader["model.embed_tokens.weight"].float()
    name = "lm_head.weight"
    return Target(
        embedding_VD=embedding, lm_head_VD=reader[name].float() if name in reader else embedding
    )


def export_drafter(
    source: Path,
    folder: Path,
    format: str,
    target: Target | None = None,
    *,
    dtype: torch.dtype | None = None,
    ids_C: Tensor | None = None,
) -> float:
    """Write the drafter in `source` to the new folder `folder`. Return the largest difference of its outputs after reload.

    `dtype` None keeps the stored one. `ids_C`: token ids, ascending, that an EAGLE-3 drafter proposes; None: all. ValueError if the format cannot hold the drafter or a check fails; then no file is left.
    """
    if format not in FORMATS:
        raise ValueError(f"--format {format!r}: must be one of {', '.join(FORMATS)}")
    if folder.exists():
        raise ValueError(f"--to {folder}: must not exist")
    original = read_layout(source)
    layout = _convert(original, format, target, dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-") as beside:
        written = Path(beside) / "drafter"
        write_layout(written, layout)
        difference = check_export(written, format, original, target)
        if ids_C is not None:
            written = Path(beside) / "reduced"
            write_layout(written, reduce_vocabulary(layout, ids_C, target))
        written.rename(folder)
    return difference


def frequent_ids(drafter: Path, num_ids: int) -> Tensor:
    """Return the most frequent token ids of the rollouts of the run whose checkpoint holds `drafter`, ascending."""
    file = drafter.parent / STATE_FILE
    engines = json.loads(file.read_text(encoding="utf-8"))["engine"] if file.is_file() else []
    counts = [engine["token_counts"] for engine in engines if engine.get("token_counts")]
    if not counts:
        raise ValueError(
            f"--draft-vocab-size {num_ids}: {file} must hold the token counts of a run with speculation.draft_vocab_size"
        )
    vocab_size = read_layout(drafter).config["vocab_size"]
    if not 0 < num_ids < vocab_size:
        raise ValueError(f"--draft-vocab-size {num_ids}: must be in (0, {vocab_size})")
    counter = TokenCounts(vocab_size, num_ids)
    for part in counts:
        counter.merge(part)
    return counter.most_frequent()


def reduce_vocabulary(layout: Layout, ids_C: Tensor, target: Target | None) -> Layout:
    """Return an EAGLE-3 layout whose head has only the rows `ids_C` of the target's head. ValueError for EAGLE or no target."""
    if not layout.is_eagle3:
        raise ValueError(
            "--draft-vocab-size: must be 0 for EAGLE, whose folders have no head (SGLang: --speculative-token-map)"
        )
    if target is None:
        raise ValueError("--target: a reduced vocabulary needs the rows of its target's head")
    dtype = getattr(torch, layout.config["dtype"])
    is_kept_V = torch.zeros(layout.config["vocab_size"], dtype=torch.bool)
    is_kept_V[ids_C] = True
    head = {
        "lm_head.weight": target.lm_head_VD[ids_C].to(dtype),
        "d2t": ids_C - torch.arange(len(ids_C)),
        "t2d": is_kept_V,
    }
    config = layout.config | {"draft_vocab_size": len(ids_C)}
    return Layout(config=config, tensors=layout.tensors | head)


def read_layout(folder: Path) -> Layout:
    """Read a folder without checks."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Layout(config=config, tensors=load_file(folder / WEIGHTS_FILE))


def write_layout(folder: Path, layout: Layout) -> None:
    """Write a folder: the inverse of `read_layout`."""
    folder.mkdir(parents=True)
    save_tensors(layout.tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    text = json.dumps(layout.config, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _convert(
    layout: Layout, format: str, target: Target | None, dtype: torch.dtype | None
) -> Layout:
    """Return our (SGLang's) layout in `format`. `dtype` None keeps the stored one."""
    layout = _cast(layout, dtype or next(iter(layout.tensors.values())).dtype)
    layout = to_vllm(layout, target) if format == "vllm" else layout
    rope = layout.config[
        "rope_parameters"
    ]  # of transformers 5; engines on transformers 4 read the keys below
    old_keys = {"rope_theta": rope["rope_theta"]}
    if rope["rope_type"] != "default":
        old_keys["rope_scaling"] = rope
    return Layout(config=layout.config | old_keys, tensors=layout.tensors)


def _cast(layout: Layout, dtype: torch.dtype) -> Layout:
    name = str(dtype).removeprefix("torch.")
    tensors = {key: tensor.to(dtype).contiguous() for key, tensor in layout.tensors.items()}
    return Layout(config=layout.config | {"dtype": name}, tensors=tensors)


def to_vllm(layout: Layout, target: Target | None) -> Layout:
    """Convert our (SGLang's) layout to vLLM's. ValueError for an EAGLE drafter with a bias if `target` is None."""
    config = dict(layout.config)
    config["architectures"] = [_VLLM_NAMES[config["architectures"][0]]]
    if not layout.is_eagle3:
        return Layout(config=config, tensors=_fold_bias(layout.tensors, target))
    config[_IDS] = [layer + 1 for layer in config["eagle_config"][_IDS]]
    config |= {
        "eagle_config": {"use_aux_hidden_state": True},
        "draft_vocab_size": config["vocab_size"],
        "target_hidden_size": config["hidden_size"],
        "norm_before_residual": False,
        "norm_before_fc": False,
    }
    return Layout(config=config, tensors=layout.tensors)


def _fold_bias(tensors: Mapping[str, Tensor], target: Target | None) -> dict[str, Tensor]:
    """Remove `fc.bias`. A separate embedding of the drafter adds the same values."""
    rest = {name: tensor for name, tensor in tensors.items() if name != "fc.bias"}
    bias_D = tensors["fc.bias"].double()
    if not bias_D.any():
        return rest
    if target is None:
        raise ValueError(
            "--target: vLLM's EAGLE has no fc.bias, so the drafter needs its target's embedding"
        )
    fc_weight = tensors["fc.weight"]
    of_embedding_DD = fc_weight[:, : bias_D.numel()].double()
    shift_D = torch.linalg.lstsq(of_embedding_DD, bias_D.unsqueeze(1)).solution.squeeze(1)
    embedding_VD = target.embedding_VD.double() + shift_D
    return rest | {_EMBEDDING: embedding_VD.to(fc_weight.dtype)}


def from_vllm(layout: Layout) -> tuple[Layout, Tensor | None]:
    """Invert `to_vllm`: return our layout, and the drafter's own embedding if it has one (its bias is then zero)."""
    config, tensors = dict(layout.config), dict(layout.tensors)
    names = {theirs: ours for ours, theirs in _VLLM_NAMES.items()}
    config["architectures"] = [names[config["architectures"][0]]]
    if layout.is_eagle3:
        ids = [layer - 1 for layer in config.pop(_IDS)]
        config["eagle_config"] = {_IDS: ids, "use_aux_hidden_state": True}
        return Layout(config=config, tensors=tensors), None
    embedding_VD = tensors.pop(_EMBEDDING, None)
    tensors["fc.bias"] = tensors["fc.weight"].new_zeros(config["hidden_size"])
    return Layout(config=config, tensors=tensors), embedding_VD


def check_export(folder: Path, format: str, original: Layout, target: Target | None) -> float:
    """Check that `folder` holds exactly what the engine needs; return the largest difference of outputs from `original`.

    `original` is rounded to the dtype of the export. ValueError if a check fails.
    """
    layout = read_layout(folder)
    dtype = getattr(torch, layout.config["dtype"])
    _check_tensors(layout.tensors, _convert(original, format, target, dtype).tensors, format)
    ours, own_embedding = from_vllm(layout) if format == "vllm" else (layout, None)
    given = target or _make_target(layout.config)
    own = Target(
        embedding_VD=given.embedding_VD if own_embedding is None else own_embedding.float(),
        lm_head_VD=given.lm_head_VD,
    )
    is_known = target is not None
    expected = _outputs(_load(_cast(original, dtype), given, has_fingerprint=is_known))
    actual = _outputs(_load(ours, own, has_fingerprint=is_known and own_embedding is None))
    difference = (actual - expected).abs().max().item()
    limit = 0.0 if own_embedding is None else _TOLERANCE[dtype] * expected.abs().max().item()
    if not difference <= limit:
        raise ValueError(
            f"{folder.name}: outputs after reload differ by {difference:.2e} (at most {limit:.2e})"
            + ("" if own_embedding is None else "; a wider --dtype may hold the folded bias")
        )
    return difference


def _check_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], format: str
) -> None:
    """Compare names, shapes and dtypes. SGLang silently skips a name that it does not know."""
    problems = [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"{name} is unknown" for name in sorted(tensors.keys() - expected.keys())]
    for name in expected.keys() & tensors.keys():
        found, must = tensors[name], expected[name]
        if found.shape != must.shape:
            problems.append(f"{name} has shape {tuple(found.shape)}, must be {tuple(must.shape)}")
        if found.dtype != must.dtype:
            problems.append(f"{name} is {found.dtype}, config.json says {must.dtype}")
    if problems:
        raise ValueError(f"{format}: {'; '.join(problems)}")


def _make_target(config: Mapping[str, Any]) -> Target:
    """Return a random embedding and head of the right size."""
    generator = torch.Generator().manual_seed(0)
    shape = (config["vocab_size"], config["hidden_size"])
    embedding, head = (torch.randn(shape, generator=generator) for _ in range(2))
    return Target(embedding_VD=embedding, lm_head_VD=head)


def _load(layout: Layout, target: Target, *, has_fingerprint: bool) -> DraftModel:
    """Load through drafter/checkpoint.py, which checks names and shapes again, and the target if `has_fingerprint`."""
    config = layout.config
    if not has_fingerprint:
        config = {key: value for key, value in config.items() if key != _OWN_KEY}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "drafter"
        write_layout(path, Layout(config=config, tensors=layout.tensors))
        return load_drafter(path, embedding_VD=target.embedding_VD, lm_head_VD=target.lm_head_VD)


@torch.no_grad()
def _outputs(model: DraftModel, num_rows: int = 12) -> Tensor:
    """Return the logits of two draft steps on random tokens and features."""
    generator = torch.Generator().manual_seed(1)
    config = model.config
    token_ids_P = torch.randint(config.vocab_size, (num_rows,), generator=generator)
    positions_P = torch.arange(num_rows)
    model.rotary.reserve(num_rows + 1)
    attention = UnrolledAttention((num_rows,))
    hidden_PD = model.fuse(torch.randn(num_rows, config.feature_size, generator=generator))
    logits = []
    for step in range(2):
        hidden_PD, head_PD = model(token_ids_P, hidden_PD, positions_P + step, attention)
        logits.append(model.logits(head_PD))
    return torch.stack(logits)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="source", required=True, metavar="FOLDER")
    parser.add_argument("--to", required=True, metavar="FOLDER", help="must not exist")
    parser.add_argument("--format", required=True, choices=FORMATS)
    parser.add_argument("--target", metavar="FOLDER", help="the policy, as a Hugging Face folder")
    parser.add_argument(
        "--draft-vocab-size", type=int, default=0, help="token ids that EAGLE-3 proposes; 0: all"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: as stored"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
