"""The documentation names only files, settings, targets and messages that exist."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.documented_metrics import METRICS, PAGE, rows
from tlt_megatron.cli import COMMANDS, help_of
from tlt_megatron.config.load import load_config
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.version import __version__
from tools.bench.__main__ import _parse

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", REPO / "tlt_megatron" / "README.md", REPO / "examples" / "README.md"]
PAGES += [REPO / "CONTRIBUTING.md", REPO / "CHANGELOG.md", *sorted((REPO / "docs").glob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PROGRAMS = {"make", "python", "tlt", "pip", ".", "build/try/bin/pip", "build/try/bin/tlt"}
PROGRAMS |= {".venv/bin/python", "git", "docker", "mkdir", "sbatch"}
SECTIONS = {f.name: type(getattr(RunConfig(), f.name)) for f in dataclasses.fields(RunConfig)}


@functools.cache
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@functools.cache
def site_pages() -> ModuleType:
    """The hook of the documentation site."""
    spec = importlib.util.spec_from_file_location("site_pages", REPO / "docs" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_code_blocks_can_be_read(page: Path) -> None:
    assert [wrong for block in BLOCK.findall(text(page)) if (wrong := wrong_in(*block[1:]))] == []


def wrong_in(language: str, block: str) -> str:
    """What is wrong with a code block, or nothing."""
    block = textwrap.dedent(block)
    if language == "bash":
        lines = block.replace("\\\n", " ").splitlines()
        return "; ".join(filter(None, map(wrong_in_command, lines)))
    if language == "python":
        compile(block, "block", "exec")
    elif language == "json":
        for line in block.splitlines():
            json.loads(line)
    elif language == "yaml":
        sections = yaml.safe_load(block).items()
        try:
            load_config(None, [f"{name}={yaml.safe_dump(keys)}" for name, keys in sections])
        except ValueError as error:
            return str(error)
    elif language not in ("text", "bibtex"):
        return f"a block in {language!r}: say bash, yaml, python, json or text"
    return ""


def wrong_in_command(line: str) -> str:
    """What is wrong with a line of a shell: its program, or an option of a program of this
    repository.
    """
    words = shlex.split(line, comments=True)
    if not words:
        return ""
    program, *rest = words
    if program not in PROGRAMS:
        return f"{program} is no known program"
    if not program.endswith("python") or not rest or rest[:2] == ["-m", "pytest"]:
        return ""
    scripts = [word for word in rest if word.endswith(".py")]
    if rest[0] == "-m":
        scripts = [f"{rest[1].replace('.', '/')}.py"]
    sources = [text(REPO / script) for script in scripts if (REPO / script).is_file()]
    if scripts and not sources and rest[0] != "-m":
        return f"{scripts[0]}: no such file"
    if not sources or "launch/torchrun.py" in scripts:  # it takes the options of torchrun
        return ""
    options = [word for word in rest if word.startswith("--")]
    return " ".join(word for word in options if not any(has_option(s, word) for s in sources))


def test_what_is_wrong_with_a_block_is_found() -> None:
    assert wrong_in("bash", "tlt report runs/mine  # a comment\n") == ""
    assert wrong_in("bash", "tl report runs/mine\n") == "tl is no known program"
    assert wrong_in("bash", "python docs/pictur.py\n") == "docs/pictur.py: no such file"
    assert wrong_in("bash", "python -m tools.commands.report x \\\n  --ot y\n") == "--ot"
    assert wrong_in("yaml", "run:\n  num_stps: 1\n").startswith("run.num_stps=1: unknown key")
    assert wrong_in("yaml", "run:\n  num_steps: -1\n") == "run.num_steps=-1: must be >= 0"
    assert wrong_in("", "x").startswith("a block in ''")
    with pytest.raises(SyntaxError):
        wrong_in("python", "def f(:\n")


def test_the_navigation_of_the_site_names_every_page() -> None:
    navigation = yaml.safe_load(text(REPO / "mkdocs.yml").replace("!ENV", ""))["nav"]
    named = [
        page
        for entry in navigation
        for value in entry.values()
        for page in ([value] if isinstance(value, str) else [p for e in value for p in e.values()])
    ]
    written = {path.name for path in (REPO / "docs").glob("*.md")}
    assert sorted(named) == sorted(written | set(site_pages().pages()))


def test_links_of_the_repository_become_links_of_the_site() -> None:
    resolve = site_pages().resolve_links
    for link, page, expected in (
        ("[a](docs/guide.md#2-data)", "index.md", "[a](guide.md#2-data)"),
        ("[map](../tlt_megatron/README.md)", "guide.md", "[map](architecture.md)"),
        ("[keys](../tlt_megatron/config/schema.py)", "guide.md", "[keys](configuration.md)"),
        ("[x.py](../examples/custom_reward.py)", "guide.md", "`examples/custom_reward.py`"),
        ("[a](no_such.md)", "guide.md", "[a](no_such.md)"),
        ('<img src="docs/report.png">', "index.md", '<img src="report.png">'),
        (
            '<img alt="a" src="figures/pass.svg">',
            "guide.md",
            '<img alt="a" src="figures/pass.svg">',
        ),
        ("[a](https://arxiv.org)", "guide.md", "[a](https://arxiv.org)"),
    ):
        assert resolve(link, page) == expected


def test_a_page_of_the_site_that_names_an_absent_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "here.svg").touch()
    (tmp_path / "a" / "page.html").write_text(
        '<picture><source srcset="../gone.svg"><img src="../here.svg"></picture><a href=../no.html#x>'
        '<a href=\'https://arxiv.org\'><a href="#top"><link href="../here.svg?v=1">'
        "<script>x = \"<img src='never.svg'>\"</script>"
    )
    found = site_pages().missing_files(tmp_path)
    assert found == ["a/page.html: ../gone.svg", "a/page.html: ../no.html"]


def test_blocks_of_the_first_pages_fit_the_page_of_a_laptop() -> None:
    """At 1280 px a block of the site has 80 characters a line, 108 without a table of contents."""
    first = (
        "README.md",
        *(f"docs/{name}.md" for name in ("install", "first_run", "guide", "serve")),
    )
    for page, most in (*((page, 80) for page in first), ("tlt_megatron/README.md", 108)):
        blocks = [block for _, _, block in BLOCK.findall(text(REPO / page))]
        wide = [line for block in blocks for line in block.splitlines() if len(line) > most]
        assert wide == []


def test_the_switch_of_the_theme_chooses_a_picture_of_the_site() -> None:
    shown = site_pages().resolve_links(text(REPO / "README.md"), "index.md")
    assert "<picture>" not in shown
    assert 'src="figures/tail_light.svg#only-light">' in shown
    assert 'src="figures/tail_dark.svg#only-dark">' in shown


def test_the_configuration_page_explains_every_setting() -> None:
    page = site_pages().configuration()
    rows = dict(re.findall(r"^\| `([a-z_]+\.[a-z_0-9]+)` \|(.*)\|$", page, re.MULTILINE))
    keys = {f"{s}.{f.name}" for s, kind in SECTIONS.items() for f in dataclasses.fields(kind)}
    assert set(rows) == keys
    assert [key for key, row in rows.items() if not row.rpartition(" | ")[2].strip()] == []
    assert "one of auto, cpu, cuda" in rows["run.device"]
    assert "`1800.0`" in rows["run.group_timeout_s"]


def test_every_place_names_the_same_version() -> None:
    for file in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md", "docs/releasing.md"):
        assert __version__ in text(REPO / file), file


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_metrics_that_a_page_names_are_on_the_page_of_metrics(page: Path) -> None:
    groups = {name.partition("/")[0] for name in METRICS if "/" in name}
    named = [part for part in code(page) if re.fullmatch(r"[a-z_-]+(/[\w@*]+)+", part)]
    named = [name for name in named if name.partition("/")[0] in groups]
    assert [n for n in named if not any(fnmatch(n, m) or fnmatch(m, n) for m in METRICS)] == []


def test_the_page_of_metrics_has_every_metric_once_and_explains_it() -> None:
    assert len(set(METRICS)) == len(METRICS) > 130
    assert [names for names, unit, meaning in rows() if not unit and not meaning] == []
    settings = re.findall(r"`([a-z]+)\.([a-z_]+)", text(PAGE))
    assert [
        f"{s}.{k}" for s, k in settings if s in SECTIONS and not hasattr(SECTIONS[s](), k)
    ] == []


def literals(tree: ast.AST) -> Iterator[str]:
    """The texts of a program; * stands for what an f-string computes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "*" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_metrics_that_are_explained_are_those_that_are_made() -> None:
    files = (REPO / "tlt_megatron").rglob("*.py")
    made = {literal for file in files for literal in literals(ast.parse(text(file)))}
    groups = {name.partition("/")[0] for name in METRICS if "/" in name}
    named = [each for each in made if re.fullmatch(r"[a-z_-]+(/[\w*@]+)+", each)]
    named = [each for each in named if each.partition("/")[0] in groups]
    assert len(named) > 100

    def is_explained(each: str) -> bool:
        """It may be the beginning of names, such as "critic/score"."""
        return any(
            fnmatch(each, m) or fnmatch(m, each) or m.startswith(f"{each}/") for m in METRICS
        )

    assert [each for each in named if not is_explained(each)] == []

    def is_made(name: str) -> bool:
        """Some names are put together: of "critic/score" and "*/mean", or of "actor/*" and
        "ppo_kl".
        """
        head, _, tail = name.rpartition("/")
        is_joined = {head, f"*/{tail}"} <= made or {f"{head}/*", tail} <= made
        return is_joined or any(fnmatch(name, p) for p in made if "/" in p.strip("*/"))

    names = [name.replace("eval/*/", "eval/") for name in METRICS if "/" in name]
    assert [name for name in names if not is_made(name)] == []
    assert not is_made("rollout/no_such_metric")
    assert not is_made("actor/no_such_metric")


