"""Functions of a script, as `Trainer(reward=...)` gives them to a reward worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_task import python

# Each defines `f`, which must return what it returns here. Values change after it is taken.
KINDS = {
    "a global of inf": "LIMIT = float('inf')\ndef f(**_): return 1.0 if LIMIT > 9 else 0.0",
    "a global of nan": "LIMIT = float('nan')\ndef f(**_): return float(LIMIT != LIMIT)",
    "NumPy": "import numpy as np\nX, Y = np.float64(0.5), np.arange(3)\ndef f(**_): return X + Y[2]",
    "Counter": "from collections import Counter\nC = Counter('aab')\ndef f(**_): return C['a']",
    "defaultdict": "from collections import defaultdict\nD = defaultdict(int)\ndef f(**_): return D['x'] + 1",
    "enum": "import enum\nclass E(enum.IntEnum):\n    A = 3\ndef f(**_): return int(E.A)",
    "namedtuple": "from collections import namedtuple\nP = namedtuple('P', 'x')\nQ = P(2)\ndef f(**_): return Q.x",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: float\ndef f(**_): return A(2).x",
    "attribute": "def f(**_): return f.weight\nf.weight = 4",
    "staticmethod": "class A:\n    @staticmethod\n    def g(**_): return 5\nf = A.g",
    "staticmethod itself": "class A:\n    @staticmethod\n    def g(**_): return 5\nf = A.__dict__['g']",
    "classmethod": "class A:\n    x = 6\n    @classmethod\n    def g(cls, **_): return cls.x\nf = A.g",
    "default": "N = 1\ndef f(n=N, **_): return n",
    "keyword default": "N = [1]\ndef f(*, n=tuple(N), **_): return n[0]",
    "closure": "def make(x):\n    def g(**_): return x\n    return g\nf = make(7)",
    "lambda": "f = lambda **_: 8",
    "partial": "import functools\ndef g(w, **_): return w\nf = functools.partial(g, 9)",
    "object": "class A:\n    def __init__(self): self.x = 10\n    def __call__(self, **_): return self.x\nf = A()",
    "bound method": "class A:\n    x = 11\n    def g(self, **_): return self.x\nf = A().g",
    "async": "async def f(**_): return 12",
    "async object": "class A:\n    async def __call__(self, **_): return 13\nf = A()",
    "recursion": "def f(n=3, **_): return n if n > 5 else f(n + 1)",
    "two functions": "def g(n): return n and h(n - 1) + 1\ndef h(n): return n and g(n - 1) + 1\ndef f(**_): return g(4)",
    "pattern": "import re\nP = re.compile('a+')\ndef f(**_): return len(P.findall('aabaa'))",
    "decorated": "import functools\ndef d(g):\n    @functools.wraps(g)\n    def w(**k): return g(**k) + 1\n    return w\n@d\ndef f(**_): return 1",
    "cached": "import functools\n@functools.lru_cache\ndef g(x): return x\ndef f(**_): return g(2)",
    "Fraction": "from fractions import Fraction\nX = Fraction(1, 2)\ndef f(**_): return float(X)",
    "set of tuples": "S = {(1, 2), (3, 4)}\ndef f(**_): return len(S)",
    "import as": "import math as m\ndef f(**_): return m.floor(2.5)",
    "import inside": "def f(**_):\n    import json\n    return json.loads('3')",
    "annotation": "from collections.abc import Mapping\ndef f(extra_info: Mapping | None = None, **_) -> float: return 1",
    "own name of a builtin": "def round(x, y): return x + y\ndef f(**_): return round(1, 2)",
    "walrus": "def f(**_): return (y := 2) + y",
    "generator": "X = [1, 2]\ndef f(**_): return sum(x for x in X)",
    "nested class": "class A:\n    class B:\n        def g(self, **_): return 14\nf = A.B().g",
    "module beside": "import beside\ndef f(**_): return beside.value()",
    "function of a module": "import beside\nf = beside.reward",
    "logger": "import logging\nlog = logging.getLogger('x')\ndef f(**_): return log.isEnabledFor(50)",
    "dict with float keys": "D = {0.1: 1, None: 2}\ndef f(**_): return D[None]",
    "complex": "Z = 3 + 4j\ndef f(**_): return abs(Z)",
    "bytes": "B = bytearray(b'ab')\ndef f(**_): return len(B)",
    "range": "R = range(3)\ndef f(**_): return len(R)",
    "Path": "from pathlib import Path\nP = Path('/x')\ndef f(**_): return len(P.parts)",
    "datetime": "import datetime\nD = datetime.date(2026, 1, 2)\ndef f(**_): return D.day",
    "type variable": "from typing import TypeVar\nT = TypeVar('T')\ndef f(x: T = 1, **_) -> T: return x",
}
SCRIPT = """
import asyncio, inspect, json, subprocess, sys
from pathlib import Path
from tlt_megatron.rewards.carried_function import save_function
from tlt_megatron.runtime.parent import run_environment

def run(f):
    value = f(data_source='', solution_str='', ground_truth='', extra_info={})
    return float(asyncio.run(value) if inspect.isawaitable(value) else value)

if __name__ == "__main__":
    expected, places = {}, {}
    for name, source in json.loads(Path(sys.argv[1]).read_text()).items():
        exec(source, globals())
        file = Path(sys.argv[2]) / f"{len(places)}.py"
        places[name] = save_function(f, file, run_environment())
        expected[name] = run(f)
        N = 7; LIMIT = 0  # later values
    print(json.dumps([expected, places]))
"""
WORKER = """
import json, sys
from tlt_megatron.config.extensions import load_extension
from tlt_megatron.rewards.reward import is_async, read_result
import asyncio, inspect
found = {}
for name, place in json.loads(sys.argv[1]).items():
    f = load_extension("reward.function", place)
    value = f(data_source='', solution_str='', ground_truth='', extra_info={})
    assert inspect.isawaitable(value) == is_async(f)
    found[name] = read_result(asyncio.run(value) if inspect.isawaitable(value) else value)[0]
print(json.dumps(found))
"""


def test_every_kind_of_function_gives_in_a_worker_what_it_gives_here(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def value(): return 15\ndef reward(**_): return 16\n")
    (tmp_path / "kinds.json").write_text(json.dumps(KINDS))
    (tmp_path / "script.py").write_text(SCRIPT)
    done = python("script.py", "kinds.json", tmp_path / "copies", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected, places = json.loads(done.stdout.splitlines()[-1])
    assert expected.keys() == KINDS.keys()
    worker = python("-c", WORKER, json.dumps(places), cwd=tmp_path)
    assert worker.returncode == 0, worker.stderr
    assert json.loads(worker.stdout.splitlines()[-1]) == expected


GONE = """import sys, types
m = types.ModuleType('gone')
exec('def f(**_): return 1', m.__dict__)
sys.modules['gone'] = m
f = m.f"""


@pytest.mark.parametrize(
    "source, reason",
    [
        ("import threading\nL = threading.Lock()\ndef f(**_): return L.locked()", "cannot be copied"),
        ("f = 3", "must be a function or another object that can be called"),
        (GONE, "another process cannot load it: ModuleNotFoundError"),
    ],
)  # fmt: skip
def test_a_function_that_no_worker_can_load_is_refused_at_once(
    source: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "kinds.json").write_text(json.dumps({"x": source}))
    (tmp_path / "script.py").write_text(SCRIPT)
    done = python("script.py", "kinds.json", tmp_path / "copies", cwd=tmp_path)
    line = done.stderr.splitlines()[-1]
    assert line.startswith("ValueError: reward=")
    assert reason in line, done.stderr
