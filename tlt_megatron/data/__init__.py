"""Data: the tokenizer with its stop tokens, and the prompts of a run in draw order."""
