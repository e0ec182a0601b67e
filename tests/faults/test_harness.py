"""The judge is judged: what each column of the table counts is injected here, and must be counted."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis.stateful import rule
from safetensors.torch import save_file

from tests.faults.case import Case, Verdict, judge
from tests.faults.catalogue import FAULTS, draw
from tests.faults.checkpoint_machine import CheckpointMachine
from tests.faults.compare import differences
from tests.faults.lab import Lab, Variant
from tests.faults.model_faults import run_machine
from tests.faults.processes import Job, descendants, kill_all
from tests.faults.spot_machine import SpotMachine
from tests.faults.table import summarize
from tlt_megatron.spot.coordinator import Coordinator
from tlt_megatron.spot.rank_state import PhaseView


class NoLab(Lab):
    """Without a task: these schedules run programs of their own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        variant = Variant(name="plain", config=root, overrides=(), straight=root / "straight")
        self.variants = {"plain": variant}


def judged(run: Callable[[Case], None], folder: Path) -> Verdict:
    """The verdict of a schedule, in a process of its own as the harness does it."""
    result = folder / "verdict.json"
    pid = os.fork()
    if not pid:
        case = Case("self-test", 0, NoLab(folder), folder)
        result.write_text(json.dumps(dataclasses.asdict(judge(run, case))))
        os._exit(0)
    os.waitpid(pid, 0)
    return Verdict(**json.loads(result.read_text()))


def start(case: Case, program: str) -> Job:
    """A shell program in the place of a run."""
    case.folder.joinpath("terminal.txt").touch()
    with open(case.folder / "terminal.txt", "ab") as terminal:
        process = subprocess.Popen(["sh", "-c", program], stdout=terminal, stderr=terminal)
    return Job(folder=case.folder, agents=[process], num_ranks=1, is_torchrun=True)


def test_an_orphan_in_a_session_of_its_own_is_found_and_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def run(case: Case) -> None:
        orphan = f"env -i setsid sh -c 'echo $$ > {pid_file}; exec sleep 300' &"
        job = start(case, f"{orphan} until [ -s {pid_file} ]; do sleep 0.05; done")
        case.finish(job, orphan_grace_s=0.5)

    verdict = judged(run, tmp_path)
    assert len(verdict.orphans) == 1
    assert "sleep 300" in verdict.orphans[0]
    assert not verdict.is_good
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_a_run_that_does_not_end_is_a_hang_and_is_ended(tmp_path: Path) -> None:
    before = descendants()

    def run(case: Case) -> None:
        job = start(case, "echo begun; sleep 300")
        while "begun" not in job.terminal:
            time.sleep(0.01)
        case.finish(job, 0.5)

    verdict = judged(run, tmp_path)
    assert "not ended 0.5 s after the fault" in verdict.hang
    assert "begun" in verdict.hang
    assert not set(descendants()) - set(before)


def test_a_clean_run_is_none_of_that(tmp_path: Path) -> None:
    def run(case: Case) -> None:
        job = start(case, "echo rank 1 on here: gone")
        case.finish(job)
        case.expect_codes(job, 0)
        case.expect_line(job, "rank 1", "gone")
        case.expect_no_traceback(job)

    verdict = judged(run, tmp_path)
    assert verdict.is_good
    assert not verdict.missed


def test_wrong_exit_codes_and_messages_are_counted(tmp_path: Path) -> None:
    def run(case: Case) -> None:
        lines = [
            "12:00:00 rank 1 WARNING tlt_megatron.x: something",
            "Traceback (most recent call last):",
        ]
        job = start(case, "; ".join([*(f"echo '{line}'" for line in lines), "exit 1"]))
        case.finish(job)
        case.expect_codes(job, 0)
        case.expect_line(job, "rank 1")  # whose log line it is does not count
        case.expect_no_traceback(job)

    assert len(judged(run, tmp_path).unclear) == 3


def test_an_error_of_the_harness_is_no_success(tmp_path: Path) -> None:
    def run(case: Case) -> None:
        raise KeyError("a bug")

    verdict = judged(run, tmp_path)
    assert "a bug" in verdict.broken
    assert not verdict.is_good
    [row, total] = summarize([verdict])
    assert (row["schedules"], row["broken"], total["lost"]) == (1, 1, 0)


