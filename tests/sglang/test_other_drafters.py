"""EAGLE-3 and n-gram retrieval: other ways to the same tokens."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.sglang.rollouts import (
    PARAMS,
    SAMPLED,
    answers,
    load_draft,
    mean_accept_length,
    save_random_drafter,
    start_embedded,
    start_sglang,
    tensors_of,
    token_lists,
)
from tlt_megatron.drafter.eagle_folder import load_draft_config
from tools.commands.export_drafter import export_drafter, load_target


@pytest.fixture(scope="module")
def plain(policy_folder: Path) -> dict[str, list[list[int]]]:
    engine = start_embedded(policy_folder)
    return {name: token_lists(answers(engine, params)) for name, params in PARAMS.items()}


def test_eagle3_changes_no_token(policy_folder: Path, tmp_path: Path, plain: dict) -> None:
    drafter = save_random_drafter(policy_folder, tmp_path, "eagle3")
    with closing(start_sglang(policy_folder, drafter=drafter, strategies=["3_2_6"])) as engine:
        own = tensors_of(save_random_drafter(policy_folder, tmp_path / "b", "eagle3", seed=1))
        load_draft(engine, own)
        for name, params in PARAMS.items():
            found = answers(engine, params)
            assert token_lists(found) == plain[name]
            assert mean_accept_length(found) > 1.0


def test_an_exported_drafter_of_few_ids_loads_and_accepts_as_much(
    policy_folder: Path, tmp_path: Path, plain: dict
) -> None:
    drafter = save_random_drafter(policy_folder, tmp_path / "whole", "eagle3")
    ids = list(range(1, 48, 2))
    few = tmp_path / "few"
    export_drafter(drafter, few, "sglang", load_target(policy_folder), ids_C=torch.tensor(ids))
    tap_layers = load_draft_config(drafter).aux_layer_ids
    twin = start_embedded(
        policy_folder,
        drafter=drafter,
        strategy="4_1_4",
        tap_layers=tap_layers,
        ids=ids,
    )
    with closing(start_sglang(policy_folder, drafter=few, strategies=["4_1_4"])) as engine:
        for name in ("greedy", "sampled"):  # the embedded engine cuts its drafts too
            found, expected = answers(engine, PARAMS[name]), answers(twin, PARAMS[name])
            assert token_lists(found) == token_lists(expected) == plain[name]
            pairs = zip(found, expected, strict=True)
            num_same = sum(ours.accept_lengths == theirs.accept_lengths for ours, theirs in pairs)
            assert num_same >= 0.9 * len(found)
        assert mean_accept_length(found) > 1.0


def test_ngram_drafts_change_no_token(policy_folder: Path, plain: dict) -> None:
    with closing(start_sglang(policy_folder, strategies=["ngram_6"])) as engine:
        for name, params in PARAMS.items():
            assert token_lists(answers(engine, params)) == plain[name]
        again = answers(engine, SAMPLED)  # its own responses are in the cache now
        assert token_lists(again) == plain["sampled"]
        assert mean_accept_length(again) > 1.5
