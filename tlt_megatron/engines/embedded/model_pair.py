"""The policy and its drafter as the steps of a batch see them. The engine makes the record for each
call of `generate`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tlt_megatron.engines.embedded.graph_pool import GraphPool
from tlt_megatron.engines.embedded.lane_steps import LaneSteps
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The policy and its drafter over one KV memory, the graphs that run their steps, and how they
    sample.
    """

    policy: Transformer
    draft: DraftInference | None
    cache: KvCache
    graphs: GraphPool
    params: SamplingParams

    def bind_lanes(self, lane: int) -> None:
        """Run steps over rows in lanes of `lane` slots from now on, from the first slot on. 0:
        lanes that grow.
        """
        self.graphs.bind(LaneSteps(self.policy, self.cache, lane, self.draft, self.params))
