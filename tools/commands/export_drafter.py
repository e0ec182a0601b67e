"""Writes a drafter in the format of SGLang or vLLM.

    tlt export-drafter --from runs/mine --to drafter --format sglang
    tlt export-drafter --from build/tiny_drafter --to exported --format vllm --target my_policy

`--from`: a drafter's folder, a run, its checkpoints or one of them. `--target`: the policy, as a
Hugging Face folder. With it, the fingerprint is checked too. vLLM's EAGLE and --draft-vocab-size
need it: their default is the run's `hf/`.

The layouts differ as follows (read in the sources of both; no engine is started here):
- architectures: LlamaForCausalLMEagle(3) in SGLang, EagleLlamaForCausalLM and
  Eagle3LlamaForCausalLM in vLLM;
- EAGLE-3 layer numbers: ours and SGLang's `eagle_config.eagle_aux_hidden_state_layer_ids` name the
  layer after which the residual stream is taken. vLLM's `eagle_aux_hidden_state_layer_ids` name the
  layer before which it is taken: one more;
- draft_vocab_size: with `--draft-vocab-size N` an EAGLE-3 drafter proposes only the N token ids
  that are most frequent in the run's rollouts (speculation.draft_vocab_size counts them). Its
  folder then has these rows of the target's head, `d2t` (id minus row) and `t2d` (whether an id has
  a row), as SGLang and vLLM read them. Without it, null makes SGLang take the target's head. vLLM
  takes it for any drafter without one, and gets the number;
- EAGLE's fc has a bias in SGLang and none in vLLM. fc(e, h) + b = fc(e + d, h) if d solves W_e d =
  b. So the drafter gets its own embedding: the target's plus d. (Older vLLM versions ignore it and
  take the target's.)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
import torch
from safetensors.torch import load_file
from torch import Tensor

from tlt_megatron.config.draft_folder import (
    AUX_LAYER_IDS,
    BORROWED,
    NORM_BEFORE_RESIDUAL,
    check_drafter,
)
from tlt_megatron.config.hub import check_push, push_folder
from tlt_megatron.config.model_folder import check_model
from tlt_megatron.drafter.eagle_folder import (
    WEIGHTS_FILE,
    draft_config_json,
    load_draft_config,
    load_draft_weights,
    read_draft_weights,
)
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.runtime.durable import new_folder, save_tensors
from tlt_megatron.speculation.token_counts import TokenCounts
from tlt_megatron.trainer.saving.manifest import engine_files
from tools.commands.saved_run import find_saved, run_of

FORMATS = ("sglang", "vllm")
_VLLM_NAMES = {
    "LlamaForCausalLMEagle": "EagleLlamaForCausalLM",
    "LlamaForCausalLMEagle3": "Eagle3LlamaForCausalLM",
}
# Of the outputs of fc with a folded bias, relative to the largest one.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


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
    folder: Path | None = None  # the policy's


def main() -> None:
    """Export, and print how to use the result.

    ValueError if that is impossible; then nothing is written.
    """
    options = _parse()
    if options.push_to_hub:
        check_push(options.push_to_hub)
    source = find_drafter(Path(options.source))
    policy = Path(options.target) if options.target else None
    if policy is None and (options.format == "vllm" or options.draft_vocab_size):
        policy = find_target(source)
    target = load_target(policy) if policy else None
    dtype = getattr(torch, options.dtype) if options.dtype else None
    ids_C = frequent_ids(source, options.draft_vocab_size) if options.draft_vocab_size else None
    layout = export_drafter(
        source, Path(options.to), options.format, target, dtype=dtype, ids_C=ids_C
    )
    print(f"{source} -> {options.to}: {len(layout.tensors)} tensors")
    if options.push_to_hub:
        print(push_folder(Path(options.to), options.push_to_hub))
    served = policy or find_target(source) or "POLICY"
    print(shlex.join(server_command(options.format, str(served), Path(options.to))))


def server_command(format: str, policy: str, drafter: Path | None) -> list[str]:
    """Return the command that serves `policy` by SGLang or vLLM. `drafter` is one that was exported
    to `format`.
    """
    method = "" if drafter is None else "eagle3" if read_layout(drafter).is_eagle3 else "eagle"
    if format == "vllm":
        settings = {"method": method, "model": str(drafter), "num_speculative_tokens": 4}
        extra = ["--speculative-config", json.dumps(settings)] if drafter else []
        return ["vllm", "serve", policy, *extra]
    command = ["python", "-m", "sglang.launch_server", "--model-path", policy]
    if drafter is None:
        return command
    start = ["--speculative-algorithm", method.upper()]
    start += ["--speculative-draft-model-path", str(drafter), "--speculative-num-steps", "4"]
    start += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "5"]
    return command + start


def find_drafter(path: Path) -> Path:
    """Return the drafter's folder in `path`, as `find_saved`."""
    wanted = f"a drafter's folder (config.json, {WEIGHTS_FILE}), or a run or checkpoint with one"
    return find_saved(path, "drafter", ("config.json", WEIGHTS_FILE), wanted)


