"""What belongs to a pass on a device that works behind the host's back, with a clock and a device that are counters."""

from __future__ import annotations

from tlt_megatron.engines.embedded.pass_clock import PassClock


class Machine:
    """A host and a device, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.busy_until = 0.0  # the device

    def start_work(self, seconds: float) -> None:
        self.busy_until = max(self.now, self.busy_until) + seconds

    def wait(self) -> None:
        self.now = max(self.now, self.busy_until)


def make_clock() -> tuple[Machine, PassClock]:
    machine = Machine()
    return machine, PassClock(machine.wait, lambda: machine.now)


def test_a_pass_lasts_until_the_draw_that_waits_for_it() -> None:
    machine, clock = make_clock()
    for seconds in (8.0, 3.0):
        clock.start()
        with clock.running():
            machine.start_work(seconds)
            machine.now += 1.0
        machine.now += 0.5  # of the host's own, while the device works
        with clock.running():
            machine.wait()
        assert clock.seconds == seconds - 0.5
    assert clock.start_s == 100.0 + 8.0


def test_work_between_pass_and_draw_neither_counts_nor_hides_the_wait() -> None:
    machine, clock = make_clock()
    clock.start()
    with clock.running():
        machine.start_work(8.0)
    with clock.interrupted():
        machine.start_work(50.0)
        machine.now += 2.0
    with clock.running():
        machine.now += 1.0
        machine.wait()
    assert clock.seconds == 8.0 + 1.0
