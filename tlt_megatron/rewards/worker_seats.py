"""The places of a pool's workers, and who calls which. Used by `workers.RewardPool`, in its event
loop.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tlt_megatron.rewards.worker_process import WorkerProcess

_ASYNC_CALLS = 64  # that one worker of an async function runs at once


@dataclass(slots=True, eq=False)
class Seat:
    """A place for a worker, which may be replaced."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    worker: WorkerProcess | None = None


class WorkerSeats:
    """Seats with room for one call, or for many if the functions are async."""

    def __init__(self, start_worker: Callable[[], WorkerProcess]) -> None:
        self._start_worker = start_worker
        self._seats: list[Seat] = []
        self._room: dict[Seat, int] = {}
        self._waiting: dict[Seat | None, deque[asyncio.Future[Seat]]] = defaultdict(deque)
        self.alone = Seat()  # repeats calls whose worker ended with several at once

    async def open(self, num_workers: int) -> WorkerProcess:
        """Start the workers, and return one of them. Calls wait until then."""
        seats = [Seat() for _ in range(num_workers)]
        self._seats = seats
        workers = await asyncio.gather(*map(self.worker_of, seats))
        self._room = dict.fromkeys(seats, 0)
        for _ in range(_ASYNC_CALLS if workers[0].loaded.is_async else 1):
            for seat in seats:
                self._give(seat)
        self._room[self.alone] = 0
        self._give(self.alone)
        return workers[0]

    async def worker_of(self, seat: Seat) -> WorkerProcess:
        """Return the worker in a seat. If the last one has ended, start a new one."""
        async with seat.lock:
            if seat.worker is not None and seat.worker.is_lost:
                await seat.worker.close()
                seat.worker = None
            if seat.worker is None:
                seat.worker = self._start_worker()
                await seat.worker.load()
            return seat.worker

    @asynccontextmanager
    async def room(self, wanted: Seat | None = None) -> AsyncIterator[Seat]:
        """Wait for room for one call in the seat `wanted`, or in any but `alone`, and hold it."""
        seat = await self._take(wanted)
        try:
            yield seat
        finally:
            self._give(seat)

    async def _take(self, wanted: Seat | None) -> Seat:
        candidates = self._seats if wanted is None else [wanted]
        free = [seat for seat in candidates if self._room.get(seat)]
        if free:
            seat = max(free, key=self._room.__getitem__)
            self._room[seat] -= 1
            return seat
        turn: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        self._waiting[wanted].append(turn)
        return await turn

    def _give(self, seat: Seat) -> None:
        for wanted in (seat,) if seat is self.alone else (seat, None):
            while self._waiting[wanted]:
                turn = self._waiting[wanted].popleft()
                if not turn.done():  # cancelled by the pool's end
                    turn.set_result(seat)
                    return
        self._room[seat] += 1

    async def close(self) -> None:
        workers = [seat.worker for seat in (*self._seats, self.alone)]
        await asyncio.gather(*(worker.close() for worker in workers if worker is not None))
