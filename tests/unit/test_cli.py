"""The command `tlt`: its help, what `tlt train` starts, and the same commands from a wheel without
a checkout.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.tiny_task import REPO, python
from tlt_megatron.cli import _FLAGS, _VALUES, COMMANDS, help_of, main, train_command
from tools.commands import print_ledger

EXAMPLE = "examples/quickstart.yaml"
ABSENT = "model.path=nobody/absent"  # would be fetched from the Hub


def tlt(
    *arguments: object, root: Path | str = REPO, cwd: Path = REPO
) -> subprocess.CompletedProcess[str]:
    words = ("-m", "tlt_megatron.cli", *arguments)
    return python(*words, cwd=cwd, PYTHONPATH=str(root))


def test_help_names_every_command_and_does_not_import_torch() -> None:
    source = "import sys; from tlt_megatron.cli import main; main(['--help'])\nassert 'torch' not in sys.modules"
    done = python("-c", source)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout
        assert f"\n{'':18}tlt {name}" in done.stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("tlt eval", "evaluate"),
        ("tlt train my.yaml rollout.num_s", "rollout.num_samples="),
        ("tlt train my.yaml --nproc", "--nproc-per-node"),
        ("tlt train my.yaml --print", "--print-config"),
        ("tlt train-drafter --measure", "--measure-minutes"),
        ("tlt train my.yaml rollout.engine = s", "sglang"),  # as bash splits the words
        ("tlt train my.yaml rollout.engine=s", "rollout.engine=sglang"),
        ("tlt train my.yaml spot.enabled = t", "true"),
    ],
)
def test_bash_completes_commands_and_settings(words: str, completed: str) -> None:
    script = tlt("completion").stdout
    count = len(words.split()) - 1
    script += f"\nCOMP_WORDS=({words}); COMP_CWORD={count}; _tlt; echo ${{COMPREPLY[*]}}"
    done = subprocess.run(["bash", "-c", script], cwd=REPO, capture_output=True, text=True)
    assert done.stdout.split() == [completed], done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        code = main([name, "--help"])
    except SystemExit as end:  # argparse
        code = end.code
    assert code == 0
    printed = capsys.readouterr().out
    assert help_of(name).summary in printed
    assert help_of(name).example in printed
    assert name == "doctor" or f"usage: tlt {name} " in printed


@pytest.mark.parametrize(
    ("given", "launcher", "program"),
    [
        ("my.yaml", "--standalone", "--config my.yaml"),
        ("--config my.yaml", "--standalone", "--config my.yaml"),
        ("--config=my.yaml", "--standalone", "--config my.yaml"),
        (
            "my.yaml run.num_steps=3 --nproc-per-node 8 model.path=a.yaml --resume auto",
            "--standalone --nproc-per-node 8",
            "--config my.yaml run.num_steps=3 model.path=a.yaml --resume auto",
        ),
        (
            "--nnodes=2 --rdzv-conf timeout=5 --rdzv-endpoint host:29500 my.yaml --resume=never",
            "--nnodes=2 --rdzv-conf timeout=5 --rdzv-endpoint host:29500",
            "--config my.yaml --resume=never",
        ),
    ],
)
def test_train_starts_the_launcher(given: str, launcher: str, program: str) -> None:
    python, torchrun, *rest = train_command(given.split())
    start = rest.index(str(REPO / "launch" / "pretrain_rl.py"))
    assert (python, torchrun) == (sys.executable, str(REPO / "launch" / "torchrun.py"))
    assert (" ".join(rest[:start]), " ".join(rest[start + 1 :])) == (launcher, program)


def test_the_options_of_torchrun_are_known() -> None:
    actions = get_args_parser()._actions
    known = {name.lstrip("-").replace("_", "-") for a in actions for name in a.option_strings}
    assert known - {"h", "help", "m", "module", "no-python", "run-path"} <= {*_VALUES, *_FLAGS}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("trian",), "tlt: 'trian' is no command; did you mean train?"),
        (("foo",), "tlt: 'foo' is no command; tlt --help lists them"),
        (("train", "run.num_steps=3"), "tlt train: CONFIG is missing: name a .yaml file"),
        (("train", EXAMPLE, "steps"), "tlt train: 'steps' is no section.key=value and no option"),
        (
            ("train", EXAMPLE, "--standalone", "num_steps=5"),
            "tlt train: 'num_steps=5' is no section.key=value and no option; did you mean run.num_steps=5?",
        ),
        (
            ("train", EXAMPLE, "learning_rate=1e-5"),
            "tlt train: 'learning_rate=1e-5' is no section.key=value and no option; did you mean optimizer.lr=1e-5?",
        ),
        (
            ("train", EXAMPLE, "--learning_rate", "1e-5"),
            "tlt train: '--learning_rate' is no section.key=value and no option; did you mean optimizer.lr=1e-5?",
        ),
        (
            ("train", EXAMPLE, "--print-config", "--foo", "3"),
            "tlt train: '--foo' is no section.key=value and no option",
        ),
        (("train", "no.yaml", "--print-config"), "tlt train: config='no.yaml': no such file"),
        (("train", EXAMPLE, ABSENT, "--resume=auto"), "tlt train: run.dir='': must name the run"),
        (("train", EXAMPLE, "run.num_steps=x"), "tlt train: run.num_steps='x': must be int"),
        (
            ("train", EXAMPLE, ABSENT, "algorithm.loss=a.py:f"),
            "tlt train: algorithm.loss='a.py:f': no ",
        ),
        (("train", EXAMPLE, "run.steps=3"), "tlt train: run.steps=3: unknown key; did you mean"),
        (
            ("train", EXAMPLE, "--nnodes=2", "--rdzv-endpoint=absent:1", "model.path=absent"),
            "tlt train: model.path='absent': must be a folder with config.json",
        ),
        (
            ("train", EXAMPLE, "speculation.strategies=['4_2_99']"),
            "tlt train: speculation.strategies: num_draft_tokens=99: must be <= ",
        ),
    ],
)
def test_bad_input_is_answered_in_one_line_before_torch(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = tlt(*arguments, root=f"{tmp_path}{os.pathsep}{REPO}")
    assert done.returncode == 2
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "-m tlt_megatron.cli train examples/quickstart.yaml --dry-run --nproc-per-node two",
        "launch/torchrun.py --nnodes x any.py",
    ],
)
def test_a_number_of_ranks_that_is_none_is_answered_in_one_line(words: str) -> None:
    done = python(*words.split())
    assert done.returncode == 2
    assert re.match(r"(tlt train|pretrain_rl): --nnodes \S+ --nproc-per-node ", done.stderr)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("plan no.yaml --ranks 2", "config='no.yaml': no such file"),
        (
            f"plan {EXAMPLE} --ranks 2 model.path=absent",
            "model.path='absent': must be a folder with config.json",
        ),
        ("compare no_run no_other", "no_run, no_other: no such run folder"),
        (
            "export-drafter --from no --to new --format vllm",
            "--from no: must be a drafter's folder",
        ),
        ("convert --from no --to new", "--from no: no such folder"),
        (f"migrate {{run}} --out {EXAMPLE}/no.yaml", "[Errno 20] Not a directory: "),
        (
            "compare {folder} {folder}",
            "{folder}/rollouts/step_0000001.*jsonl: missing; logging.rollouts must be on",
        ),
    ],
)
def test_a_tools_error_is_answered_in_one_line(
    arguments: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "timing_s/step": 1.0}\n')
    (tmp_path / "run.sh").write_text("--n-samples-per-prompt 8 --lr 1e-6")
    known = {"run": tmp_path / "run.sh", "folder": tmp_path}
    name, *rest = arguments.format(**known).split()
    assert main([name, *rest]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tlt {name}: {said.format(**known)}")
    assert error.count("\n") == 1


def test_a_package_of_the_same_name_elsewhere_does_not_hide_the_tools(tmp_path: Path) -> None:
    """As one in site-packages could, which some wheels bring along."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").touch()
    done = tlt("schema", root=f"{REPO}{os.pathsep}{tmp_path}")
    assert done.returncode == 0, done.stderr


