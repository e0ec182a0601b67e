"""A drafter that proposes only the most frequent token ids: the tokens stay the policy's, and the
ids follow its responses.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.recorded_graphs import recording_device
from tests.unit.engines.conftest import (
    accept_lengths,
    by_turns,
    checksum,
    engine_over,
    speculate,
    tokens_of,
)
from tests.unit.engines.test_speculative_engine import PARAMS, STRATEGIES, prompts
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.runtime.device import Device
from tlt_megatron.speculation.selector import FixedSelector
from tlt_megatron.speculation.token_counts import TokenCounts
from tlt_megatron.types import RolloutGroup

NUM_IDS = 20  # out of 48


def speculate_with(engine: EmbeddedEngine, strategy: str = "") -> Speculation:
    """Let the engine draft with NUM_IDS ids, in every strategy by turns or in a fixed one."""
    selector = by_turns(STRATEGIES)
    if strategy:
        selector = FixedSelector(OFF if strategy == "off" else SpeculationStrategy.parse(strategy))
    return speculate(engine, STRATEGIES, selector=selector, num_ids=NUM_IDS)


def ids_of(speculation: Speculation) -> list[int]:
    assert speculation.draft is not None
    assert speculation.draft.ids_C is not None
    return speculation.draft.ids_C.tolist()


def answer(engine: EmbeddedEngine) -> list[RolloutGroup]:
    return engine.generate(prompts(), PARAMS, policy_version=1)


@pytest.mark.parametrize("device", [None, recording_device()], ids=["eager", "graphs"])
def test_few_draft_ids_give_the_tokens_of_plain_decoding(
    device: Device | None, tiny_path: Path
) -> None:
    """Chains and trees take turns. The ids are chosen anew before the second call, while the
    captured graphs stay.
    """
    engine = engine_over(tiny_path, device=device, max_batch_size=16, max_new_tokens=64)
    plain = answer(engine)
    speculation = speculate_with(engine)
    first, known = answer(engine), ids_of(speculation)
    second = answer(engine)
    assert tokens_of(first) == tokens_of(second) == tokens_of(plain)
    assert known == list(range(NUM_IDS)) != ids_of(speculation)
    drawn = {token for response in tokens_of(plain) for token in response}
    assert not drawn <= set(ids_of(speculation))  # some of the policy's tokens cannot be drafted
    for groups in (first, second):
        assert max(accept_lengths(groups)) > 1


def test_the_head_follows_the_policy_and_is_copied_only_to_draft(tiny_path: Path) -> None:
    engine = engine_over(tiny_path, max_batch_size=16, max_new_tokens=64)
    speculation = speculate_with(engine, "off")
    draft = speculation.draft
    assert draft is not None
    tensors = [(name, 1.5 * t.double()) for name, t in HfReader(tiny_path).items()]
    for _ in range(2):
        engine.load_weights(tensors, version=1, checksum=lambda: checksum(tensors))
        answer(engine)
        assert engine.stats().drafter_refreshes == ()
    speculation = speculate_with(engine, "4_1_4")
    answer(engine)
    engine.load_weights(tensors, version=1, checksum=lambda: checksum(tensors))
    answer(engine)
    ((start_s, end_s),) = engine.stats().drafter_refreshes
    assert start_s <= end_s
    assert speculation.draft is not None
    hidden = torch.randn(3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    head_VD = dict(tensors)["lm_head.weight"]
    expected = hidden @ head_VD[ids_of(speculation)].T
    torch.testing.assert_close(speculation.draft.logits(hidden), expected)


def test_a_resumed_engine_drafts_the_same_ids(tiny_path: Path) -> None:
    engine = engine_over(tiny_path, max_batch_size=16, max_new_tokens=64)
    straight = speculate_with(engine, "3_2_6")
    for _ in range(2):
        answer(engine)
        straight.target_changed()
    saved = straight.state_dict()
    expected = answer(engine)
    resumed = speculate_with(engine, "3_2_6")
    resumed.load_state_dict(saved)
    groups = answer(engine)
    assert ids_of(resumed) == ids_of(straight)
    assert accept_lengths(groups) == accept_lengths(expected)
    # a checkpoint without counts, from before or with a whole head
    resumed.load_state_dict({**saved, "token_counts": None})


def test_counts_of_another_vocabulary_are_refused_before_anything_is_loaded(
    tiny_path: Path,
) -> None:
    engine = engine_over(tiny_path)
    speculation = speculate_with(engine, "3_2_6")
    saved = speculation.state_dict()
    foreign = {**saved, "selector": None, "token_counts": {"ids": [3, 48], "counts": [1, 1]}}
    with pytest.raises(ValueError, match=r"token id 48: must be in \[0, 48\)"):
        engine.load_state_dict(foreign)
    assert speculation.state_dict() == saved


def test_frequent_ids_are_kept_and_old_ones_fade() -> None:
    counts = TokenCounts(10, 3)
    assert counts.most_frequent().tolist() == [0, 1, 2]
    counts.add([7, 7, 7, 9, 9, 4])
    assert counts.most_frequent().tolist() == [4, 7, 9]
    counts.fade()
    assert counts.state_dict() == {"ids": [7, 9], "counts": [2, 1]}
    assert counts.most_frequent().tolist() == [0, 7, 9]
    counts.add([5, 5, 5, 8, 8])
    assert counts.most_frequent().tolist() == [5, 7, 8]
