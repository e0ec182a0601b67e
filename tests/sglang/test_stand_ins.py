"""The stand-ins against definitions: attention against torch on plain tensors, trees against a walk, tables against slices."""

from __future__ import annotations

import ctypes

import sgl_kernel
import torch
import torch.nn.functional as F
from sgl_kernel.speculative import (
    build_tree_kernel_efficient_cpu,
    reconstruct_indices_from_tree_mask,
    verify_tree_greedy_cpu,
)

LENGTHS = [5, 3]
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8


def make_memory() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of 20 slots, and which slots two requests own."""
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 20, NUM_KV_HEADS, HEAD_DIM, generator=generator)
    req_to_token = torch.zeros(3, 16, dtype=torch.int32)
    req_to_token[0, :7] = torch.tensor([4, 9, 2, 17, 5, 12, 6])
    req_to_token[2, :5] = torch.tensor([1, 8, 3, 10, 11])
    return key, value, req_to_token


def attend_by_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_seen: torch.Tensor
) -> torch.Tensor:
    """One softmax per row and head, written out. query [P, N, H], key and value [T, K, H]."""
    out = torch.empty_like(query)
    for head in range(NUM_HEADS):
        group = head // (NUM_HEADS // NUM_KV_HEADS)
        scores = query[:, head] @ key[:, group].T * HEAD_DIM**-0.5
        weights = F.softmax(scores.masked_fill(~is_seen, -torch.inf), dim=-1)
        out[:, head] = weights @ value[:, group]
    return out


def test_decode_attention_is_softmax_over_the_request_and_stores_the_new_key() -> None:
    key, value, req_to_token = make_memory()
    query = torch.randn(2, NUM_HEADS, HEAD_DIM)
    new_key, new_value = torch.randn(2, 2, NUM_KV_HEADS * HEAD_DIM)
    out = torch.empty_like(query)
    requests, lengths, slots = torch.tensor([0, 2]), torch.tensor(LENGTHS), torch.tensor([5, 3])
    torch.ops.sgl_kernel.decode_attention_cpu(
        *(query, key, value, 1.0, 1.0, out, new_key, new_value, slots, torch.empty(0)),
        *(req_to_token, requests, lengths, HEAD_DIM**-0.5, 0.0, False, 0, None, None),
    )
    assert torch.equal(key[5], new_key[0].view(NUM_KV_HEADS, HEAD_DIM))
    for row, (request, length) in enumerate(zip([0, 2], LENGTHS, strict=True)):
        owned = req_to_token[request, :length].long()
        seen = torch.ones(1, length, dtype=torch.bool)
        expected = attend_by_definition(query[row : row + 1], key[owned], value[owned], seen)
        torch.testing.assert_close(out[row : row + 1], expected)


def test_extend_attention_is_causal_or_follows_the_tree() -> None:
    key, value, req_to_token = make_memory()
    new_lengths = [3, 2]
    query = torch.randn(5, NUM_HEADS, HEAD_DIM)
    trees = [torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool(), torch.eye(2).bool()]
    for tree in (None, torch.cat([t.flatten() for t in trees])):
        out = torch.empty_like(query)
        torch.ops.sgl_kernel.extend_attention_cpu(
            *(query, None, None, out, key, value, 1.0, 1.0, req_to_token, torch.tensor([0, 2])),
            *(torch.tensor(LENGTHS), torch.tensor(new_lengths), torch.tensor([0, 3]), 3),
            *(HEAD_DIM**-0.5, 0.0, False, 0, None, None, tree, True),
        )
        start = 0
        for request, length, num_new, own in zip([0, 2], LENGTHS, new_lengths, trees, strict=True):
            owned = req_to_token[request, :length].long()
            old = torch.ones(num_new, length - num_new, dtype=torch.bool)
            new = torch.ones(num_new, num_new).tril().bool() if tree is None else own
            expected = attend_by_definition(
                query[start : start + num_new], key[owned], value[owned], torch.cat([old, new], 1)
            )
            torch.testing.assert_close(out[start : start + num_new], expected)
            start += num_new


def empty_links(num_requests: int, num_nodes: int) -> list[torch.Tensor]:
    """Row numbers, first children, next siblings."""
    return [torch.full((num_requests, num_nodes), -1) for _ in range(3)]


def parents_of(first_child: list[int], next_sibling: list[int]) -> list[int]:
    """The tree behind the links."""
    parents = [-1] * len(first_child)
    for node, child in enumerate(first_child):
        while child >= 0:
            parents[child] = node
            child = next_sibling[child]
    return parents


def test_a_built_tree_has_the_parents_depths_and_mask_of_its_candidates() -> None:
    # topk 2, 3 steps: candidates 0 1 | 2 3 (below 0) 4 5 (below 1) | of the picked 3 and 4: 6 7, 8 9.
    parent_list = torch.tensor([[-1, 0, 1, 3, 4]])
    selected = torch.tensor([[0, 1, 3, 4, 8]])
    index, child, sibling = empty_links(1, 6)
    mask, positions = torch.zeros(36, dtype=torch.bool), torch.zeros(6, dtype=torch.int64)
    build_tree_kernel_efficient_cpu(
        parent_list,
        selected,
        torch.tensor([10]),
        mask,
        positions,
        index,
        child,
        sibling,
        2,
        3,
        6,
        1,
    )
    assert parents_of(child[0].tolist(), sibling[0].tolist()) == [-1, 0, 0, 1, 2, 4]
    assert positions.tolist() == [10, 11, 11, 12, 12, 13]
    assert mask.view(6, 6)[5].tolist() == [True, False, True, False, True, True]
    assert index[0].tolist() == list(range(6))


def test_full_masks_see_the_prefix_too() -> None:
    index, child, sibling = empty_links(2, 2)
    mask, positions = torch.zeros(2 * (3 + 2) + 2 * (1 + 2)).bool(), torch.zeros(4).long()
    build_tree_kernel_efficient_cpu(
        *(torch.tensor([[-1], [-1]]), torch.tensor([[0], [0]]), torch.tensor([3, 1]), mask),
        *(positions, index, child, sibling, 1, 1, 2, 0),
    )
    assert mask[:10].view(2, 5).tolist() == [[True] * 4 + [False], [True] * 5]
    assert mask[10:].view(2, 3).tolist() == [[True] * 2 + [False], [True] * 3]


def test_an_orphan_is_linked_to_nobody() -> None:
    """Ties can make SGLang keep a candidate without its parent; its kernel then leaves the node out."""
    index, child, sibling = empty_links(1, 3)
    mask, positions = torch.zeros(9, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    build_tree_kernel_efficient_cpu(
        *(torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 4]]), torch.tensor([2]), mask, positions),
        *(index, child, sibling, 2, 2, 3, 1),
    )
    assert parents_of(child[0].tolist(), sibling[0].tolist()) == [-1, 0, -1]


def test_links_from_a_mask_are_those_of_the_tree() -> None:
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()
    positions, links = torch.zeros(4, dtype=torch.int64), empty_links(1, 4)
    reconstruct_indices_from_tree_mask(
        mask.flatten(), torch.tensor([7]), positions, *links, batch_size=1, num_nodes=4
    )
    assert positions.tolist() == [7, 8, 8, 9]
    assert links[1][0].tolist() == [1, 3, -1, -1]
    assert links[2][0].tolist() == [-1, 2, -1, -1]


def test_verification_walks_along_the_targets_tokens() -> None:
    # Request 0: root -> {1, 2}, 2 -> 3. Request 1: a chain whose first draft is wrong.
    child = torch.tensor([[1, -1, 3, -1], [1, 2, 3, -1]])
    sibling = torch.tensor([[-1, 2, -1, -1], [-1, -1, -1, -1]])
    candidates = torch.tensor([[50, 10, 20, 30], [50, 11, 12, 13]])
    target = torch.tensor([[20, 99, 30, 40], [77, 12, 13, 14]])
    predicts, accepted = torch.zeros(8, dtype=torch.int32), torch.full((2, 3), -1)
    count = torch.zeros(2, dtype=torch.int32)
    verify_tree_greedy_cpu(
        *(predicts, accepted, count, candidates, torch.arange(8).view(2, 4), child, sibling, target)
    )
    assert count.tolist() == [2, 0]
    assert accepted.tolist() == [[0, 2, 3], [4, -1, -1]]
    assert predicts[[0, 2, 3]].tolist() == [20, 30, 40]
    assert int(predicts[4]) == 77


def test_verification_stops_at_the_width_of_its_result() -> None:
    chain = torch.tensor([[1, 2, 3, -1]])
    accepted, count = torch.full((1, 2), -1), torch.zeros(1, dtype=torch.int32)
    verify_tree_greedy_cpu(
        *(torch.zeros(4, dtype=torch.int32), accepted, count, torch.tensor([[0, 1, 2, 3]])),
        *(torch.arange(4).view(1, 4), chain, torch.full((1, 4), -1), torch.tensor([[1, 2, 3, 4]])),
    )
    assert (accepted.tolist(), count.tolist()) == ([[0, 1]], [1])


def test_slot_tables_are_read_and_written_by_request() -> None:
    _, _, req_to_token = make_memory()
    requests, starts, ends = torch.tensor([0, 2]), torch.tensor([1, 2]), torch.tensor([3, 5])
    out = torch.zeros(5, dtype=torch.int64)
    sgl_kernel.assign_extend_cache_locs_cpu(requests, req_to_token, starts, ends, out, 16)
    assert out.tolist() == [9, 2, 3, 10, 11]
    sgl_kernel.assign_req_to_token_pool_cpu(requests, req_to_token, starts, ends, out + 1, 16)
    assert req_to_token[0, 1:3].tolist() == [10, 3]
    assert req_to_token[2, 2:5].tolist() == [4, 11, 12]
    drafts = torch.zeros(2, 2, dtype=torch.int64)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(
        requests, req_to_token, torch.tensor([5, 3]), drafts, 16, 2, 1
    )
    assert drafts.tolist() == [[12, 6], [11, 12]]


def test_every_branch_reads_its_own_draft_slots() -> None:
    req_to_token = torch.arange(20).view(1, 20)
    table = sgl_kernel.build_draft_decode_metadata_cpu(
        req_to_token, torch.tensor([0]), torch.tensor([4]), 2, 3, 20
    )
    assert table[:, :7].tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 7, 8, 9]]


def test_bonus_tokens_accepted_slots_and_rotation() -> None:
    bonus = torch.zeros(2, dtype=torch.int64)
    sgl_kernel.fill_bonus_tokens_cpu(torch.arange(6), torch.tensor([2, 3]), bonus, 3)
    assert bonus.tolist() == [1, 5]
    slots = torch.zeros(3, dtype=torch.int64)
    sgl_kernel.fill_accept_out_cache_loc_cpu(
        torch.tensor([0, -1, 2, 1]), torch.tensor([40, 50, 60]), slots
    )
    assert slots.tolist() == [40, 60, 50]
    ids = torch.tensor([1, 2, 3, 4, 5])
    sgl_kernel.rotate_input_ids_cpu(
        ids, torch.tensor([0, 3]), torch.tensor([3, 2]), torch.tensor([8, 9])
    )
    assert ids.tolist() == [2, 3, 8, 5, 9]


def test_kv_rows_move_in_every_buffer_even_where_they_overlap() -> None:
    buffers = [torch.arange(12.0).view(4, 3), torch.arange(8.0).view(4, 2) + 100]
    before = [buffer.clone() for buffer in buffers]
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers])
    strides = torch.tensor([ctypes.sizeof(ctypes.c_float) * buffer.shape[1] for buffer in buffers])
    sgl_kernel.copy_all_layer_kv_cache_cpu(
        pointers, strides, torch.tensor([1, 2]), torch.tensor([2, 3])
    )
    for now, then in zip(buffers, before, strict=True):
        assert torch.equal(now[[1, 2]], then[[2, 3]])
        assert torch.equal(now[[0, 3]], then[[0, 3]])
