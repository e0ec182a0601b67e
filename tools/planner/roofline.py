"""The roofline of a GPU: a pass takes the longer of its bytes over the bandwidth and its operations
over the peak.

Counted are weights and KV. Launches, activations, logits, sampling and communication are not, so
real passes take longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from tlt_megatron.drafter.drafter_memory import drafter_parameters
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.sizes import ModelSizes

ITEM_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Data sheet values of the SXM variants; bfloat16 without sparsity."""

    bandwidth: float  # bytes per second
    peak: float  # operations per second
    num_bytes: float


GPUS = {
    "H100": Gpu(bandwidth=3.35e12, peak=989e12, num_bytes=80e9),
    "H200": Gpu(bandwidth=4.8e12, peak=989e12, num_bytes=141e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """A model on `num_gpus` tensor-parallel GPUs that decodes `batch` sequences of `context`
    tokens.
    """

    model: ModelConfig
    num_gpus: int
    batch: int
    context: int

    def pass_s(self, gpu: Gpu, rows: int, *, is_draft: bool = False) -> float:
        """Return the seconds of a pass with `rows` tokens per sequence, of the target or the
        drafter.
        """
        sizes = ModelSizes(self.model)
        num_layers = 1 if is_draft else sizes.num_layers
        layers = drafter_parameters(sizes) if is_draft else num_layers * sizes.layer
        weights = layers + sizes.table + sizes.hidden  # the LM head; of the embedding only rows
        cached = self.batch * self.context * num_layers
        num_bytes = ITEM_BYTES * (weights + cached * sizes.kv)
        num_operations = 2 * self.batch * rows * weights + 4 * cached * rows * sizes.query
        bandwidth, peak = gpu.bandwidth * self.num_gpus, gpu.peak * self.num_gpus
        return max(num_bytes / bandwidth, num_operations / peak)
