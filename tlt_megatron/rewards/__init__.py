"""Rewards: score responses in worker processes, and turn rewards into advantages.

This file imports nothing, so that a reward worker starts without torch.
"""
