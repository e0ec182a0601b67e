"""States tapped on a GPU reach the host without a wait in the pass. On a pretended GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.policy_batches import make_packed
from tlt_megatron.mcore.hidden_tap import HiddenStateTap
from tlt_megatron.runtime.process_groups import SINGLE, ProcessGroups
from tlt_megatron.types import DraftSequence
from tools.gpu.pretend_cuda import CUDA, PretendGpu

HIDDEN_SIZE, NUM_TOKENS = 8, 14


class Layer(nn.Module):
    """Adds its number."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.weight = nn.Parameter(torch.ones(HIDDEN_SIZE))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.layer_number * self.weight


class Stage(nn.Module):
    """As much of a GPTModel as a tap reads."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            hidden_size=HIDDEN_SIZE, num_layers=3, sequence_parallel=False, fp8=None
        )
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(Layer(number) for number in (1, 2, 3))
        self.decoder.final_layernorm = Layer(10)

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.decoder.get_submodule("layers").children():
            hidden = layer(hidden)
        return self.decoder.get_submodule("final_layernorm")(hidden)


def tap(device: torch.device, aux_layer_ids: tuple[int, ...]) -> list[DraftSequence]:
    """Tap one micro-batch of two sequences in a stage on `device`."""
    kept: list[DraftSequence] = []
    recorder = HiddenStateTap(
        on_sequence=kept.append,
        max_bytes=1 << 20,
        hidden_size=HIDDEN_SIZE,
        aux_layer_ids=aux_layer_ids,
        dtype=torch.bfloat16,
    )
    stage = Stage().to(device)
    ends = torch.tensor([0, 5, NUM_TOKENS], dtype=torch.int32)
    fields = {"token_ids": torch.arange(NUM_TOKENS), "cu_seqlens": ends}
    batch = make_packed([1.0] * NUM_TOKENS, requests=((4, 1), (6, 0)), **fields)
    states = torch.arange(float(NUM_TOKENS * HIDDEN_SIZE)).view(-1, 1, HIDDEN_SIZE).to(device)
    with recorder.record([stage], [batch], ProcessGroups(world=SINGLE)):
        stage(states)
    return kept


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU cannot be pretended beside a real one")
@pytest.mark.parametrize("aux_layer_ids", [(), (0, 2)])
def test_states_are_copied_while_the_pass_runs_and_read_when_they_are_there(
    aux_layer_ids: tuple[int, ...],
) -> None:
    expected = tap(torch.device("cpu"), aux_layer_ids)
    with PretendGpu() as gpu:
        found = tap(CUDA, aux_layer_ids)
        assert not gpu.read_backs
    assert len(found) == len(expected) == 2
    assert [each.request for each in found] == [(6, 0, 0), (4, 1, 0)]  # the longest first
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids.equal(theirs.token_ids)
        assert mine.features.device.type == "cpu"
        assert mine.features.dtype == torch.bfloat16
        assert mine.features.equal(theirs.features)
        if aux_layer_ids:
            assert mine.final_hidden.equal(theirs.final_hidden)
