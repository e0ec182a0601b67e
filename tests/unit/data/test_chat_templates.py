"""The forms of a chat template, and what a run writes into the one that it exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.unit.data.conftest import MESSAGES
from tlt_megatron.data.tokenizer import load_tokenizer
from tlt_megatron.models.hf_io import save_hf_model


def test_a_template_that_writes_the_date_writes_the_given_one(folder: Path) -> None:
    """Llama 3.2 and Mistral Small do so."""
    (folder / "chat_template.jinja").write_text(
        "\n{%- if strftime_now is defined %}{% set date = strftime_now('%d %b %Y, %H:%M') %}{% endif %}"
        "{% for m in messages %}{{ strftime_now('%Y-%m-%d') }} {% endfor %}{{ date }}!{{ strftime_now('%h %-d, %R, %G-W%V') }}"
    )
    text = load_tokenizer(folder, "2024-07-26").render(MESSAGES)
    assert text == "2024-07-26 2024-07-26 26 Jul 2024, 00:00!Jul 26, 00:00, 2024-W30"
    assert load_tokenizer(folder).render(MESSAGES) != text


def test_pinned_arguments_are_defaults_of_each_template(folder: Path) -> None:
    """A model may have a template of its own for tools."""
    names = {
        "default": "\n {{ a }}{{ messages[0].content }}",
        "tool_use": "{{ tools[0].n }}{{ b.x }}{{ a }}",
    }
    tokenizer = load_tokenizer(folder)
    tokenizer.hf.chat_template = names  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pin_template(folder, {"a": "'\u20ac%}\n", "b": {"x": None}, "if": 1})
    pinned = load_tokenizer(folder)
    assert pinned.render(MESSAGES) == "\n '\u20ac%}\nbe brief"
    assert pinned.render(MESSAGES, {"tools": [{"n": 1}], "a": 3}) == "1None3"


@pytest.mark.parametrize("form", ["files", "a list", "no default", "of a processor"])
def test_each_form_of_a_chat_template_is_read_and_kept_or_refused(
    form: str, folder: Path, tmp_path: Path
) -> None:
    names = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].n }}"}
    (folder / "chat_template.jinja").unlink()
    if form == "files":
        (folder / "chat_template.jinja").write_text(names["default"])
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(names["tool_use"])
    elif form == "of a processor":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": names["default"]}))
    else:
        file, first = folder / "tokenizer_config.json", form == "no default"
        listed = [{"name": n, "template": t} for n, t in names.items()][first:]
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": listed}))
    exported = tmp_path / "exported"
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_hf_model(exported, [("a", torch.zeros(1))], folder, dtype=torch.float32)
    for loaded in (load_tokenizer(folder), load_tokenizer(exported, "2024-07-26")):
        if form in ("files", "a list"):
            assert loaded.render(MESSAGES) == "be brief"
        else:
            with pytest.raises(ValueError, match=r"default|, not chat_template\.json"):
                loaded.render(MESSAGES)
        if form != "of a processor":
            assert loaded.render(MESSAGES, {"tools": [{"n": 1}]}) == "1"
