"""Checkpoints of a run with their manifest, the identity of a run, its folder."""
