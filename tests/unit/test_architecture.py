"""Rules for the source: layers, where foreign packages may be named, forbidden calls, sizes,
assignments, plain English.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = {
    **dict.fromkeys(("saved_files", "stop_strings"), -1),
    **dict.fromkeys(("types", "config", "runtime", "version"), 0),
    **dict.fromkeys(("models", "speculation", "data", "rewards"), 1),
    **dict.fromkeys(("engines", "mcore", "drafter"), 2),
    **dict.fromkeys(("policy", "spot", "doctor"), 3),
    "rollout": 4,
    **dict.fromkeys(("trainer", "cli"), 5),
    "api": 6,
}
SAME_LAYER_ALLOWED = {("runtime", "types")}
TOP = ("launch", "tools", "examples", "tests")  # layer 7
PACKAGE = "tlt_megatron/"
_CUDA = tuple(PACKAGE + each for each in ("runtime/device.py", "mcore/", "engines/sglang/"))
# What may be named in these folders alone; tests may compare against foreign packages.
HOMES = {
    ("megatron",): (PACKAGE + "mcore/", "tests/"),
    ("sglang",): (PACKAGE + "engines/sglang/", "tests/"),
    ("torch.cuda",): (*_CUDA, *TOP),
    ("os.environ", "os.getenv", "os.putenv"): (PACKAGE + "runtime/", *TOP),
}
MAX_LINES = 400
MAX_PARAMETERS = 8  # a constructor's, without self
BANNED = re.compile(
    r"\b(one thing to know|whoever|for ever|muster\w*|calm\w*|doubt\w*|hiccups?|upkeep|news|(a|two) looks?)\b",
    re.I,
)
CODE = re.compile(r"`[^`\n]*`")  # names in docstrings are not language
# From Python 3.12 an f-string is several tokens.
TEXTS = {
    tokenize.COMMENT,
    tokenize.STRING,
    getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING),
}
TORCH_ATTRIBUTES = {"data", "grad"}  # a parameter's; torch has no other way to set them
# Folders that set attributes of foreign objects, with the reason.
FOREIGN_OBJECTS = {
    "tlt_megatron/engines/sglang/": "hooks replace results in SGLang's own records",
    "tools/gpu/pretend_cuda.py": "a pretended GPU replaces torch's events",
    "tlt_megatron/mcore/": "Megatron has no other way to set module specs, marks of parameters and its random state",
}


def imported_names(path: str, tree: ast.Module) -> Iterator[str]:
    """Dotted names of all imports: lazy, relative, for type checking, or by a literal
    `import_module("...")`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = list(Path(path).parts[: -node.level]) if node.level else []
            module = ".".join([*folder, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            yield from (str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant))


def check_layers(path: str, tree: ast.Module) -> list[str]:
    """Imports point to a lower layer or into the same package. Of the top layer, only tests import
    tests.
    """
    if path.startswith(("tools/", "launch/", "examples/")):
        names = map(str, imported_names(path, tree))
        return [f"imports {name}" for name in names if name.split(".")[0] == "tests"]
    if not path.startswith(PACKAGE) or path == PACKAGE + "__init__.py":
        return []
    own = Path(path).parts[1].removesuffix(".py")
    if own not in LAYERS:
        return [f"{own} has no layer"]
    found = []
    for name in imported_names(path, tree):
        top, *rest = str(name).split(".")
        if top in TOP:
            found.append(f"{own} imports {name} of a higher layer")
        if top != "tlt_megatron" or rest == ["__version__"]:
            continue
        other = rest[0] if rest else ""
        is_lower = other in LAYERS and LAYERS[other] < LAYERS[own]
        if not (is_lower or other == own or (own, other) in SAME_LAYER_ALLOWED):
            found.append(f"{own} imports {name}")
    return found


def check_homes(path: str, tree: ast.Module) -> list[str]:
    """Foreign packages, torch.cuda and the environment are named in the folders of `HOMES`
    alone.
    """
    return [
        mention
        for names, homes in HOMES.items()
        if not path.startswith(homes)
        for mention in _mentions(path, tree, names)
    ]


def check_calls(path: str, tree: ast.Module) -> list[str]:
    """The package neither prints, but for its two commands, nor unpickles. rewards/ may: between
    the run and its own worker processes; and the reader of checkpoints, which lets no class through
    but those of an index."""
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
            if called == "print" and path not in (PACKAGE + "doctor.py", PACKAGE + "cli.py"):
                found.append(f"line {node.lineno}: print()")
            if called == "torch.load" and options.get("weights_only") != "True":
                found.append(f"line {node.lineno}: torch.load() without weights_only=True")
    return found


def check_file(path: str, tree: ast.Module, num_lines: int | None = None) -> list[str]:
    """A file is named after what it holds, and has at most 400 lines."""
    found = []
    if Path(path).name in ("utils.py", "helpers.py", "common.py"):
        found.append("does not say what it holds")
    num_lines = num_lines if num_lines is not None else len((ROOT / path).read_text().splitlines())
    return [*found, f"has {num_lines} lines"] if num_lines > MAX_LINES else found


def check_constructors(path: str, tree: ast.Module) -> list[str]:
    """A constructor has at most 8 parameters."""
    found = []
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for method in owner.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                given = method.args
                count = len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1
                if count > MAX_PARAMETERS:
                    found.append(f"line {method.lineno}: {owner.name}() has {count} parameters")
    return found


def check_assignments(path: str, tree: ast.Module) -> list[str]:
    """An object is complete after construction: only its own methods set its attributes.

    Allowed are an object that the same function made by a call, and fields of a mutable dataclass
    of the same folder.
    """
    if path.startswith(("tests/", *FOREIGN_OBJECTS)):
        return []
    records = _mutable_fields(tree) | TORCH_ATTRIBUTES
    for sibling in _trees_of((ROOT / path).parent):
        records |= _mutable_fields(sibling)
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            continue
        nodes = list(_nodes_of(function))
        made = {
            target.id
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = ast.unparse(node.value)
                if owner not in {"self", "ctx", *made} and node.attr not in records:
                    found.append(f"line {node.lineno}: sets {ast.unparse(node)}")
    return found


def check_language(path: str, tree: ast.Module, text: str | None = None) -> list[str]:
    """Docstrings, comments, log lines and error texts are plain English."""
    if path == Path(__file__).relative_to(ROOT).as_posix():
        return []
    text = text if text is not None else (ROOT / path).read_text(encoding="utf-8")
    return [
        f"line {token.start[0] + token.string.count(chr(10), 0, match.start())}: {match.group()!r}"
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in TEXTS
        for match in BANNED.finditer(CODE.sub(lambda code: " " * len(code.group()), token.string))
    ]


def _nodes_of(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function or module, without those of the functions in it."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _nodes_of(node)


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _trees_of(folder: Path) -> list[ast.Module]:
    return [_parse(file) for file in sorted(folder.glob("*.py"))]


def _mutable_fields(tree: ast.Module) -> set[str]:
    """Names of the fields of dataclasses that are not frozen."""
    fields = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if "dataclass" in decorators and "frozen=True" not in decorators:
                fields |= {ast.unparse(f.target) for f in node.body if isinstance(f, ast.AnnAssign)}
    return fields


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
    check_homes,
    check_calls,
    check_constructors,
    check_assignments,
    check_language,
    check_file,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps_the_rule(rule: Callable[..., list[str]]) -> None:
    folders = ("tlt_megatron", *TOP)
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 10
    found = []
    for file in files:
        path = file.relative_to(ROOT).as_posix()
        found += [f"{path} {text}" for text in rule(path, _parse(file))]
    assert not found, "\n".join(found)


def _modules(*tops: str) -> dict[str, Path]:
    """Dotted name of every module below the folders `tops` -> its file."""
    files = [file for top in tops for file in sorted((ROOT / top).rglob("*.py"))]
    dotted = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}
    return {name.removesuffix(".__init__"): file for name, file in dotted.items()}


def find_circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, over any number of steps."""

    def reached_from(start: str) -> set[str]:
        reached, waiting = set(), [start]
        while waiting:
            new = imports[waiting.pop()] - reached
            reached |= new
            waiting += new
        return reached

    reached = {name: reached_from(name) for name in imports}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in imports
    }
    return [list(group) for group in sorted(groups) if group]


def test_no_modules_import_each_other() -> None:
    """Imports inside functions and for type checking count."""
    modules = _modules("tlt_megatron", "tools", "launch")
    imports: dict[str, set[str]] = {}
    for name, file in modules.items():
        imports[name] = set()
        for imported in map(str, imported_names(str(file.relative_to(ROOT)), _parse(file))):
            while imported and imported not in modules:
                imported = imported.rpartition(".")[0]
            if imported and imported != name:
                imports[name].add(imported)
    assert not find_circles(imports)


def test_circles_are_found() -> None:
    assert find_circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert find_circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_a_module_name_says_which_of_two_things_it_is() -> None:
    """A reader opens the wrong one of two modules with one name. A folder of its own says enough
    for `__main__`.
    """
    files = _modules("tlt_megatron", "tools").values()
    counts = Counter(file.name for file in files if not file.name.startswith("__"))
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize(
    "rule, path, source",
    [
        (check_layers, "models/a.py", "from tlt_megatron.policy.policy_loss import x"),
        (check_layers, "models/a.py", "def f():\n    import tlt_megatron.data.prompts"),
        (check_layers, "models/a.py", "from tlt_megatron import rewards"),
        (check_layers, "models/a.py", "from ..data import prompts"),
        (check_layers, "engines/a/b.py", "from ...mcore import model"),
        (check_layers, "runtime/a.py", "from tlt_megatron.config.schema import RunConfig"),
        (check_layers, "config/a.py", "from tlt_megatron.types import Prompt"),
        (check_layers, "types.py", "import tlt_megatron.runtime.rng"),
        (check_layers, "trainer/a.py", "import_module('launch.pretrain_rl')"),
        (check_layers, "extras/a.py", ""),
        (check_layers, "tools/a.py", "def f():\n    from tests.a import b"),
        (check_homes, "trainer/a.py", "def f():\n    from megatron.core import x"),
        (check_homes, "engines/embedded/a.py", "import sglang.srt"),
        (check_homes, "mcore/a.py", "import sglang"),
        (check_homes, "engines/embedded/a.py", "torch.cuda.synchronize()"),
        (check_homes, "runtime/rng.py", "from torch import cuda"),
        (check_homes, "mcore/a.py", "os.environ['A'] = '1'"),
        (check_homes, "policy/a.py", "from os import environ"),
        (check_homes, "config/a.py", "os.getenv('A')"),
        (check_calls, "trainer/a.py", "print(1)"),
        (check_calls, "data/a.py", "def f():\n    import pickle"),
        (check_calls, "mcore/a.py", "torch.load(path)"),
        (check_calls, "mcore/a.py", "torch.load(path, weights_only=False)"),
        (
            check_constructors,
            "a.py",
            "class A:\n    def __init__(self, a, b, c, d, e, f, *, g, h, i): ...",
        ),
        (check_assignments, "trainer/a.py", "def f(self):\n    self.engine.version = 1"),
        (check_assignments, "trainer/a.py", "def f(engine):\n    engine.version += 1"),
        (
            check_assignments,
            "trainer/a.py",
            "class A:\n    def f(self):\n        a = self.a\n        a.b = 1",
        ),
    ],
)
def test_rule_catches_a_violation(rule: Callable[..., list[str]], path: str, source: str) -> None:
    path = path if path.startswith("tools/") else PACKAGE + path
    assert len(rule(path, ast.parse(source))) == 1


@pytest.mark.parametrize("name, num_lines", [("utils.py", 1), ("loop.py", 401)])
def test_rule_catches_a_bad_file(name: str, num_lines: int) -> None:
    assert len(check_file(PACKAGE + name, ast.parse(""), num_lines)) == 1
    assert check_file(PACKAGE + "loop.py", ast.parse(""), 400) == []


@pytest.mark.parametrize(
    "text", ["# One thing to know: x", "def f():\n    'Keep calm.'", "log.info(f'{x}: no doubt')"]
)
def test_rule_catches_a_banned_phrase(text: str) -> None:
    assert len(check_language(PACKAGE + "a.py", ast.parse(text), text)) == 1
    assert check_language(PACKAGE + "a.py", ast.parse(""), "upkeep = 1  # newsletter") == []
