"""Rollout engines behind the protocol in `base.py`; one engine per rollout replica."""
