"""Sampling and speculative decoding as functions of tensors, independent of models and engines."""
