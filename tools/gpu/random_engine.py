"""An embedded engine with random weights, which are made where they are used, and responses to one
long prompt, which is computed once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tlt_megatron.config.model_shape import tensor_shapes
from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.engines.base import PassRecord
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.hf_io import Checksum
from tlt_megatron.runtime.device import Device
from tlt_megatron.types import Prompt, SamplingParams

_VERSION = 0  # the weights never change


def random_weights(
    config: ModelConfig, device: torch.device, *, zeros: tuple[str, ...] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights in bfloat16 one at a time: two copies of a 7B need not fit.

    Norms are 1. Weights whose names end with one of `zeros` are 0.
    """
    for name, shape in tensor_shapes(config).items():
        tensor = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif not name.endswith(zeros):
            tensor.normal_(std=0.02)
        yield name, tensor


def make_engine(
    config: ModelConfig,
    device: Device,
    *,
    batch_size: int,
    num_prompt: int,
    num_new: int,
    zeros: tuple[str, ...] = (),
) -> EmbeddedEngine:
    """Return an engine in bfloat16 for prompts and responses of these lengths, with
    `random_weights`.
    """
    section = RolloutSection(
        dtype="bfloat16",
        max_batch_size=batch_size,
        num_samples=batch_size,
        max_new_tokens=num_new,
        prefill_chunk_tokens=num_prompt,
    )
    engine = EmbeddedEngine(config, section, device, max_prompt_tokens=num_prompt)
    checksum = Checksum()

    def summed() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in random_weights(config, device.torch_device, zeros=zeros):
            checksum.add(name, tensor)
            yield name, tensor

    engine.load_weights(summed(), version=_VERSION, checksum=checksum.value)
    device.release_cached()
    return engine


def generate(
    engine: EmbeddedEngine,
    *,
    batch_size: int,
    num_prompt: int,
    num_new: int,
    should_stop: Callable[[], bool] | None = None,
) -> tuple[list[list[int]], list[PassRecord]]:
    """Return tokens and passes of `batch_size` responses to one prompt, of low token ids and 0 at
    its end.
    """
    ids = (*((7 * i + 3) % 64 for i in range(num_prompt - 1)), 0)
    prompt = Prompt(prompt_id="0", draw_index=0, token_ids=ids)
    params = SamplingParams(num_samples=batch_size, max_new_tokens=num_new, seed=1)
    (group,) = engine.generate([prompt], params, policy_version=_VERSION, should_stop=should_stop)
    return [r.token_ids.tolist() for r in group.rollouts], engine.take_passes()
