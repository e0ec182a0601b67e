"""Whether a configuration fits the memory of a rank, and the settings with which it would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tlt_megatron.config.schema import RunConfig
from tlt_megatron.runtime.memory_claim import MemoryLedger, Phase

_MOST_CHANGES = 40
_WORTH = 0.99  # a change must bring the excess below this share to be advised
_SLACK = 64  # tokens: drafts beyond the longest sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration to predict."""

    name: str
    config: RunConfig
    ranks: int
    ledger: MemoryLedger

    @property
    def replicas(self) -> int:
        return self.ranks // self.config.ranks_per_engine

    def problem(self, memory_bytes: float) -> str:
        """Return why it does not fit. Empty if it does, or if the memory is not known (0.0)."""
        try:
            self.ledger.check(int(memory_bytes or 2 * self.ledger.peak_bytes))
        except ValueError as error:
            return str(error)
        return ""

    def excess(self, memory_bytes: int) -> int:
        """Return the bytes that do not fit, of all phases together."""
        usable = self.ledger.usable(memory_bytes)
        return sum(max(0, self.ledger.bytes_in(phase) - usable) for phase in Phase)


Make = Callable[[list[str]], Candidate]  # from settings; ValueError for some that a run refuses


def verdict(candidate: Candidate, memory_bytes: int, make: Make) -> str:
    """Return a line that says whether it fits. If not, another names settings that do."""
    ledger, problem = candidate.ledger, candidate.problem(memory_bytes)
    if not problem:
        free = ledger.usable(memory_bytes) - ledger.peak_bytes
        return f"fits {memory_bytes / 2**30:g} GiB: {ledger.headline(memory_bytes)}, {free >> 20:,} MiB left"
    found = settings_that_fit(candidate, memory_bytes, make)
    advice = (
        f"it fits with {' '.join(found)}"
        if found
        else "nothing was found with which it fits: take a smaller model"
    )
    return f"does not fit {memory_bytes / 2**30:g} GiB: {problem}\n{advice}"


def settings_that_fit(candidate: Candidate, memory_bytes: int, make: Make) -> list[str]:
    """Return the settings that make the candidate fit, or [] if none was found.

    The change that helps most comes first, layouts after everything else, and more ranks last.
    Changes that turn out to be needless are taken back, as far as it then still fits.
    """
    chosen: dict[str, str] = {}
    tries: dict[str, list[str]] = {}  # the values of each setting, the first ones take most
    now = candidate
    for _ in range(_MOST_CHANGES):
        if not now.excess(memory_bytes):
            break
        more_ranks = [("ranks", str(2 * now.ranks))]
        for changes in (_smaller(now.config), _wider(now.config), more_ranks):
            tried = [(key, value, _made(make, chosen | {key: value})) for key, value in changes]
            made = [
                (each.excess(memory_bytes), key, value, each) for key, value, each in tried if each
            ]
            least, key, value, best = min(made, key=lambda row: row[0], default=(0, "", "", now))
            if best is not now and least < _WORTH * now.excess(memory_bytes):
                chosen[key], now = value, best
                tries.setdefault(key, []).append(value)
                break
        else:
            return []
    for key, values in tries.items():
        rest = {other: value for other, value in chosen.items() if other != key}
        for less in (rest, *({**chosen, key: value} for value in values)):
            made = _made(make, less)
            if made and not made.excess(memory_bytes):
                chosen = less
                break
    return [f"{key}={value}" for key, value in chosen.items()]


def _made(make: Make, settings: dict[str, str]) -> Candidate | None:
    try:
        return make([f"{key}={value}" for key, value in settings.items()])
    except ValueError:  # a run would refuse these together
        return None


def _smaller(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield settings that take less memory with the same layout."""
    rollout, mcore = config.rollout, config.mcore
    longest = config.longest_context + rollout.max_new_tokens
    yield "mcore.offload_in_rollouts", "true"
    yield "mcore.recompute", "full"
    kv_tokens = rollout.kv_cache_tokens or rollout.max_batch_size * longest
    for key, value, least in (
        ("rollout.kv_cache_tokens", kv_tokens, longest + _SLACK),
        ("rollout.max_batch_size", rollout.max_batch_size, 8),
        ("mcore.micro_batch_tokens", mcore.micro_batch_tokens, longest),
        ("drafter.batch_tokens", config.drafter.batch_tokens, 64),
    ):
        if value > least:
            yield key, str(max(value // 2, least))


def _wider(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield layouts that spread the models over more ranks."""
    parallel = config.parallel
    if config.rollout.engine == "sglang":
        yield "sglang.engine_args.tp_size", str(2 * config.ranks_per_engine)
    yield "parallel.tensor", str(2 * parallel.tensor)
    yield "parallel.pipeline", str(2 * parallel.pipeline)
    yield "parallel.expert", str(2 * parallel.expert)
