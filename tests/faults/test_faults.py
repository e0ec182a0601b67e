"""40 schedules of faults against real runs, as `make faults` runs 500; and the oracle, which must
find what is injected here.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.faults.case import Case, Verdict, compare, judge
from tests.faults.catalogue import FAULTS, draw
from tests.faults.lab import Lab, Variant
from tests.faults.probe import Moment
from tests.faults.processes import Job
from tests.ranks import LIMIT_S, run_ranks
from tests.tiny_task import REPO

NUM_SCHEDULES = 40
# One whose schedules reach much: nine of the ten variants are resumed, both ranks are killed and
# frozen in training, and signals stop a run in an update, in a conversation and in a spot session.
SEED = 146


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the program has written. It forks ranks, so it runs apart from this process."""
    folder = tmp_path_factory.mktemp("faults")
    command = [sys.executable, "-m", "tests.faults", "--json", str(folder / "faults.json")]
    command += ["--schedules", str(NUM_SCHEDULES), "--seed", str(SEED), "--folder", str(folder)]
    with open(folder / "output.txt", "w") as output:
        subprocess.run(command, cwd=REPO, stdout=output, stderr=output)
    path = folder / "faults.json"
    assert path.is_file(), (folder / "output.txt").read_text()[-6000:]
    report = json.loads(path.read_text())
    assert len(report["schedules"]) == NUM_SCHEDULES
    return report


@pytest.mark.e2e
@pytest.mark.faults
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_promises_hold_under(fault: str, report: dict) -> None:
    mine = [Verdict(**each) for each in report["schedules"] if each["fault"] == fault]
    assert mine
    for verdict in mine:
        assert verdict.is_good, json.dumps(dataclasses.asdict(verdict), indent=1)


def judged(folder: Path, program: str, run: Callable[[Case, Job], None]) -> Verdict:
    """The verdict over a shell program in the place of a run."""

    def play(case: Case) -> None:
        (folder / "terminal.txt").touch()
        with open(folder / "terminal.txt", "ab") as terminal:
            process = subprocess.Popen(["sh", "-c", program], stdout=terminal, stderr=terminal)
        run(case, Job(folder=folder, launchers=[process.pid]))

    def on_rank() -> Verdict:
        lab = Lab.__new__(Lab)
        lab.variants = {"plain": Variant(name="plain", config=folder, straight=folder)}
        return judge(play, Case("self-test", 0, lab, folder))

    return run_ranks(1, on_rank, has_world=False)[0]


LOG = "12:00:00 rank 1 WARNING tlt_megatron.x: something"  # the rank that writes it is no proof


@pytest.mark.parametrize(
    ("program", "column", "text"),
    [
        ("echo pretrain_rl: rank 1 is gone; exit 1", "", ""),
        ("env -i setsid sleep 300 & echo pretrain_rl: rank 1; exit 1", "orphans", "sleep 300"),
        ("echo begun; sleep 300", "hang", "begun"),
        ("echo pretrain_rl: rank 1", "unclear", "exit codes [0]: must be in (1,)"),
        (f"echo '{LOG}'; exit 1", "unclear", "no line with ('rank 1',)"),
        ("echo Traceback '(most recent call last):' rank 1; exit 1", "unclear", "a traceback"),
        ("for i in 1 2; do echo pretrain_rl: rank 1; done; exit 1", "unclear", "2 lines say why"),
    ],
)
def test_the_oracle_finds(program: str, column: str, text: str, tmp_path: Path) -> None:
    def run(case: Case, job: Job) -> None:
        case.limit_s = 2.0 if column == "hang" else LIMIT_S
        case.end(job, 1, line=["rank 1"], orphan_grace_s=0.5)

    verdict = judged(tmp_path, program, run)
    assert verdict.is_good == (not column), verdict
    if column:
        assert text in str(getattr(verdict, column))


def test_survivors_that_end_late_or_wrongly_are_found_and_faults_that_never_happen(
    tmp_path: Path,
) -> None:
    def run(case: Case, job: Job) -> None:
        (tmp_path / "code.1").write_text("-9")
        case.mark, case.struck_at = tmp_path / "code.1", 1.0  # long ago
        case.end(job, ranks=[1], within_s=5.0)
        case.mark, case.moment = None, Moment(rank=0, phase="rollout", operation=5)
        case.end(job)

    verdict = judged(tmp_path, "true", run)
    assert "exit codes of ranks {1: -9}" in verdict.unclear[0]
    assert "promised 5.0" in verdict.unclear[1]
    assert "ended before" in verdict.missed


def write_run(folder: Path) -> Path:
    """What a run of three steps leaves, as far as it is compared."""
    (folder / "rollouts").mkdir(parents=True)
    rows = [{"step": 0, "eval/accuracy": 0.5}]
    for step in (1, 2, 3):
        rows.append({"step": step, "actor/pg_loss": 0.1 * step, "timing_s/step": 3.0})
        row = {
            "prompt_id": "a",
            "draw_index": step,
            "sample_index": 0,
            "token_ids": [step],
            "reward": 1.0,
        }
        (folder / "rollouts" / f"step_{step:07d}.rank_00000.jsonl").write_text(
            json.dumps(row) + "\n"
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "hf").mkdir()
    save_file({"weight": torch.arange(4.0)}, folder / "hf" / "model.safetensors")
    (folder / "hf" / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("metrics.jsonl", "", "", ""),
        ("metrics.jsonl", '"step": 2, "actor', '"step": 2, "x', "lacks (2, 'actor/pg_loss')"),
        (
            "metrics.jsonl",
            '{"step": 0',
            '{"step": 0, "eval/accuracy": 0.5}\n{"step": 0',
            "1 times too",
        ),
        ("metrics.jsonl", "0.2", "0.201", "(2, 'actor/pg_loss') is 0.201"),
        ("rollouts/step_0000002.rank_00000.jsonl", "[2]", "[7]", "tokens or rewards differ"),
        ("rollouts/step_0000002.rank_00000.jsonl", None, None, "tokens or rewards differ"),
        ("hf/model.safetensors", "\x40\x40", "\x40\x41", "weights differ: weight"),
        ("hf/config.json", None, None, "no hf/"),
    ],
)
def test_a_harmed_run_folder_differs(
    file: str, old: str | None, new: str, message: str, tmp_path: Path
) -> None:
    straight, run = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    if old is None:
        (run / file).unlink()
    else:
        text = (run / file).read_bytes()
        (run / file).write_bytes(text.replace(old.encode(), new.encode()) if old else text)
    found = compare(run, straight)
    assert any(message in text for text in found) if message else not found


def test_a_seed_names_its_schedules_and_every_fault_is_among_them() -> None:
    assert draw(40, seed=7) == draw(40, seed=7) != draw(40, seed=8)
    for count in (40, 250):
        schedules = draw(count, seed=1)
        assert len(set(schedules)) == count
        assert {name for name, _ in schedules} == set(FAULTS)
