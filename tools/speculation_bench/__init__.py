"""The parts of tools/bench_speculation.py: one file for each question that it answers."""
