"""Stage 0: what the machine is and has, what its memory and its matrix units do, and whether
kernels and graphs start.
"""

from __future__ import annotations

import importlib.util
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress

from tools.gpu.machine import Figures, Machine, relative_error, seconds_of

_QUERY = "name,memory.total,driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu"


def machine(machine: Machine) -> Iterator[Figures]:
    """Yield the GPU's properties, and what `tlt doctor` finds."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        yield {"nvidia_smi": found.stdout.strip()}
    import torch

    yield {"torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    if not machine.is_cpu:
        gpu = torch.cuda.get_device_properties(0)
        yield {
            "gpu": gpu.name,
            "sms": gpu.multi_processor_count,
            "gib": gpu.total_memory / 2**30,
            "capability": f"{gpu.major}.{gpu.minor}",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # pyright: ignore[reportAttributeAccessIssue]
        }
    from tlt_megatron.doctor import examine

    for finding in examine():
        yield {finding.name: f"{finding.found} {finding.advice}".strip()}


def rates(machine: Machine) -> Iterator[Figures]:
    """Yield the ceilings that all other figures are compared with. Copies count bytes read and
    bytes written.
    """
    import torch

    with machine.gpu() as device:
        gpu = device.torch_device
        size = machine.pick(4 << 30, 1 << 16)
        source = torch.empty(size // 2, dtype=torch.bfloat16, device=gpu).normal_()
        target = torch.empty_like(source)
        yield {"copy_gb_s": 2e-9 * size / seconds_of(lambda: target.copy_(source))}
        for name, is_pinned in (("pageable", False), ("pinned", True)):
            part = source[: size // 8]
            host = torch.empty(part.shape, dtype=part.dtype, pin_memory=is_pinned)
            seconds = seconds_of(lambda host=host, part=part: host.copy_(part))
            yield {f"to_host_{name}_gb_s": 1e-9 * part.nbytes / seconds}
        n = machine.pick(8192, 32)
        a, b = (torch.empty(n, n, dtype=torch.bfloat16, device=gpu).normal_() for _ in range(2))
        yield {"product_tflop_s": 2e-12 * n**3 / seconds_of(lambda: a @ b)}
        # The largest product of a 7B layer at batch 1 reads its weights once; 16 of them exceed the
        # cache.
        shape = machine.pick((16, 2 * 18944, 3584), (2, 16, 8))
        weights = torch.empty(shape, dtype=torch.bfloat16, device=gpu).normal_()
        for batch_size in (1, 8, 64):
            x = torch.empty(batch_size, shape[2], dtype=torch.bfloat16, device=gpu).normal_()

            def multiply(x: torch.Tensor = x) -> None:
                for weight in weights.unbind(0):
                    torch.nn.functional.linear(x, weight)

            gb_s = 1e-9 * weights.nbytes / seconds_of(multiply)
            yield {f"weights_gb_s_at_{batch_size}": gb_s}


def launches(machine: Machine) -> Iterator[Figures]:
    """Yield whether a kernel of Triton and a captured graph run, and what a launch costs."""
    import torch

    with machine.gpu() as device:
        x = torch.zeros(1024, device=device.torch_device)
        count = machine.pick(200, 3)

        def add() -> None:
            for _ in range(count):
                x.add_(1.0)

        yield {"eager_us": 1e6 * seconds_of(add) / count}
        memory = device.graph_memory()
        assert memory is not None
        started = time.perf_counter()
        replay = memory.capture(add)
        yield {"capture_ms": 1e3 * (time.perf_counter() - started)}
        x.zero_()
        replay()
        assert x[0].item() == count, f"a replay of {count} additions gives {x[0].item()}"
        yield {"in_graph_us": 1e6 * seconds_of(replay) / count}
        yield {"read_back_us": 1e6 * seconds_of(lambda: x[0].item())}
    if importlib.util.find_spec("triton") is None:
        yield {"triton": "missing"}
        return
    device = machine.kernel_device()
    from tlt_megatron.models.layer_kernels import normalize

    rows = torch.randn(8, machine.pick(3584, 64), device=device.torch_device)
    weight, eps = torch.ones_like(rows[0]), torch.tensor(1e-6, device=device.torch_device)
    started = time.perf_counter()
    found = normalize(rows, weight, eps)
    device.synchronize()
    yield {"triton_first_s": time.perf_counter() - started}
    expected = torch.nn.functional.rms_norm(rows.double(), rows.shape[1:], eps=1e-6)
    yield {"triton_error": relative_error(found, expected)}
    yield {"triton_us": 1e6 * seconds_of(lambda: normalize(rows, weight, eps))}


def transformer_engine(_machine: Machine) -> Iterator[Figures]:
    """Yield whether Megatron can use the installed Transformer Engine."""
    from tlt_megatron.mcore.transformer_engine import installed_version, problem

    yield {"version": installed_version()}
    if found := problem():
        raise RuntimeError(found)