def find_target(drafter: Path) -> Path | None:
    """Return the trained policy (`hf/`) of the run that the folder `drafter` is in.

    None: no run, or it has none.
    """
    run = run_of(drafter)
    return run / "hf" if run is not None and (run / "hf").is_dir() else None


def load_target(path: Path, key: str = "--target") -> Target:
    """Return embedding and head of the policy in the Hugging Face folder `path`, in float32.

    `key` is the option that holds the path. ValueError for a folder that `check_model` refuses.
    """
    check_model(key, path, needs_tokenizer=False)
    reader = HfReader(path)
    embedding = reader["model.embed_tokens.weight"].float()
    name = "lm_head.weight"
    head = reader[name].float() if name in reader else embedding
    return Target(embedding_VD=embedding, lm_head_VD=head, folder=path)


def export_drafter(
    source: Path,
    folder: Path,
    format: str,
    target: Target | None = None,
    *,
    dtype: torch.dtype | None = None,
    ids_C: Tensor | None = None,
) -> Layout:
    """Write the drafter in `source` to the new folder `folder`, and return what is in it.

    `dtype` None keeps the stored one. `ids_C`: token ids, ascending, that an EAGLE-3 drafter
    proposes; None: all. ValueError if the format cannot hold the drafter or a check fails; then no
    file is left.
    """
    if folder.exists():
        raise ValueError(f"--to {folder}: must not exist")
    layout = convert(read_source(source, target), format, target, dtype)
    if ids_C is not None:
        layout = reduce_vocabulary(layout, ids_C, target)
    with new_folder(folder) as written:
        save_tensors(layout.tensors, written / WEIGHTS_FILE, metadata={"format": "pt"})
        text = json.dumps(layout.config, indent=2) + "\n"
        (written / "config.json").write_text(text, encoding="utf-8")
    return layout


def frequent_ids(drafter: Path, num_ids: int) -> Tensor:
    """Return the most frequent token ids of the rollouts of the run whose checkpoint holds
    `drafter`, ascending.
    """
    files = engine_files(drafter.parent)
    engines = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    counts = [engine["token_counts"] for engine in engines if engine.get("token_counts")]
    if not counts:
        raise ValueError(
            f"--draft-vocab-size {num_ids}: {drafter.parent} must hold the token counts of a run with speculation.draft_vocab_size"
        )
    vocab_size = read_layout(drafter).config["vocab_size"]
    if not 0 < num_ids < vocab_size:
        raise ValueError(f"--draft-vocab-size {num_ids}: must be in (0, {vocab_size})")
    counter = TokenCounts(vocab_size, num_ids)
    for part in counts:
        counter.merge(part)
    return counter.most_frequent()


def reduce_vocabulary(layout: Layout, ids_C: Tensor, target: Target | None) -> Layout:
    """Return an EAGLE-3 layout whose head has only the rows `ids_C` of the target's head.

    ValueError for EAGLE or no target.
    """
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


def read_source(source: Path, target: Target | None) -> Layout:
    """Return the drafter in our layout, from any form that `read_draft_settings` knows.

    ValueError if it has other tensors than a drafter, or belongs to another target.
    """
    num_layers = None
    if target is not None and target.folder is not None:
        policy = load_model_config(target.folder)
        check_drafter("--from", source, policy, target.folder)
        num_layers = policy.num_layers
    elif borrowed := sorted({*HfReader(source).names()} & {*BORROWED}):
        raise ValueError(f"--target: needed, {borrowed[0]} of {source} must be compared with it")
    config = load_draft_config(source, num_layers)
    weights = read_draft_weights(source, config)
    if target is None:
        table_VD = torch.zeros(()).expand(config.vocab_size, config.hidden_size)
        target = Target(embedding_VD=table_VD, lm_head_VD=table_VD)
        own = dataclasses.replace(config, target=None)
    else:
        own = config
    model = DraftModel(own, embedding_VD=target.embedding_VD, lm_head_VD=target.lm_head_VD)
    load_draft_weights(model, weights, source=str(source))
    dtype = weights["fc.weight"].dtype
    return Layout(config=draft_config_json(config, dtype), tensors=weights)


