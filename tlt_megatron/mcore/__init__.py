"""Megatron-core behind the interfaces of this project; `megatron` is imported nowhere else."""
