"""What SGLang 0.5.23 imports from its kernel package on a CPU, in pure torch: enough for tiny
models in tests.

The registry's `sglang-kernel` holds CUDA code alone. The tests compare what SGLang computes with
them to transformers and to the embedded engine: log-probabilities, tokens, accept lengths. The
names are SGLang's. What must not be here is `convert_weight_packed`: SGLang takes its presence for
AMX kernels.
"""

from . import attention  # registers torch.ops.sgl_kernel.*
from .cache_locations import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from .speculative import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__version__ = "0.5.23"
__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "attention",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
