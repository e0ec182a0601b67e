"""The dry run of a job: every node checks itself, node 0 compares them and writes one table.

launch/torchrun.py calls it in place of starting ranks. The launchers meet at the address and port
of the run and connect to each other by gloo. No rank is started, and no file is left.
"""

from __future__ import annotations

import datetime
import json
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TextIO

import torch
import torch.distributed as dist

from tlt_megatron.config.load import check_record
from tlt_megatron.config.ranges import Section, require
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.runtime.collective_errors import first_line
from tlt_megatron.runtime.process_groups import MemberLost, PrivateHandle, form_private_group
from tlt_megatron.runtime.rendezvous import JobRendezvous, Place
from tlt_megatron.saved_files import one_line, parse_object, printable
from tlt_megatron.trainer.before.node_checks import (
    Check,
    examine_node,
    nearest_folder,
    read_settings,
    run_path,
)
from tlt_megatron.trainer.before.node_table import Report, describe_nodes

_CHECKS_S = 120.0  # for the checks of one node: a file system or a user's module may hang
_CONNECT_S = 30.0  # for gloo, and for the answers after it: all nodes are here
_LEAVE_S = 5.0  # for others to read the exit code: the store ends with node 0
_POLL_S = 0.05
_MAX_CLOCK_S = 2.0  # difference of wall clocks: files and status lines show their time


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked(Section):
    """What node 0 asks the others for: to connect with these nodes, and to compare clocks."""

    clock_s: float  # since the epoch, of node 0
    nodes: list[int]


def dry_run(
    arguments: list[str],
    place: Place,
    *,
    num_ranks: int,
    timeout_s: float,
    out: TextIO,
    files: ExitStack,
) -> int:
    """Check this node for launch/pretrain_rl.py with `arguments` on `num_ranks` ranks a node.

    Node 0 writes the table to `out`. Return 0 on every node if all is well, else 2. Nodes wait
    `timeout_s` for each other to come. `files` removes what this makes, also when it is closed from
    another thread.
    """
    settings, config = read_settings(arguments)
    size = Check(name="nodes", found=f"{place.num_nodes} x {num_ranks} ranks")
    report = Report(host=socket.gethostname(), checks=[size, settings])
    with files:
        shared = ""
        if config is not None and place.node == 0 and place.num_nodes > 1:
            shared = _share_file(config, files)
        try:
            rendezvous = JobRendezvous(*place, "dry run", int(timeout_s))
            deadline = time.monotonic() + timeout_s
            store = _meet(rendezvous, report.host, shared)
            # Node 0 answers only after it has waited for the others and for their checks.
            store.set_timeout(datetime.timedelta(seconds=timeout_s + _CHECKS_S + 4 * _CONNECT_S))
            where = f"{place.host}:{place.port}" if place.port else place.host
            report.checks.append(Check(name="ports", found=f"node 0 is reached at {where}"))
            checks = examine_node(
                config,
                node=place.node,
                num_nodes=place.num_nodes,
                num_ranks=num_ranks,
                shared=printable(store.get("shared").decode(errors="replace")),
            )
            report.checks.extend(take_within(_CHECKS_S, checks))
            if place.node > 0:
                return _follow(store, place.node, report)
            code = _write(_collect(store, place, report, deadline), out)
            store.set("code", str(code))
            _wait_for(store, "left", range(1, place.num_nodes), time.monotonic() + _LEAVE_S)
            return code
        except (OSError, dist.DistError) as error:  # the port is used, or node 0 is not there
            problem = Check(name="ports", problem=first_line(error))
        except ValueError as error:  # another program answers at the port, or another version
            problem = Check(name="nodes", problem=one_line(error))
        return _write({place.node: Report(host=report.host, checks=[settings, problem])}, out)


def _write(reports: dict[int, Report], out: TextIO) -> int:
    """Write the table and return the exit code."""
    lines, is_well = describe_nodes(reports)
    out.write("\n".join(lines) + "\n")
    out.flush()
    return 0 if is_well else 2


def _share_file(config: RunConfig, files: ExitStack) -> str:
    """Make a file beside the run folder, by which other nodes see that they share it. "" if it
    cannot be written.
    """
    with suppress(OSError, ValueError):  # the check of run.dir says it
        folder = nearest_folder(run_path(config))
        made = tempfile.NamedTemporaryFile(dir=folder, prefix=".dry-run-")  # noqa: SIM115  # in `files`
        return files.enter_context(made).name
    return ""


