"""Draft trees in SGLang's form: built from its candidate lists or from a mask, and verified against
the target's tokens.

Node 0 of a request is the last committed token. A tree is three [B, Q] tables: the row of each node
in the flat batch, its first child and its next sibling (-1: none).
"""

import itertools

import torch
from torch import Tensor


def _link(
    parents: list[int], first_child_Q: Tensor, next_sibling_Q: Tensor, *, lowest_first: bool
) -> None:
    """Chain the children of every node; SGLang's two builders do it in opposite orders."""
    order = range(1, len(parents))
    children: dict[int, list[int]] = {}
    for node in order if lowest_first else reversed(order):
        if parents[node] >= 0:
            children.setdefault(parents[node], []).append(node)
    for parent, nodes in children.items():
        first_child_Q[parent] = nodes[0]
        for node, sibling in itertools.pairwise(nodes):
            next_sibling_Q[node] = sibling


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    num_nodes: int,
    mask_mode: int,
) -> None:
    """From the kept candidates. Candidate c hangs below group c // topk; group 0 is the root, group
    g the candidate parent_list[g]. A row of `tree_mask` sees all ancestors and itself (mask_mode 1:
    Q x Q blocks alone; 0: behind the committed tokens)."""
    if mask_mode not in (0, 1):
        raise NotImplementedError(f"stand-in tree: {mask_mode=}")
    positions_BQ, flat_mask, mask_at = positions.view(-1, num_nodes), tree_mask.view(-1), 0
    for b, length in enumerate(verified_seq_len.tolist()):
        node_of = {candidate: i + 1 for i, candidate in enumerate(selected_index[b].tolist())}
        groups = parent_list[b].tolist()
        parents = [-1] + [  # -1: kept without its parent, so linked to nobody
            0 if candidate < topk else node_of.get(groups[candidate // topk], -1)
            for candidate in node_of
        ]
        prefix = 0 if mask_mode == 1 else length
        is_seen_QT = torch.zeros(num_nodes, prefix + num_nodes, dtype=torch.bool)
        is_seen_QT[:, :prefix] = True
        for node, parent in enumerate(parents):
            if parent >= 0:
                is_seen_QT[node] = is_seen_QT[parent]
            is_seen_QT[node, prefix + node] = True
        flat_mask[mask_at : mask_at + is_seen_QT.numel()] = is_seen_QT.flatten()
        mask_at += is_seen_QT.numel()
        positions_BQ[b] = length + is_seen_QT[:, prefix:].sum(1) - 1
        retrieve_index[b] = b * num_nodes + torch.arange(num_nodes)
        _link(parents, retrieve_next_token[b], retrieve_next_sibling[b], lowest_first=False)


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    num_nodes: int,
) -> None:
    """From a [B, Q, Q] mask of ancestors: the parent is the last node that a row sees before
    itself.
    """
    is_ancestor_BQQ = tree_mask.view(batch_size, num_nodes, num_nodes).bool().tril(-1)
    depth_BQ = is_ancestor_BQQ.sum(-1)
    positions.view(batch_size, num_nodes).copy_(verified_seq_len.unsqueeze(1) + depth_BQ)
    retrieve_index.copy_(torch.arange(batch_size * num_nodes).view(batch_size, num_nodes))
    nodes = torch.arange(num_nodes)
    parents_BQ = torch.where(is_ancestor_BQQ, nodes, -1).amax(-1)
    retrieve_next_token.fill_(-1)
    retrieve_next_sibling.fill_(-1)
    for b, parents in enumerate(parents_BQ.tolist()):
        _link(parents, retrieve_next_token[b], retrieve_next_sibling[b], lowest_first=True)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk from the root to the child that equals the target's token, as long as there is one.

    `predicts` gets the target's token at every row of the path, `accept_index` the rows,
    `accept_token_num` the number of accepted drafts (the bonus token not counted).
    """
    for b in range(candidates.shape[0]):
        node, path = 0, [0]
        while True:
            wanted = int(target_predict[b, node])
            predicts[int(retrive_index[b, node])] = wanted
            child = int(retrive_next_token[b, node])
            while child >= 0 and int(candidates[b, child]) != wanted:
                child = int(retrive_next_sibling[b, child])
            if child < 0 or len(path) == accept_index.shape[1]:
                break
            node = child
            path.append(node)
        accept_index[b, : len(path)] = retrive_index[b, path].to(accept_index.dtype)
        accept_token_num[b] = len(path) - 1
