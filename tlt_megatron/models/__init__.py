"""Decoder-only models in pure torch, their Hugging Face files, and the paged KV cache."""
