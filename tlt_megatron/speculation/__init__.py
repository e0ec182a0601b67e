"""Sampling and speculative decoding as functions of tensors; knows no model and no engine."""
