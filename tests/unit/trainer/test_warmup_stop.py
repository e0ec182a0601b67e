"""A rank that is told to stop during the drafter's warm-up: all ranks stop, and the first step draws what it always draws."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tlt_megatron.data.prompts import PromptSampler, PromptSet
from tlt_megatron.engines.base import GenerationStopped
from tlt_megatron.runtime.process_groups import group_of
from tlt_megatron.trainer.warmup import warm_up_drafter
from tlt_megatron.types import Prompt, SamplingParams


def test_all_ranks_stop_and_the_sampler_is_where_it_was() -> None:
    """Rank 1 is told to in the second round. The drafter here has no method that trains it."""
    rows = tuple(Prompt(prompt_id=str(i), draw_index=i, token_ids=(1, 2)) for i in range(5))
    seeds: list[int] = []

    def generate(prompts: object, params: SamplingParams, **_: object) -> None:
        seeds.append(params.seed)
        if len(seeds) == 2 and dist.get_rank() == 1:
            raise GenerationStopped("told to stop")

    def body() -> tuple[list[str], bool]:
        world = group_of(dist.group.WORLD)
        sampler = PromptSampler(
            PromptSet(path="p", rows=rows, fingerprint="f"), shuffle=True, seed=3
        )
        before = sampler.state_dict()
        worker = SimpleNamespace(
            engine=SimpleNamespace(generate=generate),
            phases=lambda *_: nullcontext(),
            replicas=world,
            share_of=lambda prompts: prompts[world.rank :: world.size],
            should_stop=lambda: False,
        )
        drafter = SimpleNamespace(add_features=None)
        params = SamplingParams(num_samples=1, max_new_tokens=1, seed=7)
        with pytest.raises(GenerationStopped, match="warm-up"):
            warm_up_drafter(drafter, worker, sampler, params, num_prompts=4, seconds=1e9)
        assert sampler.state_dict() == before
        return [prompt.prompt_id for prompt in sampler.next_batch(4)], 7 in seeds

    expected = PromptSampler(
        PromptSet(path="p", rows=rows, fingerprint="f"), shuffle=True, seed=3
    ).next_batch(4)
    ids = [prompt.prompt_id for prompt in expected]
    assert run_ranks(2, body) == [(ids, False)] * 2
