"""The benchmarks: `python -m tools.bench NAME`.

A ratio compares variants that ran side by side in one command.
"""
