"""Moves weights to the host while training needs the GPU's memory.

Made by the embedded engine when it goes to sleep. Tensors and their views stay the same objects and lose only their memory:
a drafter keeps references to the target's embedding and LM head.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class ParkedWeights:
    """Frees the memory of tensors until `restore`. Do not use the tensors before it; their addresses may change."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors to the host and free them. Tensors may share memory."""
        storages = {s.data_ptr(): s for s in (tensor.untyped_storage() for tensor in tensors)}
        self._held: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in storages.values():
            host = torch.UntypedStorage(storage.nbytes(), device="cpu")
            self._held.append((storage, host.copy_(storage)))
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the memory again and copy the contents back."""
        for storage, host in self._held:
            storage.resize_(host.nbytes())
            storage.copy_(host)
        self._held.clear()
