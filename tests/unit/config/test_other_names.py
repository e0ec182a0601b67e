"""The names of other trainers: every setting has its row, and the page shows the table."""

from __future__ import annotations

import dataclasses

from docs.name_table import PAGE, with_table
from tlt_megatron.config.other_names import NAMES, our_name
from tlt_megatron.config.schema import RunConfig

COMPLETE = ("algorithm", "rollout", "reward", "eval", "checkpoint")


def test_every_setting_has_a_row_and_every_row_is_a_setting() -> None:
    sections = {
        field.name: getattr(RunConfig(), field.name) for field in dataclasses.fields(RunConfig)
    }
    known = {
        f"{s}.{f.name}" for s, section in sections.items() for f in dataclasses.fields(section)
    }
    assert sorted(NAMES.keys() - known) == []
    missing = {key for key in known if key.startswith(COMPLETE)} - NAMES.keys()
    assert sorted(missing) == [], "add rows to NAMES of config/other_names.py"


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "run: python -m docs.name_table"


def test_a_key_leads_to_our_setting_whole_or_by_its_last_part() -> None:
    assert our_name("actor_rollout_ref.rollout.val_kwargs.temperature") == "eval.temperature"
    assert our_name("actor_rollout_ref.rollout.temperature") == "rollout.temperature"
    assert our_name("rollout-batch-size") == "rollout.num_prompts"
    assert our_name("some.section.clip_ratio_high") == "algorithm.clip_high"
    assert our_name("epsilon_high") == "algorithm.clip_high"
    assert our_name("custom_reward_function.name") is None
