"""Optimizer steps of the drafter on a process group, which may change between steps.

A step makes exactly one collective: an all-reduce of one flat buffer with gradients, loss sums,
counts and two flags of the caller. The flags carry what the members must agree on (a stop, a newer
plan), so all members act on them after the same step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.drafter_loss import DraftLoss, draft_loss, make_objective
from tlt_megatron.drafter.packing import DraftBatch
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.runtime.device import QueueLimit
from tlt_megatron.runtime.process_groups import SINGLE, Group

log = logging.getLogger(__name__)

Flags = tuple[float, float]
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterStats:
    """Result of one step over all members; the same on each, but for `is_out_of_memory`."""

    loss: float  # per trained row, weighted sum over unroll steps; nan without rows
    num_tokens: int  # trained rows
    # By unroll step: share of rows with the target's most likely token; mean overlap with its
    # distribution.
    agreement: tuple[float, ...]
    accept_probability: tuple[float, ...]
    flags: Flags  # summed over members
    grad_norm: float  # before clipping
    lr: float
    is_skipped: bool  # no update: a gradient was not finite, or no member had a trained row
    num_updates: int  # updates of the drafter since it was created
    is_out_of_memory: bool = False  # this member's batch did not fit and was left out

    @property
    def accept_length(self) -> float:
        """Return tokens per verify pass of a chain as long as the unroll, bonus token included."""
        total, alive = 1.0, 1.0
        for probability in self.accept_probability:
            alive *= probability
            total += alive
        return total


class PassAbandoned(Exception):
    """Aborts a pass. It leaves a partly filled gradient buffer, which the next step clears."""


@contextmanager
def interruptible(
    model: nn.Module, should_abandon: Callable[[], bool] | None
) -> Iterator[Callable[[], None]]:
    """Make passes of `model` raise PassAbandoned soon after `should_abandon` returns True.

    `should_abandon` is called dozens of times per pass, after each matrix, so it must be fast. On a
    GPU the host waits there, so that it is never more than one matrix ahead. Yields the same check
    for work outside the model.
    """
    if should_abandon is None:
        yield _go_on
        return
    limit_queue = QueueLimit(next(model.parameters()).device)

    def ask(_: Tensor | None = None) -> None:
        limit_queue()
        if should_abandon():
            raise PassAbandoned

    def on_output(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
        ask()
        if output.requires_grad:
            output.register_hook(ask)

    matrices = (module for module in model.modules() if isinstance(module, nn.Linear))
    handles = [module.register_forward_hook(on_output) for module in matrices]
    try:
        yield ask
    finally:
        for handle in handles:
            handle.remove()


_BETAS = 0.9, 0.95  # decay of Adam's moments
_NUM_WARMUP = 20  # updates over the drafter's life in which the learning rate rises
_MAX_GRAD_NORM = 1.0  # larger gradients are scaled down to it
# The average that engines get is over the last tenth of the drafter's updates, at most so many.
_AVERAGED_UPDATES = 100


def _shares(sums: Sequence[float], counts: Sequence[float]) -> tuple[float, ...]:
    return tuple(s / count if count else math.nan for s, count in zip(sums, counts, strict=True))


def _go_on() -> None:
    """Never abandon a pass."""


def check_tensors(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless names and shapes of a drafter's tensors are those of `own`."""
    wrong = sorted(own.keys() ^ tensors.keys())
    wrong += [n for n in own.keys() & tensors.keys() if own[n].shape != tensors[n].shape]
    if wrong:
        raise ValueError(f"drafter state: missing, unknown or misshapen: {', '.join(wrong[:5])}")