def unknown_words(line: str) -> list[str]:
    """What a command line of `tlt`, without this word, has that its program does not know."""
    name, *words = line.replace("\\", "").split()
    if name.startswith("-"):
        return []
    if name not in COMMANDS:
        return [f"tlt {name}"]
    module = COMMANDS[name].replace(".", "/")
    known = text(REPO / f"{module}.py")
    return [f"tlt {name} {w}" for w in words if w.startswith("--") and not has_option(known, w)]


def has_option(source: str, word: str) -> bool:
    return bool(re.search(rf"[\"' ]{word.partition('=')[0]}[\"' ,]", source))


def test_the_examples_of_the_command_line_have_known_options() -> None:
    lines = [help_of(name).example.removeprefix("tlt ") for name in COMMANDS]
    assert [word for line in lines for word in unknown_words(line)] == []
    assert unknown_words("report runs/mine --no-such") == ["tlt report --no-such"]
    assert unknown_words("repotr runs/mine") == ["tlt repotr"]


def test_the_benchmarks_of_the_pages_have_known_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = "".join(text(page) for page in PAGES).replace("\\\n", " ")
    lines = re.findall(r"python -m tools\.bench ([a-z][^`\n#]+)", pages)
    assert len(lines) >= 8
    monkeypatch.chdir(tmp_path)  # where the models exist that `make` would make
    for name in ("tiny_policy", "tiny_drafter", "quickstart_policy", "smollm2"):
        (tmp_path / "build" / name).mkdir(parents=True)
        (tmp_path / "build" / name / "config.json").touch()
    for line in lines:
        name, *words = shlex.split(line)
        options = _parse(name, importlib.import_module(f"tools.bench.{name}"), words)
        assert all("=" in word for word in getattr(options, "overrides", [])), line


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


def test_the_page_of_files_names_every_file_and_says_what_it_holds() -> None:
    page = site_pages().files()
    for file in (REPO / "tlt_megatron").rglob("*.py"):
        if file.name != "__init__.py":
            assert re.search(rf"^\| `{file.name}` \| \S.{{8,}} \|$", page, re.M), file


# Habits of phrasing, the most per 1,000 words. Public docs of the field have 0.8, 0.1 and 4.7.
HABITS = {r"\bwhat\b": 1.5, r"\b(that|those) of\b": 0.2, ";": 4.0}


def test_pages_name_things_and_make_short_sentences() -> None:
    pages = [page for page in PAGES if page.parent in (REPO, REPO / "tlt_megatron", REPO / "docs")]
    prose = re.sub(r"```.*?```", "", "\n".join(map(text, pages)), flags=re.S)
    prose = re.sub(r"^\s*\|.*$", "", re.sub(r"`[^`]*`", "X", prose), flags=re.M)
    num_words = len(re.findall(r"[A-Za-z']+", prose))
    for habit, most in HABITS.items():
        assert 1000 * len(re.findall(habit, prose, re.I)) / num_words <= most, habit
