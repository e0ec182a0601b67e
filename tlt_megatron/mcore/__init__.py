"""Megatron-core behind the interfaces of this project. No other package imports `megatron`."""
