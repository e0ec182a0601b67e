"""Unpatched SGLang behind the RolloutEngine protocol. Only this package imports `sglang`."""
