"""The parts of tools/bench_gpu.py."""
