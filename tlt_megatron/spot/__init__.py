"""The drafter during a run: idle ranks train it until the last rollout has ended."""
