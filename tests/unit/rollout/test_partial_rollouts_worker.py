"""Responses that are carried over several policies: every token and log-prob is of the policy that
the record names.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from tests.rollout_stand_ins import Rewards, make_worker
from tests.routes import open_mixture
from tests.tiny_models import make_tiny_hf
from tests.unit.engines.conftest import engine_over
from tlt_megatron.models.hf_io import HfReader, checksum_tensors
from tlt_megatron.rollout.batch_rules import BatchPlan, BatchRules
from tlt_megatron.rollout.open_responses import load_carried, save_carried
from tlt_megatron.rollout.rollout_worker import Collected
from tlt_megatron.runtime.process_groups import SINGLE
from tlt_megatron.speculation.sampling import request_seed, sample
from tlt_megatron.stop_strings import StopStrings
from tlt_megatron.types import FinishReason, Prompt, Rollout, SamplingParams, ScoredGroup

# Four tokens share a letter, so a string may begin in one round and end in the next.
STRINGS = StopStrings(("bcd", "fgh", "kk"), lambda token_id: bytes([97 + token_id // 4]))
PARAMS = SamplingParams(
    num_samples=3, max_new_tokens=40, top_p=0.95, stop_token_ids=(3, 4, 5), stop=STRINGS, seed=7
)
RULES = BatchRules(num_prompts=4, round_tokens=6, num_drawn=6)
NUM_STEPS = 5


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("model"), "qwen3", num_layers=2, vocab_size=48)


def tensors_of(path: Path, version: int) -> list[tuple[str, Tensor]]:
    """Return the weights of another policy for each version."""
    return [(n, t.double() * (1 + 0.1 * version)) for n, t in HfReader(path).items()]


def prompt_at(draw: int) -> Prompt:
    return Prompt(prompt_id=f"p{draw}", draw_index=draw, token_ids=(6 + draw % 40, 9, 11))


def run(path: Path, folder: Path, **settings: bool) -> tuple[list[Collected], Rewards]:
    """Run several steps. Between them the policy changes, and carried responses go through a
    checkpoint.
    """
    engine = engine_over(path, max_batch_size=16, **settings)
    rewards = Rewards(float)  # the reward is the length
    worker = make_worker(engine, rewards)
    num_drawn = 0

    def draw(count: int) -> list[Prompt]:
        nonlocal num_drawn
        num_drawn += count
        return [prompt_at(i) for i in range(num_drawn - count, num_drawn)]

    steps: list[Collected] = []
    carried: tuple[ScoredGroup, ...] = ()
    for version in range(NUM_STEPS):
        tensors = tensors_of(path, version)
        engine.load_weights(
            tensors, version=version, checksum=lambda tensors=tensors: checksum_tensors(tensors)
        )
        plan = BatchPlan(rules=RULES, draw=draw, carried=carried)
        prompts = draw(RULES.num_first(carried))
        steps.append(worker.collect(prompts, PARAMS, version, plan=plan))
        save_carried(folder, steps[-1].carried, rank=0)
        carried = load_carried(folder, prompt_at, SINGLE)
    return steps, rewards


def rollouts(steps: list[Collected]) -> list[Rollout]:
    return [r for step in steps for g in step.groups for r in g.rollouts]


def test_tokens_and_logprobs_are_those_of_the_policies_that_drew_them(
    path: Path, tmp_path: Path
) -> None:
    steps, rewards = run(path, tmp_path)
    found = rollouts(steps)
    assert len({r.key for r in found}) == len(found) == 4 * 3 * NUM_STEPS
    assert len(set(rewards.keys)) == len(rewards.keys) >= len(found)
    assert max(len(r.versions) for r in found) >= 3  # cut twice
    for step in steps:
        for group in step.groups:
            assert group.is_complete
            assert group.rewards == tuple(r.token_ids.numel() for r in group.rollouts)
            assert all(dict(each) == {"own": 1.0} for each in group.details)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    logits_of = {}
    for version in range(NUM_STEPS):
        model.load_state_dict(dict(tensors_of(path, version)), strict=False)
        for i, rollout in enumerate(found):
            ids = torch.tensor(rollout.prompt_ids + tuple(rollout.token_ids.tolist()))
            with torch.inference_mode():
                all_TV = model(ids.unsqueeze(0)).logits[0, len(rollout.prompt_ids) - 1 : -1]
            logits_of[version, i] = all_TV
    for i, rollout in enumerate(found):
        versions = [version for version, count in rollout.versions for _ in range(count)]
        assert versions == sorted(versions)
        assert len(versions) == rollout.token_ids.numel()
        assert rollout.policy_version == versions[-1]
        logits_TV = torch.stack([logits_of[v, i][t] for t, v in enumerate(versions)])
        seed = request_seed(PARAMS.seed, rollout.draw_index, rollout.sample_index)
        seeds_T, positions_T = torch.full((len(versions),), seed), torch.arange(len(versions))
        drawn = sample(logits_TV, seeds_T, positions_T, PARAMS)
        assert rollout.token_ids.tolist() == drawn.token_ids_B.tolist()
        for name in ("logprobs", "policy_logprobs"):
            expected = getattr(drawn, f"{name}_B")
            torch.testing.assert_close(getattr(rollout, name), expected, rtol=0, atol=1e-5)
        assert rollout.kept.counts.numel() == len(versions)
        ids = rollout.token_ids.tolist()
        count, state = STRINGS.run(b"", ids)
        assert count == len(ids)
        has_stopped = state is None or ids[-1] in PARAMS.stop_token_ids
        assert (rollout.finish_reason is FinishReason.STOP) == has_stopped


def test_routes_are_those_of_the_pass_that_drew_the_newest_tokens(tmp_path: Path) -> None:
    """It began with a prefill of all tokens before them, under the newest policy."""
    path = make_tiny_hf(tmp_path / "model", "qwen3_moe", num_layers=2, vocab_size=48)
    steps, _ = run(path, tmp_path, routing_replay=True)
    model, routes_of = open_mixture(path)
    weights = {name: tensor.clone() for name, tensor in model.named_parameters()}
    for version in range(NUM_STEPS):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name] * (1 + 0.1 * version))
        for rollout in rollouts(steps):
            if rollout.policy_version == version:
                assert rollout.routes is not None
                assert torch.equal(rollout.routes.long().sort().values, routes_of(rollout))
    assert all(
        r.routes is None
        for s in steps
        for g in s.carried
        for r in g.rollouts
        if r.finish_reason is FinishReason.CUT
    )
