"""Chains between which our selector chooses, as SGLang's adaptive policy; and one fixed chain against the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.rollouts import (
    GREEDY,
    SAMPLED,
    answers,
    mean_accept_length,
    start_embedded,
    start_sglang,
    token_lists,
    train_drafter,
)


@pytest.fixture(scope="module")
def drafter(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_drafter(policy_folder, tmp_path_factory.mktemp("drafter"))


def test_a_chain_accepts_as_much_as_in_the_embedded_engine_and_can_be_paused(
    policy_folder: Path, drafter: Path
) -> None:
    plain = start_embedded(policy_folder)
    drafting = start_embedded(policy_folder, drafter=drafter, strategy="4_1_4")
    engine = start_sglang(policy_folder, drafter=drafter, strategies=["4_1_4"])
    try:
        for params in (GREEDY, SAMPLED):
            found = answers(engine, params)
            assert token_lists(found) == token_lists(answers(plain, params))
            expected = mean_accept_length(answers(drafting, params))
            assert mean_accept_length(found) == pytest.approx(expected, rel=0.05)
            assert expected > 1.5
        assert engine.pause_speculation(True)
        paused = answers(engine, SAMPLED)
        assert all(rollout.accept_lengths == () for rollout in paused)
        assert token_lists(paused) == token_lists(answers(plain, SAMPLED))
        assert engine.pause_speculation(False)
        assert mean_accept_length(answers(engine, SAMPLED)) > 1.5
    finally:
        engine.close()


def test_our_selector_chooses_its_passes_add_up_and_its_state_survives(
    policy_folder: Path, drafter: Path
) -> None:
    strategies = ["2_1_2", "4_1_4", "6_1_6"]
    engine = start_sglang(
        policy_folder, drafter=drafter, strategies=strategies, selector="cost_model"
    )
    try:
        plain = token_lists(answers(start_embedded(policy_folder), SAMPLED))
        found = answers(engine, SAMPLED)
        assert token_lists(found) == plain
        passes = engine.take_passes()
        assert engine.take_passes() == []
        assert {record.strategy for record in passes} <= {"off", *strategies}
        assert len({record.strategy for record in passes}) > 1
        assert all(record.reason for record in passes)
        committed = sum(record.num_committed for record in passes)
        # The first token of a response comes from its prompt; what was committed behind an end is cut.
        num_tokens = sum(rollout.token_ids.numel() - 1 for rollout in found)
        assert num_tokens <= committed <= num_tokens + len(found) * 6
        drafted = [r for r in passes if r.strategy != "off"]
        accepted = sum(sum(record.accepted_by_depth) for record in drafted)
        verified = sum(len(rollout.accept_lengths) for rollout in found)
        assert verified == sum(record.batch_size for record in drafted)
        assert sum(sum(r.accept_lengths) for r in found) <= accepted + verified
        early = engine.state_dict()["selector"]
        assert early["kind"] == "cost_model"
        assert token_lists(answers(engine, SAMPLED)) == plain
        late = engine.state_dict()["selector"]
        assert late["num_observed"] > early["num_observed"]
        engine.load_state_dict({"selector": early})
        assert engine.state_dict()["selector"]["num_observed"] == early["num_observed"]
        with pytest.raises(RuntimeError, match="strategies="):
            engine.load_state_dict({"selector": early | {"strategies": ["off"]}})
    finally:
        engine.close()
