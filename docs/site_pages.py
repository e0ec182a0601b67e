"""Hook of mkdocs.yml: pages that stand elsewhere in the repository, and references that are
generated from the code.

Links in the repository name files, so that they work where the files are read. `resolve_links`
turns them into links between pages. A link to a file that is no page becomes the file's name. A
link to no file stays, and `mkdocs build --strict` refuses it.
"""

from __future__ import annotations

import ast
import dataclasses
import html
import os
import re
import sys
import typing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_megatron.cli import COMMANDS, help_of
from tlt_megatron.config.schema import RunConfig
from tools.commands.print_schema import comments_of

REPO = Path(__file__).resolve().parent.parent
INCLUDED = {
    "index.md": "README.md",
    "architecture.md": "tlt_megatron/README.md",
    "examples.md": "examples/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
GENERATED = {
    "configuration.md": "tlt_megatron/config/schema.py",
    "commands.md": "tlt_megatron/cli.py",
    "files.md": "tlt_megatron/__init__.py",
}
PAGE_OF = {file: page for page, file in (INCLUDED | GENERATED).items()}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_HTML_LINK = re.compile(r"\b(src|srcset|href)=\"([^\"#:\s]+)\"")
_PICTURE = re.compile(
    r"<picture>\s*<source [^>]*srcset=\"([^\"]+)\">\s*(<img [^>]*src=\")([^\"]+)\">\s*</picture>"
)
_BUILT_LINK = re.compile(
    r"<[a-z][^<>]*?\s(?:src|srcset|href)=(\"[^\"\s][^\"]*\"|'[^'\s][^']*'|[^\s\"'<>]+)"
)
_SHIM = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
_LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]* (?:src|href)=\"?https?:[^>]*>")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that do not stand in docs/."""
    from mkdocs.structure.files import File

    for page, text in pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page with links between pages."""
    return resolve_links(markdown, page.file.src_uri)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that loads a file from another host. What the offline search would load is
    replaced by docs/file_worker.js.
    """
    from mkdocs.exceptions import PluginError

    script = (REPO / "docs" / "file_worker.js").read_text(encoding="utf-8")
    output = output.replace(_SHIM, f"<script>{script}</script>")
    if loaded := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads {loaded.group()}: must load local files only")
    return output


def on_post_build(config: Any, **_: Any) -> None:
    """Refuse a site whose pages name files that it does not have, in raw HTML too."""
    from mkdocs.exceptions import PluginError

    if missing := missing_files(Path(config.site_dir)):
        raise PluginError(f"the built site lacks files that it names: {', '.join(missing)}")


def pages() -> dict[str, str]:
    """Return the text of every page that does not stand in docs/, by its name there."""
    included = {page: (REPO / file).read_text(encoding="utf-8") for page, file in INCLUDED.items()}
    made = {"configuration.md": configuration(), "commands.md": commands(), "files.md": files()}
    # Its figure is as wide as the page is without a table of contents.
    included["architecture.md"] = f"---\nhide: [toc]\n---\n\n{included['architecture.md']}"
    return included | made


def resolve_links(markdown: str, page: str) -> str:
    """Return `markdown` of the page `page` of docs/ with links to files of the repository as links
    to pages.
    """
    origin = (REPO / INCLUDED.get(page, f"docs/{page}")).parent

    def name_of(file: str) -> str:
        """Return the file's name in the repository; "" for none."""
        path = Path(os.path.normpath(origin / file))
        is_ours = bool(file) and path.exists() and path.is_relative_to(REPO)
        return path.relative_to(REPO).as_posix() if is_ours else ""

    def resolve(link: re.Match[str]) -> str:
        text, target = link.groups()
        file, hash_mark, anchor = target.partition("#")
        name = name_of(file)
        if not name:
            return link.group()
        if name not in PAGE_OF and not name.startswith("docs/"):
            return f"`{name}`" if "/" in text or "." in text else f"{text} (`{name}`)"
        return f"[{text}]({PAGE_OF.get(name, name.removeprefix('docs/'))}{hash_mark}{anchor})"

    def resolve_html(found: re.Match[str]) -> str:
        key, target = found.groups()
        return f'{key}="{(name_of(target) or target).removeprefix("docs/")}"'

    text = _HTML_LINK.sub(resolve_html, _LINK.sub(resolve, markdown))
    # The site's own switch of the theme decides, not the system's.
    return _PICTURE.sub(r'\2\3#only-light">\2\1#only-dark">', text)


