"""The engine object of a rank whose GPU is used by the first rank's SGLang engine (`tp_size` > 1).

It generates nothing but takes part in every collective, so that all ranks run the same loop. It
waits while the engine allocates or frees memory of its GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tlt_megatron.engines.base import EngineStats, PassRecord, RolloutEngine
from tlt_megatron.engines.sglang.connection import DRAFT, TARGET
from tlt_megatron.engines.sglang.replica import LOADING, SLEEPING, WAKING, in_step
from tlt_megatron.engines.sglang.weights import WeightSender
from tlt_megatron.runtime.device import Device
from tlt_megatron.runtime.process_groups import SINGLE, Group
from tlt_megatron.types import Prompt, RolloutGroup


class FollowerEngine(RolloutEngine):
    """Accepts no prompts. Methods that are not defined here do nothing, as in the Protocol."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        *,
        has_drafter: bool,
        replica: Group = SINGLE,
    ) -> None:
        """`replica`: the ranks of the engine, including this one."""
        self._replica = replica
        self._is_asleep = False
        self._weights = WeightSender(
            None,
            replica,
            device.torch_device,
            dtype,
            num_ranks=replica.size,
            offers_own=device.is_cuda,
            has_drafter=has_drafter,
        )

    def generate(self, prompts: Sequence[Prompt], *_: object, **__: object) -> list[RolloutGroup]:
        """Return []. ValueError if there are prompts: they belong to the first rank."""
        if prompts:
            raise ValueError(f"{len(prompts)} prompts for a rank without an engine of its own")
        return []

    def load_weights(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        version: int,
        checksum: Callable[[], int],  # noqa: ARG002
    ) -> None:
        """Take part in the export and offer this rank's copy. Keep what a drafter borrows."""
        self._offer(TARGET, tensors, version)

    def target_tensors(self) -> tuple[Tensor, Tensor]:
        """See `RolloutEngine`. RuntimeError without a learned drafter or before `load_weights`."""
        return self._weights.target_tensors()

    def load_drafter_weights(
        self,
        tensors: Mapping[str, Tensor],
        *,
        version: int,
        checksum: int,  # noqa: ARG002
    ) -> None:
        """Offer this rank's copy of the drafter's weights."""
        self._offer(DRAFT, tensors.items(), version)

    def _offer(self, role: str, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._weights.send(tensors, role=role, version=str(version))
        with in_step(LOADING, self._replica):
            pass  # the leader compares checksums

    def pause_speculation(self, is_paused: bool) -> bool:  # noqa: ARG002
        """Return False: an engine that spans several ranks cannot pause."""
        return False

    def sleep(self) -> None:
        """Wait until the engine has freed this rank's GPU memory."""
        if not self._is_asleep:
            with in_step(SLEEPING, self._replica):
                pass
        self._is_asleep = True

    def wake(self) -> None:
        """Wait until the engine has allocated this rank's GPU memory, which must be free before."""
        if self._is_asleep:
            with in_step(WAKING, self._replica):
                pass
        self._is_asleep = False

    def stats(self) -> EngineStats:
        return EngineStats()

    def take_passes(self) -> list[PassRecord]:
        return []

    def state_dict(self) -> dict[str, object]:
        return {}
