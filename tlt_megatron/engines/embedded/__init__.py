"""The default rollout engine: pure torch, continuous batching, prompt KV shared by siblings."""
