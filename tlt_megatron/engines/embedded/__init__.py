"""The default rollout engine: pure torch, continuous batching, prompts shared among siblings."""