def read_layout(folder: Path) -> Layout:
    """Read a folder without checks."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Layout(config=config, tensors=load_file(folder / WEIGHTS_FILE))


def convert(
    layout: Layout, format: str, target: Target | None, dtype: torch.dtype | None
) -> Layout:
    """Return our (SGLang's) layout in `format`."""
    dtype = dtype or next(iter(layout.tensors.values())).dtype
    tensors = {key: tensor.to(dtype).contiguous() for key, tensor in layout.tensors.items()}
    config: dict[str, Any] = layout.config | {"dtype": str(dtype).removeprefix("torch.")}
    rope = config["rope_parameters"]  # transformers 5 reads it; transformers 4 reads the keys below
    config["rope_theta"] = rope["rope_theta"]
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope
    if format == "sglang" and config.get(NORM_BEFORE_RESIDUAL):
        raise ValueError(f"--format sglang: has no {NORM_BEFORE_RESIDUAL}=true of this drafter")
    if format == "vllm":
        config["architectures"] = [_VLLM_NAMES[config["architectures"][0]]]
        if layout.is_eagle3:
            config |= _vllm_eagle3(config)
        else:
            tensors = fold_bias(tensors, target)
    return Layout(config=config, tensors=tensors)


def _vllm_eagle3(config: dict[str, Any]) -> dict[str, Any]:
    return {
        AUX_LAYER_IDS: [layer + 1 for layer in config["eagle_config"][AUX_LAYER_IDS]],
        "eagle_config": {"use_aux_hidden_state": True},
        "draft_vocab_size": config["vocab_size"],
        "target_hidden_size": config["hidden_size"],
        NORM_BEFORE_RESIDUAL: config.get(NORM_BEFORE_RESIDUAL, False),
        "norm_before_fc": False,
    }


def fold_bias(tensors: dict[str, Tensor], target: Target | None) -> dict[str, Tensor]:
    """Remove `fc.bias`; an embedding of the drafter's own adds the same values.

    ValueError if the dtype of the embedding rounds the outputs of fc too much.
    """
    rest = {name: tensor for name, tensor in tensors.items() if name != "fc.bias"}
    bias_D = tensors["fc.bias"].double()
    if not bias_D.any():
        return rest
    if target is None:
        raise ValueError(
            "--target: vLLM's EAGLE has no fc.bias, so the drafter needs its target's embedding"
        )
    dtype = tensors["fc.weight"].dtype
    of_embedding_DD = tensors["fc.weight"][:, : bias_D.numel()].double()
    shift_D = torch.linalg.lstsq(of_embedding_DD, bias_D.unsqueeze(1)).solution.squeeze(1)
    embedding_VD = target.embedding_VD.double()
    own_VD = (embedding_VD + shift_D).to(dtype)
    expected_VD = embedding_VD @ of_embedding_DD.T + bias_D
    difference = (own_VD.double() @ of_embedding_DD.T - expected_VD).abs().max().item()
    limit = _TOLERANCE[dtype] * expected_VD.abs().max().item()
    if not difference <= limit:
        raise ValueError(
            f"fc.bias: outputs differ by {difference:.2e} (at most {limit:.2e}) when the embedding holds it as {dtype};"
            " a wider --dtype may hold it"
        )
    return rest | {"embed_tokens.weight": own_VD}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--from", dest="source", required=True, metavar="FOLDER")
    add("--to", required=True, metavar="FOLDER", help="must not exist")
    add("--format", required=True, choices=FORMATS)
    add("--target", metavar="FOLDER", help="the policy, as a Hugging Face folder")
    add("--draft-vocab-size", type=int, default=0, help="token ids that EAGLE-3 proposes; 0: all")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as stored")
    add("--push-to-hub", metavar="ID", help="upload the folder")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit("run it as: tlt export-drafter")
