"""Unpatched SGLang behind the RolloutEngine protocol, in its rank's process. Only this package imports `sglang`, and lazily."""
