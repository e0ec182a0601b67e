"""Whatever way a sequence came into the cache and is read from it, hidden states are those of one plain pass."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny_models import make_tiny_hf
from tlt_megatron.models.attention.kernels import attend_with_lse, merge_attention
from tlt_megatron.models.attention.lanes import LaneTreeAttention, LaneView
from tlt_megatron.models.attention.paged import PagedAttention, PrefillAttention, PrefillSegment
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.models.kv_cache import KvCache, SequenceKv
from tlt_megatron.models.transformer import Transformer

CPU = torch.device("cpu")
PAGE = 4
CLOSE = {"atol": 1e-9, "rtol": 1e-9}


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    """float64; qwen3 has 2 query heads per kv head, this llama one."""
    options = {"num_key_value_heads": 4} if request.param == "llama" else {}
    path: Path = tmp_path_factory.mktemp("model")
    make_tiny_hf(path, request.param, num_layers=2, vocab_size=50, **options)
    model = Transformer(load_model_config(path), torch.float64, CPU)
    for name, tensor in HfReader(path).items():
        model.load_hf(name, tensor)
    model.rotary.reserve(256)
    return model


@pytest.fixture
def cache(model: Transformer) -> KvCache:
    return KvCache(model.config, num_pages=48, page_size=PAGE, dtype=torch.float64, device=CPU)


def tokens(length: int, seed: int) -> Tensor:
    return torch.randint(50, (length,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def plain(model: Transformer, token_ids: Tensor) -> Tensor:
    """[T, D] of one causal pass in a cache of its own."""
    length = token_ids.numel()
    cache = KvCache(model.config, num_pages=1, page_size=length, dtype=model.dtype, device=CPU)
    slots = torch.arange(length)
    segment = PrefillSegment(new_slots_C=slots, context_slots_S=slots)
    return model.forward(token_ids, slots, PrefillAttention(cache, [segment]))


@torch.inference_mode()
def prefill(
    model: Transformer, cache: KvCache, pages: list[int], token_ids: Tensor, start: int = 0
) -> Tensor:
    end = start + token_ids.numel()
    context = cache.slots(pages, 0, end)
    segment = PrefillSegment(new_slots_C=context[start:], context_slots_S=context)
    attention = PrefillAttention(cache, [segment])
    return model.forward(token_ids, torch.arange(start, end), attention)


@pytest.mark.parametrize("cuts", [(0, 21), (0, 5, 21), (0, 8, 9, 20, 21), tuple(range(22))])
def test_prefill_in_chunks_equals_prefill_at_once(
    model: Transformer, cache: KvCache, cuts: tuple[int, ...]
) -> None:
    token_ids = tokens(21, seed=0)
    pages: list[int] = []
    cache.take_prompt_pages(pages, cache.pages_for(21))
    parts = [
        prefill(model, cache, pages, token_ids[start:end], start)
        for start, end in itertools.pairwise(cuts)
    ]
    torch.testing.assert_close(torch.cat(parts), plain(model, token_ids), **CLOSE)


@torch.inference_mode()
def test_segments_packed_in_one_pass_do_not_see_each_other(
    model: Transformer, cache: KvCache
) -> None:
    sequences = [tokens(length, seed=length) for length in (7, 1, 12)]
    segments = []
    for sequence in sequences:
        pages: list[int] = []
        cache.take_prompt_pages(pages, cache.pages_for(sequence.numel()))
        slots = cache.slots(pages, 0, sequence.numel())
        segments.append(PrefillSegment(new_slots_C=slots, context_slots_S=slots))
    hidden = model.forward(
        torch.cat(sequences),
        torch.cat([torch.arange(s.numel()) for s in sequences]),
        PrefillAttention(cache, segments),
    )
    torch.testing.assert_close(hidden, torch.cat([plain(model, s) for s in sequences]), **CLOSE)


@torch.inference_mode()
def test_decoding_over_pages_equals_a_plain_pass(model: Transformer, cache: KvCache) -> None:
    """Three siblings share a prompt of 9 tokens, a fourth sequence has its own; lengths differ, pages move midway."""
    prompts = [tokens(9, seed=1), tokens(3, seed=2)]
    prompt_pages: list[list[int]] = [[], []]
    for prompt, pages in zip(prompts, prompt_pages, strict=True):
        cache.take_prompt_pages(pages, cache.pages_for(prompt.numel()))
        prefill(model, cache, pages, prompt)
    prompt_of = [0, 0, 1, 0]
    responses = [tokens(14, seed=10 + row) for row in range(4)]
    skipped = [0, 5, 2, 0]  # tokens that are there before decoding starts together
    sequences = [
        SequenceKv(num_prompt=prompts[p].numel(), prompt=prompt_pages[p]) for p in prompt_of
    ]
    filler: list[int] = []
    for row, sequence in enumerate(sequences):
        for pages in (filler,) * 4 + (sequence.pages,) * cache.pages_for(skipped[row]):
            cache.take_response_page(pages)
        full = torch.cat((prompts[prompt_of[row]], responses[row][: skipped[row]]))
        if skipped[row]:
            prompt_length = prompts[prompt_of[row]].numel()
            context = torch.cat(
                (
                    cache.slots(sequence.prompt, 0, prompt_length),
                    cache.slots(sequence.pages, 0, skipped[row]),
                )
            )
            new = context[prompt_length:]
            attention = PrefillAttention(
                cache, [PrefillSegment(new_slots_C=new, context_slots_S=context)]
            )
            positions = torch.arange(prompt_length, full.numel())
            model.forward(full[prompt_length:], positions, attention)

    attention = PagedAttention(cache)
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    for step in range(9):
        if step == 4:
            cache.free(filler)
            assert cache.compact()
        offsets = [step + skip for skip in skipped]
        for sequence, offset in zip(sequences, offsets, strict=True):
            if offset % PAGE == 0:
                cache.take_response_page(sequence.pages)
        attention.rebuild(sequences)
        slots = [
            cache.slots(sequence.pages, offset, offset + 1)
            for sequence, offset in zip(sequences, offsets, strict=True)
        ]
        positions = torch.tensor([prompts[prompt_of[r]].numel() + o for r, o in enumerate(offsets)])
        attention.begin_step(torch.cat(slots), positions)
        hidden = model.forward(
            torch.stack([responses[row][offset] for row, offset in enumerate(offsets)]),
            positions,
            attention,
        )
        for row, row_hidden in enumerate(hidden):
            outputs[row].append(row_hidden)
    for row, (response, skip) in enumerate(zip(responses, skipped, strict=True)):
        prompt = prompts[prompt_of[row]]
        full = torch.cat((prompt, response[: skip + 9]))
        expected = plain(model, full)[prompt.numel() + skip :]
        torch.testing.assert_close(torch.stack(outputs[row]), expected, **CLOSE)


@torch.inference_mode()
def test_decoding_in_lanes_equals_a_plain_pass(model: Transformer, cache: KvCache) -> None:
    sequences = [tokens(length, seed=20 + length) for length in (40, 17, 26)]
    starts = [29, 6, 15]
    lane_pages = 11
    for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        pages = list(range(row * lane_pages, (row + 1) * lane_pages))
        prefill(model, cache, pages, sequence[:start])
    view = LaneView(cache, num_rows=3, lane=lane_pages * PAGE)
    outputs = []
    for step in range(11):
        positions = torch.tensor([start + step for start in starts])
        slots = view.slots(positions.unsqueeze(1))
        cache.mark_written(slots)
        bias = view.committed_bias(view.read_length(int(positions.max()) + 1))
        current = torch.stack([s[start + step] for s, start in zip(sequences, starts, strict=True)])
        outputs.append(model.forward(current, positions, LaneTreeAttention(view, slots, bias)))
    for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        expected = plain(model, sequence)[start:]
        torch.testing.assert_close(torch.stack(outputs)[:, row], expected, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_merged_parts_equal_attention_over_the_whole(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 4, 16, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, 3, 30, 16, generator=generator, dtype=torch.float64) * 2
    expected = torch.softmax(query @ key.transpose(-1, -2) / 4, dim=-1) @ value
    parts = [
        attend_with_lse(
            query.to(dtype),
            key[:, :, start:end].to(dtype),
            value[:, :, start:end].to(dtype),
            None,
        )
        for start, end in ((0, 7), (7, 8), (8, 30))
    ]
    out, lse = (torch.stack(tensors, dim=1) for tensors in zip(*parts, strict=True))
    empty = torch.full_like(lse[:, :1], -torch.inf)
    merged = merge_attention(torch.cat((out, out[:, :1]), 1), torch.cat((lse, empty), 1))
    assert merged.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(merged.double(), expected, atol=tolerance, rtol=tolerance)
