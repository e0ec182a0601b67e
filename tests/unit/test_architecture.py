"""The rules of the house, read off the source: layers, where foreign packages may be named, sizes, forbidden calls."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = {
    **dict.fromkeys(("types", "config", "runtime"), 0),
    **dict.fromkeys(("models", "speculation", "data", "rewards"), 1),
    **dict.fromkeys(("engines", "mcore", "drafter"), 2),
    **dict.fromkeys(("policy", "spot"), 3),
    **dict.fromkeys(("trainer", "doctor"), 4),
}
SAME_LAYER_ALLOWED = {("runtime", "types")}
TOP = ("launch", "tools", "examples", "tests")  # layer 5
PACKAGE = "tlt_megatron/"
MAX_LINES = 500


def imported_names(path: str, tree: ast.Module) -> Iterator[str]:
    """Dotted names of all imports: lazy, relative, for type checking, or by a literal `import_module("...")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = list(Path(path).parts[: -node.level]) if node.level else []
            module = ".".join([*folder, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant))


def check_layers(path: str, tree: ast.Module) -> list[str]:
    """Imports point to a lower layer or into the same package."""
    if not path.startswith(PACKAGE) or path == PACKAGE + "__init__.py":
        return []
    own = Path(path).parts[1].removesuffix(".py")
    if own not in LAYERS:
        return [f"{own} has no layer"]
    found = []
    for name in imported_names(path, tree):
        top, *rest = str(name).split(".")
        if top in TOP:
            found.append(f"{own} imports {name} of layer 5")
        if top != "tlt_megatron":
            continue
        other = rest[0] if rest else ""
        is_lower = other in LAYERS and LAYERS[other] < LAYERS[own]
        if not (is_lower or other == own or (own, other) in SAME_LAYER_ALLOWED):
            found.append(f"{own} imports {name}")
    return found


def check_foreign_packages(path: str, tree: ast.Module) -> list[str]:
    """megatron in mcore/ alone, sglang in engines/sglang/ alone; tests may compare against them."""
    homes = {"megatron": PACKAGE + "mcore/", "sglang": PACKAGE + "engines/sglang/"}
    tops = {str(name).split(".")[0] for name in imported_names(path, tree)}
    return [
        f"imports {package}, which belongs in {home}"
        for package, home in homes.items()
        if package in tops and not path.startswith((home, "tests/"))
    ]


def check_torch_cuda(path: str, tree: ast.Module) -> list[str]:
    """torch.cuda is named in runtime/device.py, mcore/ and engines/sglang/ alone."""
    homes = ("runtime/device.py", "mcore/", "engines/sglang/")
    if not path.startswith(PACKAGE) or path.removeprefix(PACKAGE).startswith(homes):
        return []
    return _mentions(path, tree, ("torch.cuda",))


def check_environ(path: str, tree: ast.Module) -> list[str]:
    """The environment is read and written in runtime/ and layer 5 alone."""
    if not path.startswith(PACKAGE) or path.startswith(PACKAGE + "runtime/"):
        return []
    return _mentions(path, tree, ("os.environ", "os.getenv", "os.putenv"))


def check_calls(path: str, tree: ast.Module) -> list[str]:
    """The package neither prints, but for the doctor, nor unpickles. rewards/ may: between the run and its own worker processes; and the
    reader of checkpoints, which lets no class through but those of an index."""
    if not path.startswith(PACKAGE):
        return []
    found = [
        f"imports {name}"
        for name in imported_names(path, tree)
        if str(name).split(".")[0] in ("pickle", "dill", "cloudpickle")
        and not path.startswith((PACKAGE + "rewards/", PACKAGE + "mcore/checkpoint_reader.py"))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            options = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if called == "print" and path != PACKAGE + "doctor.py":
                found.append(f"line {node.lineno}: print()")
            if called == "torch.load" and options.get("weights_only") != "True":
                found.append(f"line {node.lineno}: torch.load() without weights_only=True")
    return found


def check_file(path: str, tree: ast.Module, num_lines: int | None = None) -> list[str]:
    """A file is named after what it holds, and has at most 500 lines."""
    found = []
    if Path(path).name in ("utils.py", "helpers.py", "common.py"):
        found.append("does not say what it holds")
    num_lines = num_lines if num_lines is not None else len((ROOT / path).read_text().splitlines())
    return [*found, f"has {num_lines} lines"] if num_lines > MAX_LINES else found


def _mentions(path: str, tree: ast.Module, names: tuple[str, ...]) -> list[str]:
    """Where one of the dotted `names` is imported, or imported from, or written out."""
    found = [
        f"imports {imported}"
        for imported in map(str, imported_names(path, tree))
        if any(f"{imported}.".startswith(f"{name}.") for name in names)
    ]
    dotted = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return found + [f"line {n.lineno}: {ast.unparse(n)}" for n in dotted if ast.unparse(n) in names]


RULES = (
    check_layers,
    check_foreign_packages,
    check_torch_cuda,
    check_environ,
    check_calls,
    check_file,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps_the_rule(rule: Callable[..., list[str]]) -> None:
    folders = ("tlt_megatron", *TOP)
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 10
    violations = []
    for file in files:
        path = file.relative_to(ROOT).as_posix()
        violations += [
            f"{path} {text}" for text in rule(path, ast.parse(file.read_text(encoding="utf-8")))
        ]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(
    "rule, path, source",
    [
        (check_layers, "models/a.py", "from tlt_megatron.policy.loss import x"),
        (check_layers, "models/a.py", "def f():\n    import tlt_megatron.data.prompts"),
        (check_layers, "models/a.py", "from tlt_megatron import rewards"),
        (check_layers, "models/a.py", "from ..data import prompts"),
        (check_layers, "engines/a/b.py", "from ...mcore import model"),
        (check_layers, "runtime/a.py", "from tlt_megatron.config.schema import RunConfig"),
        (check_layers, "config/a.py", "from tlt_megatron.types import Prompt"),
        (check_layers, "types.py", "import tlt_megatron.runtime.rng"),
        (check_layers, "trainer/a.py", "import_module('launch.pretrain_rl')"),
        (check_layers, "extras/a.py", ""),
        (check_foreign_packages, "trainer/a.py", "def f():\n    from megatron.core import x"),
        (check_foreign_packages, "engines/embedded/a.py", "import sglang.srt"),
        (check_foreign_packages, "mcore/a.py", "import sglang"),
        (check_torch_cuda, "engines/embedded/a.py", "torch.cuda.synchronize()"),
        (check_torch_cuda, "runtime/rng.py", "from torch import cuda"),
        (check_environ, "mcore/a.py", "os.environ['A'] = '1'"),
        (check_environ, "policy/a.py", "from os import environ"),
        (check_environ, "config/a.py", "os.getenv('A')"),
        (check_calls, "trainer/a.py", "print(1)"),
        (check_calls, "data/a.py", "def f():\n    import pickle"),
        (check_calls, "mcore/a.py", "torch.load(path)"),
        (check_calls, "mcore/a.py", "torch.load(path, weights_only=False)"),
    ],
)
def test_rule_catches_a_violation(rule: Callable[..., list[str]], path: str, source: str) -> None:
    assert len(rule(PACKAGE + path, ast.parse(source))) == 1


@pytest.mark.parametrize(
    "path, source",
    [
        ("engines/a/b.py", "from ..base import x\nfrom tlt_megatron.models.config import y"),
        ("runtime/a.py", "import os\nfrom tlt_megatron.types import Prompt\nos.environ['A']"),
        ("runtime/device.py", "import torch\ntorch.cuda.is_available()"),
        ("mcore/a.py", "import megatron.core\ntorch.cuda.synchronize()"),
        ("engines/sglang/a.py", "import sglang\ntorch.cuda.synchronize()"),
        ("trainer/a.py", "torch.load(path, weights_only=True)\nlog.info('print()')"),
    ],
)
def test_rules_allow_what_is_allowed(path: str, source: str) -> None:
    for rule in RULES[:-1]:
        assert rule(PACKAGE + path, ast.parse(source)) == []


@pytest.mark.parametrize("name, num_lines", [("utils.py", 1), ("loop.py", 501)])
def test_rule_catches_a_bad_file(name: str, num_lines: int) -> None:
    assert len(check_file(PACKAGE + name, ast.parse(""), num_lines)) == 1
    assert check_file(PACKAGE + "loop.py", ast.parse(""), 500) == []
