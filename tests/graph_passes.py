"""What the tests of captured graphs run: passes over rows in lanes of a small random target and drafter, on CPU and GPU,
and a stand-in for a GPU's graphs on the CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.slow_draft import HIDDEN_SIZE, TARGET, VOCAB_SIZE, make_draft_model
from tlt_megatron.engines.embedded.graph_plan import Role
from tlt_megatron.engines.embedded.graph_pool import GraphPool, PassInputs, Step, lane_steps
from tlt_megatron.models.attention.lanes import LaneView, drafted_bias
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.runtime.device import Device

LANE, PAGE, PROMPT = 64, 16, 20  # slots of a lane and of a page, committed positions of every row

# What a capture may not do on a GPU: read back, or bring numbers from Python.
_FORBIDDEN = ("_local_scalar_dense", "lift_fresh", "nonzero", "is_nonzero", "equal")


class RecordedGraphs:
    """Graph memory without a GPU: a graph is the list of calls on tensors that the work made, and replaying it makes them
    again on the very same tensors, without any Python of the work's. `graphs` has a reference to each."""

    def __init__(self, graphs: list[weakref.ref] | None = None) -> None:
        self._graphs = [] if graphs is None else graphs

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `engines.embedded.graph_pool.GraphMemory`."""
        work()
        with _Recorder() as recorder:
            work()
        self._graphs.append(weakref.ref(recorder))
        return recorder.replay


@torch.inference_mode()
def capture_all(pool: GraphPool, example: Mapping[Role, PassInputs]) -> None:
    """Capture all planned shapes, cut to the lanes, largest activations first."""
    keys = dict.fromkeys(map(pool._in_lanes, pool.plan.keys))
    for key in sorted(keys, key=lambda key: -pool.plan.cost(key).activation_bytes):
        if key not in pool._captured:
            pool._capture_blank(key, example[key.role])


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable, tuple, dict, list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        assert name not in _FORBIDDEN, f"{name} in a captured pass"
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and _storage(t) not in given]
        if made or func._schema.is_mutable:  # else a view
            self._calls.append((func, args, kwargs, made))
        return out

    def replay(self) -> None:
        """What the recorded calls made is overwritten."""
        for func, args, kwargs, made in self._calls:
            out = func(*args, **kwargs)
            if made:
                new = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
                for target, source in zip(made, new, strict=True):
                    target.copy_(source)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingDevice(Device):
    """The CPU, with graphs."""

    graphs: list[weakref.ref] = field(default_factory=list)  # all that were captured

    @property
    def num_alive(self) -> int:
        """Graphs that somebody still holds."""
        return sum(graph() is not None for graph in self.graphs)

    def graph_memory(self) -> RecordedGraphs:
        """See `Device`."""
        return RecordedGraphs(self.graphs)


def recording_device() -> RecordingDevice:
    """A CPU on which passes are captured and replayed."""
    return RecordingDevice(torch_device=torch.device("cpu"), backend="gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePasses:
    """A target, its drafter behind it in the same KV pool, and inputs for both."""

    model: Transformer
    draft: DraftInference
    cache: KvCache
    steps: Mapping[Role, Step]
    scratch_slot: int  # behind all lanes

    def inputs(self, role: Role, *, batch_size: int, num_rows: int, seed: int = 0) -> PassInputs:
        """Random queries behind the committed positions, each of which sees those before it."""
        device, dtype = self.cache.device, self.cache.bias_T.dtype
        generator = torch.Generator().manual_seed(seed)
        view = LaneView(self.cache, num_rows=batch_size, lane=LANE)
        base_B = torch.full((batch_size,), PROMPT, device=device)
        positions_BR = base_B.unsqueeze(1) + torch.arange(num_rows, device=device)
        visible_RR = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).tril()
        length = view.read_length(PROMPT + num_rows)
        size = batch_size * num_rows
        hidden_PD = torch.randn(size, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
        return PassInputs(
            token_ids_P=torch.randint(VOCAB_SIZE, (size,), generator=generator).to(device),
            positions_P=positions_BR.view(-1),
            slots_P=view.slots(positions_BR),
            bias_BRS=drafted_bias(view, base_B, visible_RR.expand(batch_size, -1, -1), length),
            hidden_PD=hidden_PD.to(device, dtype) if role is Role.DRAFT else None,
        )


def make_lane_passes(device: torch.device, dtype: torch.dtype, *, num_lanes: int) -> LanePasses:
    """The same weights and committed keys for the same sizes, on any device."""
    generator = torch.Generator().manual_seed(3)
    model = Transformer(TARGET, dtype, device)
    for name in sorted(model.hf_names()):
        shape = dict(model.named_hf_tensors())[name].shape
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        model.load_hf(name, noise * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0))
    drafter = make_draft_model("eagle", dtype=dtype)
    drafter.embedding_VD, drafter.lm_head_VD = model.embedding, model.lm_head
    draft = DraftInference(drafter.to(device), dtype)
    cache = KvCache(
        TARGET,
        num_pages=num_lanes * LANE // PAGE,
        page_size=PAGE,
        dtype=dtype,
        device=device,
        num_draft_layers=1,
        has_scratch=True,
    )
    keys = torch.randn(cache.kv_LKTH.shape, generator=generator, dtype=torch.float64)
    cache.kv_LKTH.copy_(keys)
    for row in range(num_lanes):
        cache.mark_written(torch.arange(PROMPT, device=device) + row * LANE)
    for rotary in (model.rotary, draft.rotary):
        rotary.reserve(LANE)
    return LanePasses(
        model=model,
        draft=draft,
        cache=cache,
        steps=lane_steps(model, cache, LANE, draft),
        scratch_slot=cache.scratch_slot,
    )