class DrafterTrainer:
    """AdamW over the drafter's own parameters. All members must call `step` equally often."""

    def __init__(self, model: DraftModel, section: DrafterSection) -> None:
        is_eagle3 = section.algorithm == "eagle3"
        if is_eagle3 != model.config.is_eagle3:
            raise ValueError(
                f"drafter.algorithm={section.algorithm!r} cannot train a drafter of architecture"
                f" {model.config.architecture!r}: must be {'eagle3' if model.config.is_eagle3 else 'eagle or hass'}"
            )
        self.model = model
        self.group = SINGLE
        self.batch_tokens = section.batch_tokens
        self.num_updates = 0
        self.num_skipped = 0
        self._lr = section.lr
        self._objective = make_objective(section)
        self._parameters = dict(model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=section.lr, betas=_BETAS, weight_decay=0.0, fused=True
        )
        self.average = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._num_weights = sum(p.numel() for p in self._parameters.values())
        # Gradients, loss sum, rows, three sums by unroll step, flags: all that a step reduces.
        num_sums = 2 + 3 * self._objective.num_steps + 2
        self._flat = next(model.parameters()).new_zeros(self._num_weights + num_sums)
        self.device = self._flat.device
        offset = 0
        for parameter in self._parameters.values():
            grad = self._flat[offset : offset + parameter.numel()]
            parameter.grad = grad.view_as(parameter)
            offset += parameter.numel()
            moments = {name: torch.zeros_like(parameter) for name in _MOMENTS}
            step = torch.zeros((), device=parameter.device)
            self._optimizer.state[parameter] = {"step": step, **moments}

    @contextmanager
    def in_group(self, group: Group) -> Iterator[None]:
        """Make the body's steps and broadcasts collectives of `group`."""
        own, self.group = self.group, group
        try:
            yield
        finally:
            self.group = own

    def step(
        self,
        batch: DraftBatch | None,
        read_flags: Callable[[], Flags] = lambda: (0.0, 0.0),
        should_abandon: Callable[[], bool] | None = None,
    ) -> DrafterStats:
        """Train on this member's batch; with None only join the all-reduce. A collective.

        `read_flags` is called after the backward pass, just before the reduction. `should_abandon`
        is called throughout the passes; once it returns True, this member counts as one without a
        batch. So does a member whose GPU memory does not suffice: the batch is lost, not the run.

        The gradient is that of the loss summed over all members divided by their summed rows. It
        does not depend on how rows are distributed. If `batch` is None on all members, only the
        flags are exchanged.
        """
        num_steps, sums, is_out_of_memory = self._objective.num_steps, None, False
        try:
            with interruptible(self.model, should_abandon) as ask:
                sums = self._backward(batch, ask)
        except PassAbandoned:
            pass
        except torch.OutOfMemoryError as error:
            is_out_of_memory = True
            reason = str(error).partition("\n")[0]
            log.warning("drafter batch left out (drafter.batch_tokens): %s", reason)
        if sums is None:  # not in the handlers: an exception holds the activations
            sums = self._backward(None)
        sums[-2:] = sums.new_tensor(read_flags())
        self.group.all_reduce(self._flat)
        # One transfer from the device for all values that the host needs.
        gradients = self._flat[: self._num_weights]
        norm = gradients.norm().unsqueeze(0)
        loss_sum, count, *rest, norm_sum = torch.cat((sums, norm)).tolist()
        counts, agreed, accepted = (rest[i * num_steps : (i + 1) * num_steps] for i in range(3))
        grad_norm = norm_sum / count if count else math.nan
        lr = self._lr * min(1.0, (self.num_updates + 1) / _NUM_WARMUP)
        is_skipped = not math.isfinite(grad_norm)
        if not is_skipped:
            self._update(count, grad_norm, lr)
        elif count:
            self.num_skipped += 1
            log.warning(
                "drafter step skipped: gradient norm %s (%d so far)", grad_norm, self.num_skipped
            )
        return DrafterStats(
            loss=loss_sum / count if count else math.nan,
            num_tokens=round(count),
            agreement=_shares(agreed, counts),
            accept_probability=_shares(accepted, counts),
            flags=(rest[-2], rest[-1]),
            grad_norm=grad_norm,
            lr=lr,
            is_skipped=is_skipped,
            num_updates=self.num_updates,
            is_out_of_memory=is_out_of_memory,
        )

    @contextmanager
    def holding(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the model `weights` in the body, which runs it without gradients."""
        own = {name: parameter.data for name, parameter in self._parameters.items()}
        assert own.keys() == weights.keys()
        try:
            for name, parameter in self._parameters.items():
                parameter.data = weights[name].to(parameter)
            with torch.no_grad(), self._autocast():
                yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = own[name]

    def _autocast(self) -> torch.autocast:
        is_bfloat16 = self.model.lm_head_VD.dtype == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=is_bfloat16)

    def _loss(self, batch: DraftBatch, between_chunks: Callable[[], None] = _go_on) -> DraftLoss:
        with self._autocast():
            return draft_loss(
                self.model, batch.to(self.device), self._objective, between_chunks=between_chunks
            )

    def _backward(self, batch: DraftBatch | None, ask: Callable[[], None] = _go_on) -> Tensor:
        """Fill the flat buffer with this member's gradients and sums. Returns the sums."""
        self._flat.zero_()
        sums = self._flat[self._num_weights :]
        if batch is None:
            return sums
        loss = self._loss(batch, ask)
        if loss.count:
            loss.loss_sum.backward()
        sums[0] = loss.loss_sum.detach()
        sums[1] = loss.count
        num_steps = self._objective.num_steps
        sums[2 : 2 + 3 * num_steps] = torch.cat((loss.counts_K, loss.agreed_K, loss.accepted_K))
        return sums

    def _update(self, count: float, grad_norm: float, lr: float) -> None:
        scale = min(1.0, _MAX_GRAD_NORM / max(grad_norm, 1e-12))
        self._flat[: self._num_weights].mul_(scale / count)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.num_updates += 1
        share = 1 / min(1 + self.num_updates / 10, _AVERAGED_UPDATES)
        weights = [parameter.detach() for parameter in self._parameters.values()]
        torch._foreach_lerp_([*self.average.values()], weights, share)

    def state_dict(self) -> dict[str, Tensor]:
        """Return trainable parameters, their average, moments and counters, not copied; nothing of
        the target.
        """
        state = {f"model.{name}": p.detach() for name, p in self._parameters.items()}
        state |= {f"average.{name}": tensor for name, tensor in self.average.items()}
        for moment in _MOMENTS:
            for name, parameter in self._parameters.items():
                state[f"{moment}.{name}"] = self._optimizer.state[parameter][moment]
        state["num_updates"] = torch.tensor(self.num_updates)
        state["num_skipped"] = torch.tensor(self.num_skipped)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`. ValueError names missing, unknown and misshapen keys."""
        own = self.state_dict()
        weights = ((name, state.get(f"model.{name}")) for name in self._parameters)
        averages = {f"average.{name}": tensor for name, tensor in weights if tensor is not None}
        state = averages | dict(state)  # older states have no average
        check_tensors(state, own)
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.num_updates, self.num_skipped = (int(state[n]) for n in ("num_updates", "num_skipped"))
        for parameter in self._parameters.values():
            self._optimizer.state[parameter]["step"].fill_(self.num_updates)

    @torch.no_grad()
    def broadcast_state(self, source: int = 0) -> None:
        """Broadcast the state of member `source` (a rank within the group) in one collective."""
        if self.group.size == 1:
            return
        state = self.state_dict()
        flat = torch.cat([t.to(self._flat).flatten() for t in state.values()])
        self.group.broadcast(flat, source)
        sizes = [t.numel() for t in state.values()]
        parts = zip(state.items(), flat.split(sizes), strict=True)
        self.load_state_dict({name: part.view_as(tensor) for (name, tensor), part in parts})
