"""The policy inside the embedded engine: loaded, checked, and freed while training needs its
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.models.arithmetic import fastest_arithmetic
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.hf_io import checksum_tensors
from tlt_megatron.models.invariant_arithmetic import invariant_arithmetic
from tlt_megatron.models.transformer import Transformer


class FreedWeights:
    """Tensors without memory until `restore`. Do not use the tensors before it.

    Tensors and their views stay the same objects: a drafter keeps references to the target's
    embedding.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Free the tensors. They may share memory."""
        storages = {s.data_ptr(): s for s in (tensor.untyped_storage() for tensor in tensors)}
        self._sizes = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._sizes:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the memory again. Its contents are undefined, and its address may be new."""
        for storage, num_bytes in self._sizes:
            storage.resize_(num_bytes)


class PolicyWeights:
    """The model in `rollout.dtype`, which the first `load` allocates. Its tensors stay the same
    objects.

    So a drafter may keep references to the policy's embedding, also while its memory is freed.
    """

    def __init__(self, config: ModelConfig, section: RolloutSection, device: torch.device) -> None:
        self.config = config
        self.dtype: torch.dtype = getattr(torch, section.dtype)
        self._device = device
        self._arithmetic = fastest_arithmetic(device)
        if section.batch_invariant:
            self._arithmetic = invariant_arithmetic(config, self.dtype, device)
        self._model: Transformer | None = None
        self._version: int | None = None
        self._freed: FreedWeights | None = None

    @property
    def model(self) -> Transformer:
        """Return the model. RuntimeError before the first `load`."""
        if self._model is None:
            raise RuntimeError("load_weights must come before a drafter")
        return self._model

    def model_of(self, policy_version: int) -> Transformer:
        """Return the model. RuntimeError unless its weights are of `policy_version`."""
        if self._model is None or self._version != policy_version:
            raise RuntimeError(
                f"policy_version={policy_version} is asked for, the engine holds {self._version}"
            )
        return self._model

    def load(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, checksum: Callable[[], int]
    ) -> None:
        """See `RolloutEngine.load_weights`."""
        self._version = None
        if self._model is None:
            self._model = Transformer(self.config, self.dtype, self._device, self._arithmetic)
        missing = set(self._model.hf_names())
        for name, tensor in tensors:
            self._model.load_hf(name, tensor)
            missing.discard(name)
        if missing:
            raise RuntimeError(
                f"weights of policy_version={version} lack {len(missing)} tensors, {min(missing)} among them"
            )
        held = checksum_tensors(self._model.named_hf_tensors())
        if held != (expected := checksum()):
            dtype = str(self.dtype).removeprefix("torch.")
            raise RuntimeError(
                f"weights of policy_version={version} have checksum {held} in {dtype}: must be {expected}"
            )
        self._version = version

    def free(self) -> None:
        """Free the memory of all weights. Do not use them before `restore` and a new `load`."""
        if self._model is not None and self._freed is None:
            self._freed = FreedWeights(tensor for _, tensor in self._model.named_hf_tensors())
            self._version = None

    def close(self) -> None:
        """Let go of the model."""
        self._model = self._version = self._freed = None

    def restore(self) -> None:
        """Allocate freed memory again. Its contents are undefined, and its address may be new."""
        if self._freed is not None:
            self._freed.restore()
            self._freed = None
