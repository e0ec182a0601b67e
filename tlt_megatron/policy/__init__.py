"""The policy update as an algorithm: batching, loss, trainer. Knows Megatron only as the Protocol
PolicyModel.
"""
