"""The global random generators of this process, saved and restored with a checkpoint
(trainer/loop.py).

A state is JSON-able (lists, numbers and hex strings), so it needs no pickle. Sampling noise is not
included: it is counter-based and has no state.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tlt_megatron.runtime.device import Device

log = logging.getLogger(__name__)

_REQUIRED = ("python", "numpy", "torch")


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch (all devices). ValueError outside [0, 2**32), numpy's range."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed}: must be in [0, 2**32)")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state(device: Device | None = None) -> dict[str, object]:
    """Return the state of this rank's generators, including the GPU's if `device` is a GPU."""
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    keys, position = numpy["state"]["key"].tolist(), numpy["state"]["pos"]
    state: dict[str, object] = {
        "python": [version, list(words), gauss],
        "numpy": [numpy["bit_generator"], keys, position, numpy["has_gauss"], numpy["gauss"]],
        "torch": _to_hex(torch.get_rng_state()),
    }
    cuda = device.rng_state() if device is not None else None
    if cuda is not None:
        state["cuda"] = _to_hex(cuda)
    return state


def set_rng_state(state: Mapping[str, Any], device: Device | None = None) -> None:
    """Restore the result of `rng_state`, also after conversion to JSON and back. ValueError if a
    generator is missing.

    A state from a CPU run leaves a GPU's generator unchanged and logs this.
    """
    missing = [name for name in _REQUIRED if name not in state]
    if missing:
        raise ValueError(f"rng state lacks {', '.join(missing)}; it holds {', '.join(state)}")
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_from_hex(state["torch"]))
    if device is not None and device.is_cuda:
        if "cuda" in state:
            device.set_rng_state(_from_hex(state["cuda"]))
        else:
            log.warning(
                "the rng state was saved without a GPU: this GPU's generator stays as it is"
            )


def _to_hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
