"""Compares a Hugging Face folder with the torch_dist checkpoint that it became or came from, for
`tlt convert --verify`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from tlt_megatron.config.model_shape import tensor_shapes
from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.tokenizer import load_tokenizer
from tlt_megatron.mcore.checkpoint_logits import checkpoint_logits
from tlt_megatron.models.config import ModelConfig, load_model_config
from tlt_megatron.models.hf_io import HfReader, companions, dtype_of

NUM_TOKENS = 64  # in the prompt
# The largest allowed difference, as a share of the largest logit. Sums in another order differ by
# less (1.4e-5 in a mixture of 1.1 billion random weights), and a wrong layout by far more.
MOST_DIFFERENCE = 1e-3
# A model in float32 takes 4 bytes a parameter. Megatron joins gate and up projections of all layers
# while it loads.
_BYTES_PER_PARAMETER = 8


def tensor_differences(
    stored: Iterable[tuple[str, Tensor]], folder: Path, dtype: torch.dtype, *, is_export: bool
) -> Iterator[str]:
    """Compare every tensor of a checkpoint with that of the Hugging Face `folder`, bit for bit, and
    yield a line for each that is missing, too many or different.

    What was written must be what was read, rounded to `dtype`. With `is_export` the folder was
    written, else the checkpoint. Holds one tensor of each.
    """
    reader = HfReader(folder)
    unseen = set(reader.names())
    for name, tensor in stored:
        if name not in reader:
            yield f"{folder} has no tensor {name}"
            continue
        unseen.discard(name)
        read, written = (tensor, reader[name]) if is_export else (reader[name], tensor)
        wanted = read.to(dtype_of(name, dtype))
        if written.dtype != wanted.dtype or written.shape != wanted.shape:
            found, expected = (f"{t.dtype} {tuple(t.shape)}" for t in (written, wanted))
            yield f"{name} is {found}, not {expected}"
        elif num_other := int((_bits(written) != _bits(wanted)).sum()):
            yield f"{name} differs in {num_other:,} of {wanted.numel():,} numbers"
    if is_export:
        yield from (f"{folder} has {name}, which the model has not" for name in sorted(unseen))


def companion_differences(model: Path, folder: Path, data: DataSection | None) -> list[str]:
    """Return a line for each file that belongs to the weights of `model` (tokenizer, chat template,
    generation config) and is not the same in `folder`. `data`: of the run that trained it.
    """
    differences, pinned = [], None
    if data is not None:
        tokenizer = load_tokenizer(model, data.template_date)
        pinned = tokenizer.pinned_template(data.chat_template_kwargs)
        if load_tokenizer(folder).hf.chat_template != pinned:
            differences.append(
                f"{folder} has not the chat template of {model} with data.chat_template_kwargs"
            )
    for file in companions(model):
        copy = folder / file.relative_to(model)
        is_same = copy.is_file() and copy.read_bytes() == file.read_bytes()
        is_compared = pinned is not None and file.suffix == ".jinja"
        # the dtype in config.json may change
        if file.name != "config.json" and not is_compared and not is_same:
            differences.append(f"{copy} is not {file}")
    return differences


def logits_bytes(config: ModelConfig) -> int:
    """Return the memory that `logits_difference` needs at most."""
    sizes = [torch.Size(shape).numel() for shape in tensor_shapes(config).values()]
    return _BYTES_PER_PARAMETER * sum(sizes)


def logits_difference(checkpoint: Path, folder: Path, dtype: torch.dtype) -> float:
    """Return the largest difference of the logits of a prompt by transformers and by Megatron, in
    float32, as a share of the largest logit. The prompt is of tokens all over the vocabulary.
    """
    config = load_model_config(folder)
    token_ids_P = torch.linspace(0, config.vocab_size - 1, NUM_TOKENS).long()
    expected = _transformers_logits(folder, token_ids_P, dtype)
    found = checkpoint_logits(checkpoint, config, token_ids_P, dtype)
    return float((found - expected).abs().max() / expected.abs().max())


def _transformers_logits(folder: Path, token_ids_P: Tensor, rounded_to: torch.dtype) -> Tensor:
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

    # transformers lacks MiMo, which computes what a Qwen2 does.
    kind = load_model_config(folder).model_type
    model = (
        (Qwen2ForCausalLM if kind == "mimo" else AutoModelForCausalLM)
        .from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        .eval()
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.to(rounded_to).float()
        return model(token_ids_P[None]).logits[0]


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits as integers: NaN equals itself, and 0 is not -0."""
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
