"""Data: a tokenizer with its stop tokens, and the prompts of a run in their order."""
