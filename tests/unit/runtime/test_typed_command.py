"""The command that goes on with a run is the one that was typed, under each launcher."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.tiny_task import REPO, python
from tlt_megatron.runtime.parent import TRAINER_PID
from tlt_megatron.runtime.typed_command import note_command, resume_command, tlt_command

RANK = """
from pathlib import Path
from tlt_megatron.runtime.typed_command import resume_command
print(resume_command(Path("my runs/one")))
"""
WORDS = ("--config", "it's mine.yaml", "run.dir=elsewhere", "--resume", "never", "a.b=c d")
GIVEN = ("--config", "it's mine.yaml", "a.b=c d", "--resume", "auto", "run.dir=my runs/one")


@pytest.mark.parametrize(
    "launcher",
    [
        ["launch/torchrun.py", "--standalone", "--nproc-per-node", "1"],
        ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"],
        [],
    ],
)
def test_a_launcher_that_was_typed_is_typed_again(tmp_path: Path, launcher: list[str]) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    done = python(*launcher, rank, *WORDS)
    assert done.returncode == 0, done.stderr
    python_words = shlex.split(done.stdout)
    assert Path(python_words[0]).samefile(sys.executable)
    assert python_words[1:] == [*launcher, str(rank), *GIVEN]


def test_tlt_train_is_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    note_command(["train", "my.yaml", "--resume=never", "checkpoint.resume=never", "a.b={c: d}"])
    words = ["train", "my.yaml", "a.b={c: d}", "--resume", "auto", "run.dir=runs/one"]
    assert resume_command(Path("runs/one")) == tlt_command(*words)
    monkeypatch.setitem(os.environ, "GROUP_WORLD_SIZE", "3")
    assert resume_command(Path("runs/one")).endswith("   # and its like on 2 other nodes")
    monkeypatch.setitem(os.environ, TRAINER_PID, "1")
    assert resume_command(Path("runs/one")).startswith('overrides={"run.dir": "runs/one", ')


def test_tlt_is_short_where_it_is_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(sys.executable).parent
    if not (folder / "tlt").is_file():
        pytest.skip("needs an installed tlt")
    monkeypatch.chdir(REPO)
    monkeypatch.setenv("PATH", "/usr/bin")
    assert tlt_command("chat", "a b").endswith("/tlt chat 'a b'")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin")
    assert tlt_command("chat", "a b") == "tlt chat 'a b'"
