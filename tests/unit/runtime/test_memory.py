"""The ledger's sums, its table and what it refuses."""

from __future__ import annotations

import pytest

from tlt_megatron.runtime.memory_claim import MemoryClaim, MemoryLedger, Phase

MIB = 1 << 20
LEDGER = MemoryLedger(
    [
        MemoryClaim(name="policy", num_bytes=600 * MIB, lower="parallel.tensor=1"),
        MemoryClaim(
            name="kv",
            num_bytes=300 * MIB,
            phases=frozenset({Phase.ROLLOUT}),
            lower="rollout.max_batch_size=64",
        ),
        MemoryClaim(
            name="activations",
            num_bytes=100 * MIB,
            phases=frozenset({Phase.UPDATE}),
            lower="mcore.micro_batch_tokens=8192",
        ),
        MemoryClaim(name="nothing", num_bytes=0),
    ]
)


def test_a_claim_counts_in_the_phases_that_hold_it() -> None:
    assert LEDGER.bytes_in(Phase.ROLLOUT) == 900 * MIB
    assert LEDGER.bytes_in(Phase.UPDATE) == 700 * MIB
    assert LEDGER.bytes_in(Phase.CHECKPOINT) == 600 * MIB
    assert (LEDGER.peak_phase, LEDGER.peak_bytes) == (Phase.ROLLOUT, 900 * MIB)


def test_the_table_has_a_row_for_each_claim_and_the_sums() -> None:
    head, *rows, sums = [line.split() for line in LEDGER.lines()]
    assert head[-6:] == [str(phase) for phase in Phase]
    assert [row[0] for row in rows] == ["policy", "kv", "activations"]
    assert sums == ["sum", "600", "900", "600", "700", "600", "600"]


def test_host_memory_is_added_up_and_refused_apart() -> None:
    away = MemoryClaim(name="away", num_bytes=200 * MIB, in_host=True, lower="mcore.offload=True")
    ledger = MemoryLedger([*LEDGER.claims, away])
    assert ledger.peak_bytes == LEDGER.peak_bytes
    rows, known = ([line.split() for line in lines] for lines in (ledger.lines(), LEDGER.lines()))
    assert rows[: len(known)] == known
    assert [row[:2] for row in rows[len(known) :]] == [
        ["in", "host"],
        ["away", "200"],
        ["sum", "200"],
    ]
    assert not LEDGER.of_host().claims
    ledger.of_host().check(220 * MIB)
    with pytest.raises(ValueError, match=r"^host memory: .* 200 MiB .*change mcore\.offload=True"):
        ledger.of_host().check(200 * MIB, "host ")


def test_a_phase_that_does_not_fit_is_refused_with_the_settings_of_its_largest_claims() -> None:
    LEDGER.check(950 * MIB)
    message = (
        r"rollout phase takes 900 MiB of a rank, 893 MiB are usable: "
        r"change parallel\.tensor=1 or rollout\.max_batch_size=64"
    )
    with pytest.raises(ValueError, match=message):
        LEDGER.check(940 * MIB)
