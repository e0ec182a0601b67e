"""Rollout engines that implement the protocol in `base.py`. Each rollout replica has one engine."""
