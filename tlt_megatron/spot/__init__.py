"""Spot training: ranks that have finished their rollouts train the drafter until the last rank has finished (DESIGN 5.4)."""
