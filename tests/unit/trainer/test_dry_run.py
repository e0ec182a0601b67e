"""The table of a dry run at 128 nodes, what a node finds wrong, and checks that do not end."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tiny_task import make_tiny_task
from tlt_megatron.config.load import load_config
from tlt_megatron.trainer.before.dry_run import take_within
from tlt_megatron.trainer.before.node_checks import Check, examine_node, read_settings
from tlt_megatron.trainer.before.node_table import Report, describe_nodes

TORCH = Check(name="torch", found="2.11.0")
MEMORY = Check(name="memory", found="cuda", amounts={"GiB free": 77.0})


def reports(number: int) -> dict[int, Report]:
    free = [replace(MEMORY, amounts={"GiB free": 77 + node / 100}) for node in range(number)]
    return {node: Report(host=f"gpu{node}", checks=[TORCH, free[node]]) for node in range(number)}


def test_what_128_nodes_have_alike_stands_once_and_amounts_as_a_range() -> None:
    lines, is_well = describe_nodes(reports(128))
    assert is_well
    assert lines == [
        "ok    torch               2.11.0",
        "ok    memory              cuda, 77.00 to 78.27 GiB free",
        "dry run: all 2 checks pass; nothing was started",
    ]


def test_nodes_that_differ_or_cannot_run_stand_out() -> None:
    nodes = reports(128)
    for node in (3, 4, 5, 9):
        nodes[node].checks[0] = replace(TORCH, found="2.12.1")
    nodes[7].checks[1] = replace(MEMORY, problem="memory: the update phase takes 81 GiB")
    nodes[8] = Report(host="", checks=[Check(name="nodes", problem="did not come in time")])
    lines, is_well = describe_nodes(nodes)
    assert not is_well
    assert lines == [
        "FAIL  torch               nodes 0-2, 6-7, 10-127: 2.11.0",
        f"{'':26}nodes 3-5, 9 (gpu3, gpu4, gpu5, gpu9): 2.12.1",
        "FAIL  memory              nodes 0-6, 9-127: cuda, 77.00 to 78.27 GiB free",
        f"{'':26}node 7 (gpu7): memory: the update phase takes 81 GiB",
        "FAIL  nodes               node 8: did not come in time",
        "dry run: 3 of 3 checks fail: torch (nodes 3-5, 9 (gpu3, gpu4, gpu5, gpu9)); memory (node 7 (gpu7)); nodes (node 8)",
    ]


def test_a_value_per_node_does_not_make_a_line_per_node() -> None:
    nodes = {
        node: Report(host="", checks=[Check(name="code", found=f"{node:x}")]) for node in range(128)
    }
    lines, _ = describe_nodes(nodes)
    assert len(lines) == 10
    assert lines[-2].strip() == "and 120 more nodes"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_task(tmp_path_factory.mktemp("task"))


def problems(config: Path, run_dir: Path, *settings: str, shared: str = "") -> dict[str, str]:
    """Return what is wrong on the first of two nodes, by check."""
    loaded = load_config([config], [f"run.dir={run_dir}", *settings])
    checks = examine_node(loaded, node=0, num_nodes=2, num_ranks=1, shared=shared)
    return {check.name: check.problem for check in checks if check.problem}


def test_a_node_that_can_run_has_no_problem_and_makes_no_folder(
    config: Path, tmp_path: Path
) -> None:
    assert problems(config, tmp_path / "new" / "run") == {}
    assert list(tmp_path.iterdir()) == []


def test_disk_memory_and_a_run_folder_that_nodes_do_not_share_are_refused(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most three checkpoints of 1.5 MB are kept at once, and the folder holds one already."""
    saved = tmp_path / "run" / "checkpoints" / "iter_0000001"
    saved.mkdir(parents=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2_500_000))
    every = ("checkpoint.interval=1", "checkpoint.resume=auto")
    large = ("rollout.kv_cache_tokens=99999999999", f"checkpoint.resume={saved}")
    absent = f"{tmp_path}/.dry-run-of-node-0"
    found = problems(config, tmp_path / "run", *every, shared=absent)
    assert set(found) == {"run.dir", "checkpoints"}
    assert found["checkpoints"].startswith(f"{saved.parent} has 0.0 GB free: must be 0.0 GB with")
    assert "lacks a file that node 0 has written" in found["run.dir"]
    assert "must be on a file system that all nodes share" in found["run.dir"]
    found = problems(config, tmp_path / "run", *large)
    assert set(found) == {"memory"}
    assert "change rollout.max_batch_size" in found["memory"]


