"""Frees the memory of weights that will be sent anew, while training needs it.

Tensors and their views stay the same objects: a drafter keeps references to the target's embedding.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class FreedWeights:
    """Tensors without memory until `restore`. Do not use the tensors before it."""

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