def missing_files(site: Path) -> list[str]:
    """Return the images, scripts, styles and links of the built pages that name no file of the
    site.
    """
    found = []
    for page in sorted(site.rglob("*.html")):
        text = re.sub(r"<script\b.*?</script>", "", page.read_text(encoding="utf-8"), flags=re.S)
        for target in _BUILT_LINK.findall(text):
            target = html.unescape(
                target.strip("\"'").split()[0].partition("#")[0].partition("?")[0]
            )
            is_local = target and not re.match(r"[a-z]+:|//", target)
            # The page of an unknown address has links from the root, where the site may not stand.
            folder = site if target.startswith("/") else page.parent
            path = folder / target.lstrip("/")
            if is_local and page.name != "404.html" and not path.exists():
                found.append(f"{page.relative_to(site)}: {target}")
    return found


def commands() -> str:
    """Return the page of the command `tlt`."""
    helps = {name: help_of(name) for name in COMMANDS}
    rows = [f"| `tlt {name}` | {c.summary} | `{c.example}` |" for name, c in helps.items()]
    head = "# Commands\n\n`tlt COMMAND --help` prints all options.\n\n| command | what it does | example |\n|---|---|---|"
    return "\n".join([head, *rows, ""])


def files() -> str:
    """Return the page of all source files: the first sentence of each docstring, by folder."""
    parts = ["# Every file", "The first sentence of each file, generated from the source."]
    for top in ("tlt_megatron", "launch", "tools"):
        folders = sorted({path.parent for path in (REPO / top).rglob("*.py")})
        for folder in folders:
            rows = ["| file | what it holds |", "|---|---|"]
            for path in sorted(folder.glob("*.py")):
                about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
                first = re.split(r"(?<=[.!?])\s", about.partition("\n\n")[0], maxsplit=1)[0]
                if path.name != "__init__.py":
                    rows.append(f"| `{path.name}` | {_cell(' '.join(first.split()))} |")
            if len(rows) > 2:
                parts += [f"## {folder.relative_to(REPO).as_posix()}", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def configuration() -> str:
    """Return the page of all settings: key, allowed values, default, and the comment in the
    source.
    """
    parts = [
        "# Configuration",
        "Every setting of a run, generated from `config/schema.py`. Set it as `section.key=value`.",
    ]
    for section in dataclasses.fields(RunConfig):
        kind = typing.cast(type, section.default_factory)
        comments = dict(comments_of(kind))
        hints = typing.get_type_hints(kind, include_extras=True)
        parts += [f"## {section.name}", (kind.__doc__ or "").replace("\n    ", "\n")]
        rows = ["| setting | values | default | what it is |", "|---|---|---|---|"]
        for field in dataclasses.fields(kind):
            default = getattr(kind(), field.name)
            cells = (f"`{section.name}.{field.name}`", _values(hints[field.name]), f"`{default!r}`")
            rows.append(" | ".join(["", *cells, _cell(comments[field.name]), ""]).strip())
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _values(hint: Any) -> str:
    """Return the type of a field and its range in words."""
    ranges = [item.allowed for item in getattr(hint, "__metadata__", ())]
    base = getattr(hint, "__origin__", hint) if ranges else hint
    name = base.__name__ if isinstance(base, type) and not typing.get_args(base) else str(base)
    name = name.replace("typing.", "")
    return _cell(", ".join([name, *ranges]))


def _cell(text: str) -> str:
    """Return `text` for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")
