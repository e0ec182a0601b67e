"""The names of other trainers: every setting has its row, and the page shows the tables."""

from __future__ import annotations

import dataclasses
import re

import pytest

from docs.name_table import PAGE, with_tables
from tlt_megatron.config.other_names import by_their_name, our_name, rows
from tlt_megatron.config.schema import RunConfig


def test_every_setting_has_a_row_and_every_row_is_a_setting() -> None:
    sections = dataclasses.asdict(RunConfig())
    known = {f"{section}.{key}" for section, settings in sections.items() for key in settings}
    named = {".".join(row.ours.split(".")[:2]) for row in rows()}
    assert sorted(named - known) == []
    assert sorted(known - named) == [], "add rows to config/other_names.txt"


def test_a_row_names_all_three_projects_and_none_twice() -> None:
    for row in rows():
        assert len(row.theirs) == 3, row
    for column in range(3):
        pairs = [(row.ours, row.theirs[column]) for row in rows() if row.theirs[column]]
        assert len(set(pairs)) == len(pairs)


def test_every_answer_names_a_key_that_exists() -> None:
    for answers in by_their_name().values():
        for key in re.findall(r"\b[a-z]+\.(?!py:)[a-z_0-9]+", " ".join(answers)):
            section, name = key.split(".")
            assert hasattr(getattr(RunConfig(), section), name), key


def test_the_page_shows_the_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "run: python -m docs.name_table"


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "eval.temperature"),
        ("actor_rollout_ref.rollout.temperature", "rollout.temperature"),
        ("rollout-batch-size", "rollout.num_prompts"),
        ("some.section.clip_ratio_high", "algorithm.clip_high"),
        ("clip_ratio", "algorithm.clip_low and algorithm.clip_high"),
        ("critic.megatron.tensor_model_parallel_size", "parallel.tensor"),
        (
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            "sglang.engine_args.tp_size",
        ),
        ("lr", "optimizer.lr"),  # a whole name, not the end of critic.optim.lr
        ("optim.lr", "critic.lr and optimizer.lr"),
        ("reward.overlong_buffer.len", "reward.overlong_tokens"),
        ("actor.megatron.override_transformer_config.recompute_granularity", "mcore.recompute"),
        ("trainer.n_gpus_per_node", "--nproc-per-node of tlt train"),
        ("max_tool_calling_iterations", "rollout.max_turns (there one less)"),
        ("reward_manager.name", None),
    ],
)
def test_a_key_leads_to_our_setting_whole_or_by_its_end(key: str, ours: str | None) -> None:
    assert our_name(key) == ours
