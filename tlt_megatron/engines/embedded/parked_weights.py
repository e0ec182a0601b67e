"""Weights that wait on the host while the GPU's memory is wanted elsewhere.

Made by the embedded engine when it goes to sleep. What to know: tensors stay the objects that they are, views and all, and
only their memory goes, because a drafter borrows the target's embedding and head for as long as it lives.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class ParkedWeights:
    """Takes the memory of tensors, which must not be used until `restore`. It may come back at other addresses."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Tensors may share memory."""
        storages = {s.data_ptr(): s for s in (tensor.untyped_storage() for tensor in tensors)}
        self._held: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in storages.values():
            host = torch.UntypedStorage(storage.nbytes(), device="cpu")
            self._held.append((storage, host.copy_(storage)))
            storage.resize_(0)

    def restore(self) -> None:
        """Give memory and content back."""
        for storage, host in self._held:
            storage.resize_(host.nbytes())
            storage.copy_(host)
        self._held.clear()
