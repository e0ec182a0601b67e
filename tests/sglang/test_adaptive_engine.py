"""Chains: what one accepts; and several between which our selector chooses, as SGLang's adaptive
policy on two ranks.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from tests.sglang.rollouts import (
    CUT,
    GREEDY,
    SAMPLED,
    answers,
    check_accept_lengths,
    load_draft,
    mean_accept_length,
    start_embedded,
    start_sglang,
    tensors_of,
    token_lists,
)

STRATEGIES = ["2_1_2", "4_1_4", "6_1_6"]


def test_a_chain_accepts_as_much_as_in_the_embedded_engine_and_can_be_paused(
    policy_folder: Path, drafter: Path
) -> None:
    with closing(start_sglang(policy_folder, drafter=drafter, strategies=["4_1_4"])) as engine:
        check_accept_lengths(engine, policy_folder, drafter, "4_1_4", num_tokens=1000)
        plain = token_lists(answers(start_embedded(policy_folder), SAMPLED))
        assert engine.pause_speculation(True)
        paused = answers(engine, SAMPLED)
        assert all(rollout.accept_lengths == () for rollout in paused)
        assert token_lists(paused) == plain
        assert engine.pause_speculation(False)
        assert mean_accept_length(answers(engine, SAMPLED)) > 1.5


def prefer(name: str, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a selector that has seen `name` take a hundredth of the time of all other
    strategies.
    """
    now, table = state["cost"]["num_passes"], []
    for strategy in ("off", *STRATEGIES):
        seconds = [0.01 if strategy == name else 1.0] * 8
        table += [[strategy, octave, seconds, now] for octave in range(5)]
    return state | {"cost": {"num_passes": now, "table": table}}


def test_our_selector_chooses_on_two_ranks_as_one_its_passes_add_up_and_its_state_survives(
    policy_folder: Path, drafter: Path
) -> None:
    with closing(
        start_sglang(
            policy_folder,
            drafter=drafter,
            strategies=STRATEGIES,
            selector="cost_model",
            engine_args={"tp_size": 2},
        )
    ) as engine:
        load_draft(engine, tensors_of(drafter))  # a load compares the checksums of both ranks
        plain = start_embedded(policy_folder)
        for params in (GREEDY, CUT):
            assert token_lists(answers(engine, params)) == token_lists(answers(plain, params))

        expected = token_lists(answers(plain, SAMPLED))
        found = answers(engine, SAMPLED)
        assert token_lists(found) == expected
        passes = engine.take_passes()
        assert engine.take_passes() == []
        assert {record.strategy for record in passes} <= {"off", *STRATEGIES}
        assert all(record.reason for record in passes)
        committed = sum(record.num_committed for record in passes)
        # The first token of a response comes from its prompt; what was committed behind an end is
        # cut.
        num_tokens = sum(rollout.token_ids.numel() - 1 for rollout in found)
        assert num_tokens <= committed <= num_tokens + len(found) * 6
        drafted = [r for r in passes if r.strategy != "off"]
        accepted = sum(sum(record.accepted_by_depth) for record in drafted)
        verified = sum(len(rollout.accept_lengths) for rollout in found)
        assert verified == sum(record.batch_size for record in drafted)
        assert sum(sum(r.accept_lengths) for r in found) <= accepted + verified
        early = engine.state_dict()["selector"]
        assert early["kind"] == "cost_model"
        assert token_lists(answers(engine, SAMPLED)) == expected
        late = engine.state_dict()["selector"]
        assert late["num_observed"] > early["num_observed"]
        # Which chain is the best depends on the machine. Where all others are said to be slow, one
        # runs.
        for name in ("2_1_2", "6_1_6"):
            engine.take_passes()
            engine.load_state_dict({"selector": prefer(name, early)})
            assert token_lists(answers(engine, SAMPLED)) == expected
            assert name in {record.strategy for record in engine.take_passes()}
        engine.load_state_dict({"selector": early})
        assert engine.state_dict()["selector"]["num_observed"] == early["num_observed"]
        # The state of a run with other strategies is left aside: the selector starts anew.
        engine.load_state_dict({"selector": late | {"strategies": ["off"]}})
        assert engine.state_dict()["selector"]["num_observed"] == early["num_observed"]
        assert not engine.pause_speculation(True)  # the other rank could not tell
