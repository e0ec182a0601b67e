"""TLT on Megatron: reasoning-RL training that tames the long tail, as one torchrun program."""

__version__ = "0.1.0"
