"""Algorithm sections without the shortcuts of the update, to compare against."""

from __future__ import annotations

from tlt_megatron.config.schema import AlgorithmSection


class WithLogprobPass(AlgorithmSection):
    """Log-probs always take a pass of their own, also where the update's pass gives them."""

    has_logprob_pass = property(lambda self: True)


class WithoutSkipping(AlgorithmSection):
    """Responses of zero advantage take a pass in the update."""

    can_skip = property(lambda self: False)


class WithEveryPass(WithLogprobPass, WithoutSkipping):
    """Neither shortcut is taken."""
