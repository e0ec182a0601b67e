"""Lets megatron.core run on a host without CUDA, over gloo. Modules of this package call it before
they import megatron.

Megatron names CUDA literally in about a hundred places. An import hook rewrites those literals in
its sources at import. A test checks how often each of `REWRITES` matches in both supported
versions, so a change is noticed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import re
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor

from tlt_megatron.runtime.device import has_loops

# (pattern, replacement), applied in this order. A replacement has no quotes of its own, because
# some are inside f-strings.
REWRITES: tuple[tuple[str, str], ...] = (
    (r"f(['\"])cuda:\{torch\.cuda\.current_device\(\)\}\1", r"\1cpu\1"),
    (r"torch\.cuda\.current_device\(\)", "torch.get_default_device()"),
    (r"device=(['\"])cuda\1", r"device=\1cpu\1"),
    (r"init_data\((['\"])cuda\1\)", r"init_data(\1cpu\1)"),
    (r"torch\.cuda\.synchronize\(\)", "None"),
    (r"torch\.cuda\.manual_seed\(", "torch.manual_seed("),
    (r"torch\.cuda\.get_rng_state\(\)", "torch.get_rng_state()"),
    # Here the CPU's random state is the one that is forked; its change is no reason to warn.
    (r"torch\.all\(cpu_rng_state == torch\.get_rng_state\(\)\)\.item\(\)", "True"),
    (r"'torch\.cuda\.(Float|Half|BFloat16)Tensor'", r"'torch.\1Tensor'"),
    (r"\.cuda\(\)", ".cpu()"),
    (r"current_stream = torch\.cuda\.current_stream\(\)$", "current_stream = None"),
    (r"self\.fp8 = fp8 is not None$", "self.fp8 = False"),  # it means the name of a format
    (r"^enable_jit_fuser\(\)$", "disable_jit_fuser()"),  # torch.compile: half a minute, no gain
)


def install() -> None:
    """Make later imports of megatron.core run on the CPU. Does nothing if CUDA is available.
    Idempotent.

    RuntimeError if megatron.core is already imported.
    """
    if torch.cuda.is_available() or any(isinstance(f, _Finder) for f in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before tlt_megatron.mcore.cpu.install(); without CUDA it must come first"
        )
    # With a CUDA build of torch and an nvcc, Megatron's imports warn that there is no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    sys.meta_path.insert(0, _Finder())


def rewrite(source: str) -> tuple[str, tuple[int, ...]]:
    """Apply every rewrite to `source`; return the result and the match counts, in the order of
    `REWRITES`.
    """
    counts = []
    for pattern, replacement in REWRITES:
        source, count = re.subn(pattern, replacement, source, flags=re.MULTILINE)
        counts.append(count)
    return source, tuple(counts)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds megatron.core's modules as usual and loads them through `_Loader`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "megatron.core" and not fullname.startswith("megatron.core."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the rewritten source. It neither reads nor writes bytecode files."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname)
        assert source is not None
        rewritten, _ = rewrite(source)
        return compile(rewritten, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ in _PATCHES:
            _PATCHES[module.__name__](module)


def _use_cpu_generator(random: ModuleType) -> None:
    """Make Megatron's random states use the CPU's default generator in place of the GPU's."""

    def get_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> Tensor:  # noqa: ARG001
        return torch.get_rng_state()

    def set_state(state: Tensor, device: object = None, graph_safe: bool = False) -> None:  # noqa: ARG001
        torch.set_rng_state(state)

    vars(random).update(_get_cuda_rng_state=get_state, _set_cuda_rng_state=set_state)


def _use_no_kernel_of_transformer_engine(moe_utils: ModuleType) -> None:
    """Define the name that the module asks for without having imported it."""
    vars(moe_utils).setdefault("te_general_gemm", None)


def _use_no_stream(token_dispatcher: ModuleType) -> None:
    """Leave out the copies to the host. They would also make numbers of the counts, which gloo's
    all-to-all needs.
    """

    def counts_as_numbers(
        self: Any, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                counts = getattr(self, name)
                setattr(self, name, counts.numpy() if isinstance(counts, Tensor) else counts)
        return tokens_per_expert

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = "none"  # for None it would make one
    dispatcher._maybe_dtoh_and_synchronize = counts_as_numbers


def _compile_gate(mlp: ModuleType) -> None:
    """Let the fused gate, which a configuration may ask for, be a compiled loop."""
    plain = mlp.bias_swiglu_impl

    def gate(halves: Tensor, bias: Tensor | None, *rest: bool) -> Tensor:
        if bias is not None or not has_loops(halves.device):
            return plain(halves, bias, *rest)
        # Imported when needed: the installation may lack numba.
        from tlt_megatron.mcore import layer_gradients

        return layer_gradients.Gate.apply(halves)

    vars(mlp).update(bias_swiglu_impl=gate)


def _compile_rotation(rope_utils: ModuleType) -> None:
    """Let the rotation of heads be a compiled loop."""
    plain = rope_utils._apply_rotary_pos_emb_bshd

    def rotate(heads: Tensor, freqs: Tensor, *, mscale: float = 1.0, **settings: bool) -> Tensor:
        if any(settings.values()) or not has_loops(heads.device):
            return plain(heads, freqs, mscale=mscale, **settings)
        from tlt_megatron.mcore import layer_gradients

        return layer_gradients.rotate(heads, freqs, mscale)

    vars(rope_utils).update(_apply_rotary_pos_emb_bshd=rotate)


_PATCHES = {
    "megatron.core.models.common.embeddings.rope_utils": _compile_rotation,
    "megatron.core.transformer.mlp": _compile_gate,
    "megatron.core.tensor_parallel.random": _use_cpu_generator,
    "megatron.core.transformer.moe.moe_utils": _use_no_kernel_of_transformer_engine,
    "megatron.core.transformer.moe.token_dispatcher": _use_no_stream,
}
