"""Decoder-only models in pure torch: their config, their Hugging Face files, and the forward pass over a paged KV cache."""