def take_within(limit_s: float, checks: Iterator[Check]) -> list[Check]:
    """Return the checks that end within `limit_s`. If the next one takes longer or raises, a last
    check says so.

    They run in a thread. It is left behind then, because nothing ends a call that hangs.
    """
    taken: list[Check] = []
    done: list[str] = []  # why the checks ended early, or ""

    def take() -> None:
        try:
            for check in checks:
                taken.append(check)
            done.append("")
        except Exception as error:  # a user's module may raise anything
            done.append(f"{type(error).__name__}: {one_line(error)}")

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(limit_s)
    if done == [""]:
        return taken
    found = list(taken)
    after = f" after {found[-1].name}" if found else ""
    why = done[0] if done else f"no answer in {limit_s:g} s"
    return [*found, Check(name="checks", problem=f"the check{after}: {why}")]


def _meet(rendezvous: JobRendezvous, host: str, shared: str) -> dist.Store:
    """Return the launchers' store. Other nodes first connect to the port of the ranks' store."""
    info = rendezvous.next_rendezvous()
    ranks = info.bootstrap_store_info
    assert ranks is not None
    if info.rank == 0:
        info.store.set("shared", shared)
    else:
        timeout = datetime.timedelta(seconds=_CONNECT_S)
        dist.TCPStore(ranks.master_addr, ranks.master_port, timeout=timeout)
        info.store.set(f"host/{info.rank}", host)
    return info.store


def _follow(store: dist.Store, node: int, report: Report) -> int:
    """Tell node 0 what this node found, and return the exit code that it decides."""
    store.set(f"report/{node}", report.to_json())
    answer = Report(host=report.host, checks=_meet_others(store, node))
    store.set(f"answer/{node}", answer.to_json())
    code = 0 if store.get("code") == b"0" else 2
    store.set(f"left/{node}", "")
    return code


def _collect(store: dist.Store, place: Place, report: Report, deadline: float) -> dict[int, Report]:
    """Return what all nodes found. Nodes that do not come have one problem."""
    others = range(1, place.num_nodes)
    hosts = _wait_for(store, "host", others, deadline)
    found = _wait_for(store, "report", hosts, time.monotonic() + _CHECKS_S + _CONNECT_S)
    reports = {0: report} | {node: Report.from_json(text) for node, text in found.items()}
    for node in others:
        if node not in reports:
            problem = "sent no report" if node in hosts else "did not come in time"
            reports[node] = Report(
                host=hosts.get(node, ""), checks=[Check(name="nodes", problem=problem)]
            )
    store.set("reported", json.dumps({"clock_s": time.time(), "nodes": [0, *found]}))
    report.checks.extend(_meet_others(store, place.node))
    answers = _wait_for(store, "answer", found, time.monotonic() + 2 * _CONNECT_S)
    gone = Check(name="network", problem="does not answer any more")
    silent = Report(host="", checks=[gone])
    for node in found:
        answer = Report.from_json(answers[node]) if node in answers else silent
        reports[node].checks.extend(answer.checks)
    return dict(sorted(reports.items()))


def _meet_others(store: dist.Store, node: int) -> list[Check]:
    """Compare this node's clock with that of node 0, and connect all nodes that have reported, as
    ranks would. A collective of them.
    """
    text = store.get("reported").decode(errors="replace")
    asked = check_record(_Asked, parse_object("what node 0 asks", text), "what node 0 asks")
    require(node in asked.nodes, "nodes", one_line(asked.nodes), f"with this node, {node}")
    clock = _compare_clock(time.time() - asked.clock_s)
    return [_connect_all(store, node, asked.nodes), clock]


def _connect_all(store: dist.Store, node: int, nodes: list[int]) -> Check:
    try:
        group = form_private_group(store, "dry run", nodes, node, torch.device("cpu"), _CONNECT_S)
        group.all_reduce(torch.ones(1))
    except MemberLost as error:
        return Check(name="network", problem=f"gloo: {first_line(error)}")
    if isinstance(group.handle, PrivateHandle):
        group.handle.close()
    return Check(name="network", found="gloo connects all nodes")


def _compare_clock(difference_s: float) -> Check:
    problem = ""
    if abs(difference_s) > _MAX_CLOCK_S:
        problem = f"{difference_s:+,.1f} s from that of node 0: must be within {_MAX_CLOCK_S:g} s"
    return Check(name="clock", problem=problem, amounts={"s from that of node 0": difference_s})


def _wait_for(
    store: dist.Store, name: str, nodes: Iterable[int], deadline: float
) -> dict[int, str]:
    """Return what these nodes have set under `name` by the deadline of time.monotonic()."""
    keys = {node: f"{name}/{node}" for node in nodes}
    while keys and not store.check([*keys.values()]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return {
        node: store.get(key).decode(errors="replace")
        for node, key in keys.items()
        if store.check([key])
    }