def test_a_plan_needs_a_rank(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        print_ledger.main([EXAMPLE, "--ranks", "0"])
    assert "--ranks 0: must be >= 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            f"plan {REPO / EXAMPLE} --ranks 2",
            "model.path='build/quickstart_policy': is no folder of",
        ),
        (f"train {REPO / EXAMPLE}", "model.path='build/quickstart_policy': is no folder of"),
        (
            "init --model models/mine --data no.jsonl --gpus 0 --out new",
            "--model='models/mine': is no folder",
        ),
        ("convert --from runs/no --to new", "--from='runs/no': is no folder of this machine"),
        ("serve build/quickstart_policy", "model='build/quickstart_policy': is no folder of this"),
    ],
)
def test_a_path_of_the_project_that_is_absent_is_not_looked_for_on_the_hub(
    words: str, said: str, tmp_path: Path
) -> None:
    done = tlt(*words.split(), cwd=tmp_path)
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert said in line
    assert "hf download" not in line
    assert ("make quickstart-policy makes it" in line) is ("quickstart" in said)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel holds, in a folder."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(folder)]
    subprocess.run(command, cwd=REPO, check=True, capture_output=True)
    return folder


def test_a_wheel_needs_no_checkout(wheel: Path, tmp_path: Path) -> None:
    assert [path.name for path in wheel.iterdir()] == ["tlt_megatron"]
    for arguments in (("--help",), ("report", "--help"), ("init", "--help")):
        done = tlt(*arguments, root=wheel, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert (wheel / "tlt_megatron/programs/launch/slurm/single_node.sbatch").is_file()
    assert (wheel / "tlt_megatron/config/other_names.txt").is_file()
    example = wheel / "tlt_megatron" / "programs" / EXAMPLE
    words = ("train", "--print-config", example, "run.num_steps=3")
    done = tlt(*words, root=wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "num_steps: 3\n" in done.stdout


@pytest.mark.parametrize(
    ("shell", "said"),
    [
        ("exec {} > /dev/full", "pretrain_rl: standard output: No space left on device"),
        ("ulimit -v 1500000 && exec {}", "pretrain_rl: ulimit -v 1500000: must be at least"),
    ],
)
def test_a_process_that_cannot_run_is_said_in_one_line(shell: str, said: str) -> None:
    command = shlex.join(map(str, train_command([str(REPO / EXAMPLE)])))
    done = subprocess.run(["bash", "-c", shell.format(command)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
