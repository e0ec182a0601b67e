"""SGLang behind the RolloutEngine protocol: unpatched, in the process of its rank. `sglang` is imported in here alone, lazily."""
