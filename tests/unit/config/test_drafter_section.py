"""What the drafter's section allows."""

from __future__ import annotations

import pytest

from tlt_megatron.config.schema import DrafterSection


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "medusa"},
        {"batch_tokens": 0},
        {"lr": 0.0},
    ],
    ids=str,
)
def test_wrong_setting_is_named(settings: dict[str, object]) -> None:
    last = list(settings)[-1]
    with pytest.raises(ValueError, match=rf"drafter\.{last}="):
        DrafterSection(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"algorithm": "eagle3"},
    ],
    ids=str,
)
def test_right_settings_are_taken(settings: dict[str, object]) -> None:
    section = DrafterSection(**settings)
    assert all(getattr(section, name) == value for name, value in settings.items())