def test_a_used_run_folder_and_code_that_does_not_load_are_refused(
    config: Path, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "judge.py").write_text("import no_such_package\n")
    found = problems(config, tmp_path, f"reward.function={tmp_path}/judge.py:score")
    assert set(found) == {"run.dir", "reward.function"}
    assert "holds an earlier run (metrics.jsonl)" in found["run.dir"]
    assert "No module named 'no_such_package'" in found["reward.function"]
    assert not (tmp_path / "lock").exists()


def test_a_node_that_lacks_a_file_still_tells_its_versions(config: Path, tmp_path: Path) -> None:
    check, loaded = read_settings(["--config", str(config), f"data.train={tmp_path}/no.jsonl"])
    assert loaded is None
    assert check.problem.startswith(f"data.train='{tmp_path}/no.jsonl': must be an existing")
    checks = examine_node(None, node=1, num_nodes=2, num_ranks=1, shared="")
    assert {"tlt_megatron", "Python", "torch", "megatron-core"} <= {each.name for each in checks}


def test_a_check_that_hangs_or_raises_is_named_by_the_one_before_it() -> None:
    def checks(end: threading.Event | None) -> Iterator[Check]:
        yield TORCH
        if end is None:
            raise RuntimeError("a defect")
        end.wait(60)

    end = threading.Event()
    *taken, hanging = take_within(0.1, checks(end))
    end.set()
    assert taken == [TORCH]
    assert hanging.problem == "the check after torch: no answer in 0.1 s"
    *taken, raising = take_within(60, checks(None))
    assert taken == [TORCH]
    assert raising.problem == "the check after torch: RuntimeError: a defect"


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "\xff",
        "[1, 2]",
        "{}",
        "[" * 100_000,
        '{"host": 7, "checks": []}',
        '{"host": "gpu1", "checks": [7]}',
        '{"host": "gpu1", "checks": [{"found": "2.11.0"}]}',
        '{"host": "gpu1", "checks": [{"name": "torch", "amounts": {"GiB": NaN}}]}',
        '{"host": "gpu1", "checks": [{"name": "torch", "amounts": {"GiB": "77"}}]}',
        '{"host": "gpu1", "checks": [{"name": "torch", "colour": "red"}]}',
    ],
)
def test_what_is_no_report_is_a_problem_of_the_node_that_sent_it(sent: str) -> None:
    lines, is_well = describe_nodes({**reports(1), 1: Report.from_json(sent)})
    assert not is_well
    (line,) = (line for line in lines if line.startswith("FAIL  nodes"))
    assert "node 1: the report" in line
    assert len(line) < 600


def test_a_node_sends_no_escapes_to_the_terminal_and_may_lack_an_amount() -> None:
    escape = "\x1b]0;mine\x07\x1b[2J\r\n\u202e"
    other = Report(
        host=f"gpu1{escape}",
        checks=[
            replace(TORCH, found=f"3{escape}", amounts={f"GiB{escape}": 1.0}),
            replace(MEMORY, amounts={}),
            Check(name=f"mine{escape}", problem=f"bad{escape}"),
        ],
    )
    lines, _ = describe_nodes({**reports(1), 1: Report.from_json(other.to_json())})
    assert all(line.isprintable() for line in lines), lines
