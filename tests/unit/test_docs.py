"""The documentation names only files, settings, targets and messages that exist."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import pytest

from tlt_megatron.cli import COMMANDS
from tlt_megatron.config.load import load_config
from tlt_megatron.config.schema import RunConfig

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", REPO / "tlt_megatron" / "README.md", REPO / "examples" / "README.md"]
PAGES += sorted((REPO / "docs").glob("*.md"))
SECTIONS = {field.name: field.default_factory for field in dataclasses.fields(RunConfig)}


@functools.cache
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def code(page: Path) -> list[str]:
    """What stands between backticks: blocks, then spans."""
    content = text(page)
    if page.name == "coming_from.md":  # the other columns hold names of other trainers
        content = re.sub(r"^(\|[^|]*\|).*", r"\1", content, flags=re.MULTILINE)
    blocks = re.findall(r"^```.*?^```", content, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", content, flags=re.MULTILINE | re.DOTALL)
    return blocks + re.findall(r"`([^`\n]+)`", rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_what_a_page_names_exists(page: Path) -> None:
    problems = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = (page.parent / file).resolve() if file else page
        if not linked.exists():
            problems.append(f"link {target}")
        elif anchor and anchor not in anchors(linked):
            problems.append(f"heading {target}")
    makefile = text(REPO / "Makefile")
    for part in code(page):
        for section, key in re.findall(r"(?<![\w./-])([a-z]+)\.([a-z_]+)(?=$|[=\s,`:;)\]])", part):
            is_file = key in ("py", "json", "jsonl", "yaml")
            if section in SECTIONS and not is_file and not hasattr(SECTIONS[section](), key):
                problems.append(f"setting {section}.{key}")
        for target in re.findall(r"\bmake ([a-z-]+)", part):
            if f"\n{target}:" not in makefile:
                problems.append(f"make {target}")
        for module in re.findall(r"python -m ((?:tools|tests|tlt_megatron)[\w.]*)", part):
            place = REPO / module.replace(".", "/")
            if not (place.is_dir() or place.with_suffix(".py").is_file()):
                problems.append(f"module {module}")
        for command in re.findall(r"(?:^|\n)tlt ([^#\n]*)", part):
            problems += unknown_words(command)
        for path in re.findall(
            r"(?<![\w./<-])((?:tools|launch|examples|tests|docker)/[\w./-]+\w)", part
        ):
            if not (REPO / path).exists():
                problems.append(f"file {path}")
    assert problems == []


def unknown_words(line: str) -> list[str]:
    """What a command line of `tlt`, without this word, has that its program does not know."""
    name, *words = line.replace("\\", "").split()
    if name.startswith("-"):
        return []
    if name not in COMMANDS:
        return [f"tlt {name}"]
    module = COMMANDS[name].module.replace(".", "/") or "tlt_megatron/cli"
    known = text(REPO / f"{module}.py")
    return [f"tlt {name} {w}" for w in words if w.startswith("--") and not has_option(known, w)]


def has_option(source: str, word: str) -> bool:
    return bool(re.search(rf"[\"' ]{word.partition('=')[0]}[\"' ,]", source))


def test_the_examples_of_the_command_line_have_known_options() -> None:
    lines = [command.example.removeprefix("tlt ") for command in COMMANDS.values()]
    assert [word for line in lines for word in unknown_words(line)] == []
    assert unknown_words("report runs/mine --no-such") == ["tlt report --no-such"]
    assert unknown_words("repotr runs/mine") == ["tlt repotr"]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    source = "".join(text(file) for file in (REPO / "tlt_megatron").rglob("*.py"))
    joined = re.sub(r"\"\s*f?\"", "", source)  # literals that Python joins
    messages = re.findall(
        r"^\| `([^`]+)` \|", text(REPO / "docs" / "troubleshooting.md"), re.MULTILINE
    )
    assert len(messages) >= 20
    parts = [part.strip() for message in messages for part in message.split("...")]
    missing = [part for part in parts if part and part not in joined]
    assert missing == []


def test_every_recipe_passes_the_checks_of_settings() -> None:
    page = text(REPO / "docs" / "algorithms.md").partition("## Recipes")[2]
    recipes = re.findall(r"^\| [^|`]+ \| `([^`]+)` \| `(\w+\.yaml)` \|", page, re.MULTILINE)
    files = sorted(file.name for file in (REPO / "examples" / "recipes").glob("*.yaml"))
    assert sorted(file for _, file in recipes) == files
    assert len(files) >= 9
    for settings, file in recipes:
        recipe = load_config(REPO / "examples" / "recipes" / file)
        assert recipe == load_config(None, settings.split()), file