def write_run(folder: Path) -> Path:
    """What a run of three steps leaves, as far as it is compared."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "hf").mkdir()
    rows = [{"step": 0, "eval/accuracy": 0.5}]
    for step in (1, 2, 3):
        rows.append({"step": step, "actor/pg_loss": 0.1 * step, "timing_s/step": time.time()})
        row = {"prompt_id": "a", "sample_index": 0, "token_ids": [step], "reward": 1.0}
        path = folder / "rollouts" / f"step_{step:07d}.jsonl"
        path.write_text(json.dumps(row) + "\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_file({"weight": torch.arange(4.0)}, folder / "hf" / "model.safetensors")
    (folder / "hf" / "config.json").write_text("{}")
    return folder


def test_two_equal_runs_do_not_differ(tmp_path: Path) -> None:
    assert differences(write_run(tmp_path / "a"), write_run(tmp_path / "b")) == []


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("a step is missing", "lacks (2, 'actor/pg_loss'"),
        ("a step is there twice", "has (2, 'actor/pg_loss', 0.2) 1 times more"),
        ("an evaluation is there twice", "has (0, 'eval/accuracy', 0.5) 1 times more"),
        ("a number changed", "lacks (3, 'actor/pg_loss'"),
        ("a token changed", "tokens or rewards differ"),
        ("rollouts are missing", "tokens or rewards differ"),
        ("a weight changed", "1 of 1 weights differ, first weight"),
        ("nothing was exported", "no hf/"),
    ],
)
def test_a_harmed_run_folder_differs(tmp_path: Path, harm: str, message: str) -> None:
    straight, run = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    rollouts = run / "rollouts" / "step_0000002.jsonl"
    if harm == "a step is missing":
        metrics.write_text("".join(lines[:2] + lines[3:]))
    elif harm == "a step is there twice":
        metrics.write_text("".join([*lines, lines[2]]))
    elif harm == "an evaluation is there twice":
        metrics.write_text("".join([lines[0], *lines]))
    elif harm == "a number changed":
        metrics.write_text("".join(lines).replace(repr(0.1 * 3), "0.31"))
    elif harm == "a token changed":
        rollouts.write_text(rollouts.read_text().replace("[2]", "[7]"))
    elif harm == "rollouts are missing":
        rollouts.unlink()
    elif harm == "a weight changed":
        save_file({"weight": torch.tensor([0.0, 1, 2, 3 + 1e-6])}, run / "hf" / "model.safetensors")
    else:
        (run / "hf" / "config.json").unlink()
    assert any(message in found for found in differences(run, straight))


def test_a_seed_names_its_schedules_and_every_fault_is_among_them() -> None:
    assert draw(40, seed=7) == draw(40, seed=7)
    assert draw(40, seed=7) != draw(40, seed=8)
    for count in (40, 500):
        schedules = draw(count, seed=1)
        assert len(schedules) == len(set(schedules)) == count
        assert {name for name, _ in schedules} == set(FAULTS)


def test_processes_below_processes_are_found() -> None:
    process = subprocess.Popen(["sh", "-c", "sleep 300 & wait"], start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while "sleep 300" not in descendants().values():
            assert time.monotonic() < deadline, descendants()
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    kill_all([process.pid])  # nothing, where it has ended


def test_process_whose_first_thread_has_ended_still_counts() -> None:
    """It is a zombie by its state and holds its file locks until the last thread ends."""
    program = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(300,)).start()\n"
        "print('started', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            deadline = time.monotonic() + 120
            while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert process.pid in descendants()
        finally:
            process.kill()


class NeverGrows(Coordinator):
    """A rule that is broken: who comes later is left out."""

    def plan_growth(self, view: PhaseView) -> None:
        return None


class BrokenSpotMachine(SpotMachine):
    def coordinator(self, rank: int) -> Coordinator:
        good = super().coordinator(rank)
        good.__class__ = NeverGrows
        return good


def test_a_broken_rule_of_spot_sessions_is_found() -> None:
    run_machine(SpotMachine, 30, 0)
    with pytest.raises(AssertionError, match="could"):
        run_machine(BrokenSpotMachine, 200, 0)


class BrokenCheckpointMachine(CheckpointMachine):
    """Damage that nobody notes: the machine believes that the checkpoint is intact."""

    @rule()
    def damage_unseen(self) -> None:
        for folder in self.intact:
            (folder / "trainer_state.json").write_text("{}")


def test_damage_of_checkpoints_is_found() -> None:
    run_machine(CheckpointMachine, 4, 0)
    with pytest.raises((AssertionError, ValueError, ExceptionGroup)):
        run_machine(BrokenCheckpointMachine, 20, 0)
