"""Process and device: everything that handles ranks, clocks, the files of a run and the
terminal.
"""
