"""Process and device: everything that knows about ranks, clocks, files of a run and the terminal."""
