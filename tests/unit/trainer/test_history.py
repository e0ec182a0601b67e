"""What summary.json says of a run that was resumed."""

from __future__ import annotations

import json

from tlt_megatron.runtime.memory import Phase
from tlt_megatron.trainer.history import RunHistory


def test_the_memory_peak_is_that_of_the_whole_run() -> None:
    before, after = RunHistory(), RunHistory()
    before.add_memory({Phase.UPDATE: 9_000_000_000, Phase.ROLLOUT: 2_000_000_000})
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    after.add_memory({Phase.UPDATE: 1_000_000_000, Phase.ROLLOUT: 3_000_000_000})
    assert after.peak_bytes == {Phase.UPDATE: 9_000_000_000, Phase.ROLLOUT: 3_000_000_000}
    assert after.summary()["memory_peak_gb"] == 9.0
