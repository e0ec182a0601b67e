"""Pages are taken from two ends, freed and moved together. Their data and the lists that name them
follow.
"""

from __future__ import annotations

import dataclasses

import psutil
import torch

from tests.tiny_models import tiny_config
from tlt_megatron.models.kv_cache import KvCache

CONFIG = tiny_config(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4)


def test_compaction_moves_pages_with_their_data_and_their_lists() -> None:
    cache = KvCache(
        CONFIG, num_pages=64, page_size=2, dtype=torch.float32, device=torch.device("cpu")
    )
    sequences: list[list[int]] = [[] for _ in range(40)]
    prompts: list[list[int]] = [[] for _ in range(12)]
    for number, pages in enumerate(sequences + prompts):
        taken = (
            cache.take_response_page(pages) if number < 40 else cache.take_prompt_pages(pages, 1)
        )
        assert taken
        slots = cache.slots(pages, 0, 1)  # the first of two positions
        for layer in range(2):
            cache.write(layer, slots, torch.full((1, 2, 4), float(100 * layer + number)))
        cache.mark_written(slots)
    assert not cache.compact()
    kept = sequences[30:] + prompts[11:]
    for pages in sequences[:30] + prompts[:11]:
        cache.free(pages)
    assert cache.compact()
    assert (cache.response_end, cache.prompt_start) == (10, 63)
    for number, pages in zip([*range(30, 40), 51], kept, strict=True):
        slots = cache.slots(pages, 0, 2)
        for layer in range(2):
            assert (cache.layers[layer][:, slots[0]] == 100 * layer + number).all()
        assert cache.bias_T[slots].tolist() == [0.0, -torch.inf]
    assert not cache.compact()


def test_slots_take_no_memory_before_they_are_written_to() -> None:
    """An engine makes a pool for full responses in every step, and writes to a part of it."""
    config, process = dataclasses.replace(CONFIG, head_dim=256), psutil.Process()
    before = process.memory_info().rss
    cache = KvCache(
        config, num_pages=1 << 16, page_size=4, dtype=torch.float32, device=torch.device("cpu")
    )
    room = cache.kv_LKTH.nbytes
    assert room == 1 << 30
    assert not cache.kv_LKTH[:, :, ::4096].any()
    assert process.memory_info().rss - before < room / 4
    cache.kv_LKTH[:, :, :8] = 1.0
    assert cache.kv_LKTH.sum() == 2 * 2 * 8 * 256
