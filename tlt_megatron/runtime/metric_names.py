"""Every metric of a run: its names, its unit, and what it is.

The page of metrics is made from this table (docs/site_pages.py), and tests compare the metrics of
whole runs with it.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

# A row is `names | unit | meaning`; an indented line continues it. {a,b} stands for either text, *
# for any text.
_TABLES = {
    "Rewards, lengths and evaluations": """
step | | RL steps done: the key of a row
critic/{rewards,score}/{mean,max,min} | reward | of all responses of the step; both are without a KL penalty
rollout/solve_{all,none} | share of prompts | all responses are right (`reward.right_score`); none has a score above 0.
  Without punishments of long responses, such a group has no advantage under `grpo`
response_length/{mean,max,min,median} | tokens | of the policy, without observations
response_length/clip_ratio | share | responses that were cut at `rollout.max_new_tokens`
prompt_length/{mean,max,min} | tokens |
prompt_length/clip_ratio | share | prompts of exactly `data.max_prompt_tokens`; longer ones are left out of the data
  set, never cut
eval/accuracy | reward | mean reward on `data.eval`; the accuracy for rewards of 0 and 1. With several files this
  and the next three are means over the files, each with the same weight
eval/pass@* | share of prompts | chance that one of that many responses is right (`reward.right_score`); unbiased
eval/maj@* | share of prompts | the most frequent answer of that many responses is right
eval/response_length/mean | tokens |
eval/*/{accuracy,pass@*,maj@*,response_length/mean} | as above | with several files: of each by its name, as
  slime's `eval/<name>`
val-core/*/reward/{mean@*,best@*/mean} | reward | by data source, as verl: mean of all responses,
  and of the best of each prompt. verl's `best@N/mean` is lower where they differ: it draws the N with
  replacement (`bootstrap_metric`). Rows without a data source get the name of their file
reward/*/*/mean | | by data source: mean of each further number of the reward function, and of each score of
  `reward.function`
val-aux/*/*/{mean@*,best@*/mean} | | the same in evaluations
train/num_gen_batches | rounds | of generation in this step, with `algorithm.dynamic_sampling` or partial rollouts
rollout/extra_draws | prompts | drawn beyond `rollout.num_prompts` in this step
rollout/kept_set_size | tokens | that `rollout.top_p` and `rollout.top_k` kept at a position, mean
rollout/kept_set_missing_share | share of tokens | whose kept set has more than 512 tokens, so that training takes
  the whole vocabulary
rollout/kept_group_share | share of drawn groups | that differ in the metric of dynamic sampling
rollout/filler_groups | groups | without a difference that fill an incomplete batch
rollout/carried_responses | responses | that have not ended and go on in the next step, with
  `rollout.partial_rollout_tokens`
rollout/policy_age/{mean,max} | RL steps | from the policy that drew a token to the policy that is trained, over the
  tokens of the batch
reward/*/overlong_reward/mean | reward | mean punishment of long responses
rollout/num_turns/{mean,max} | turns | of the policy in a conversation, with `rollout.environment`
rollout/tool_seconds | s | in the function of `rollout.environment`, summed over its answers
rollout/tool_{errors,timeouts} | calls | of that function which failed
""",
    "Update": """
actor/pg_loss | | policy-gradient loss, as aggregated
actor/entropy | nats per token | of the sampled distribution (`rollout.temperature`, and the tokens that
  `rollout.top_p` and `rollout.top_k` kept), over the responses of the update
rollout/entropy | nats per token | minus the mean log-prob of the sampled tokens: an estimate over all responses
actor/skipped_response_share | share | responses of zero advantage or masked (`algorithm.mask_truncated`), which take no pass in the
  update; the metrics of tokens here are of the others
actor/ppo_kl | nats per token | old minus new log-prob; 0 with one update per batch
actor/pg_clipfrac | share of tokens | where the clip decided
actor/pg_clipfrac_lower | share of tokens | where `algorithm.dual_clip` decided
actor/kl_loss | nats per token | estimate of KL to the reference, with `algorithm.kl_coef` in the loss
actor/tis_weight | | mean importance weight, with `algorithm.tis_cap`
rollout_corr/rollout_is_ratio_fraction_high | share of tokens | whose weight was cut to `algorithm.tis_cap`
rollout_corr/rollout_rs_masked_fraction | share of tokens | masked by `algorithm.rollout_rs`
actor/grad_norm | | before clipping
critic/advantages/{mean,max,min} | | of the policy's tokens; with `gae` after whitening
critic/returns/{mean,max,min} | | what a critic is to learn; without one the advantages
critic/vf_loss | | loss of the values, as aggregated; this and the next rows with `algorithm.advantage=gae`
critic/vf_clipfrac | share of tokens | where the clipped value decided
critic/vpred_mean critic/values/{mean,max,min} | | values in the updates; before them
critic/vf_explained_var | share | of the variance of the returns that the values before the updates explain
critic/{grad_norm,lr,num_skipped_updates} | | as those of the actor, which has none in steps of
  `critic.warmup_steps`
actor/lr | | learning rate of the newest optimizer step
actor/num_{updates,skipped_updates} | | optimizer steps of this RL step; those whose gradient was not finite
train/train_rollout_logprob_{abs_diff,abs_diff_max} | nats | between the log-probs of training and of the rollout
  engine, for the sampled tokens
training/rollout_probs_diff_{mean,max,std} | | the same as probabilities
training/epoch | | of the data set at the next draw, from 0
training/{policy_version,global_step} | | version of the policy after the step, which is the number of RL steps
  done
""",
    "Time and memory": """
timing_s/step | s | the whole RL step
timing_s/{gen,reward,wait,publish_drafter,values,old_log_prob,update_critic,update_actor,update_weights} | s | its
  phases, each of the slowest rank
timing_s/save_checkpoint | s | the checkpoint before this step, which `timing_s/step` does not contain
perf/{time_per_step,total_num_tokens} | s, tokens | verl's names of `timing_s/step` and `rollout/num_tokens`
perf/cpu_memory_used_gb | GB | host memory in use by all processes, on the machine of rank 0
perf/mfu/{actor,actor_infer} | share | model FLOPs of the update, and of the log-prob passes before it, over the
  bfloat16 peak of all GPUs and the time of the phase. On GPUs of `trainer/flops.py` with `model.dtype=bfloat16`; a
  CPU and other GPUs have no known peak. The count is verl's, but skipped responses are not counted
perf/throughput | tokens/s | prompt and response tokens of the batch over the whole step and the number of ranks
timing_per_token_ms/{gen,values,update_critic,update_actor} | ms | rollout over response tokens; the others over
  prompt and response tokens
perf/rollout_tokens_per_s | tokens/s | generated tokens over the time of the slowest engine
memory/{peak,planned}_gb/* | GB | of each phase, of the fullest rank: the peak (resident memory on a CPU,
  reserved memory on a GPU), and what the memory ledger planned
rollout/num_tokens | tokens | prompt and response tokens of the batch
rollout/preemptions | | responses that gave up their KV memory and were computed again
rollout/{graph_replays,eager_passes} | passes | with a captured graph, and without
reward/num_{errors,timeouts} | calls | of the reward function
""",
    "Speculation and spot training": """
rollout/spec_accept_length | tokens | per request and drafting pass, the bonus token included
rollout/spec_accepted_at/* | share | drafting passes that accepted at this draft depth
rollout/spec_token_share | share | response tokens that came from drafting passes
rollout/unspeculated_passes | passes | plain passes although speculation is on, because a draft did not fit
drafter/live_{accept_length,token_share} | tokens, share | as above, of the learned drafter alone
drafter/{version,is_published,num_refused} | | of the engine's drafter; 1 if this step published one; candidates
  refused so far
drafter/holdout_accept_length/{candidate,published} drafter/holdout_rows | tokens | of both drafters, on
  responses that neither was trained on
drafter/{loss,accept_length} | nats, tokens | in training
drafter/num_updates | optimizer steps | over the drafter's life
bubble/idle_s | rank-seconds | from the end of each rank's rollouts to the end of the last rank's
bubble/used_s | rank-seconds | of these, in drafter training
bubble/stall_s | s | that the step waited for drafter work
spot/{epochs,updates} | | sessions and optimizer steps of this RL step
spot/groups_formed | | communicators that the sessions of this RL step made, on the rank with the most; with NCCL
  four are kept between steps
spot/preempt_ms | ms | from the end of the last rollout to the end of the sessions
spot/{broken,out_of_memory} | | sessions that lost a member; batches left out for lack of memory
""",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """Metrics that are explained together."""

    names: tuple[str, ...]  # * stands for any text
    unit: str
    meaning: str


def metric_tables() -> dict[str, list[MetricRow]]:
    """Return the rows of each section."""
    tables = {}
    for section, table in _TABLES.items():
        rows = [line.split("|") for line in table.replace("\n  ", " ").strip().split("\n")]
        tables[section] = [
            MetricRow(names=expand_names(names), unit=unit.strip(), meaning=meaning.strip())
            for names, unit, meaning in rows
        ]
    return tables


def expand_names(patterns: str) -> tuple[str, ...]:
    """Return the names of patterns: "a/{b,c} d" gives a/b, a/c and d."""
    names: list[str] = []
    for pattern in patterns.split():
        choices = [part.split(",") for part in re.findall(r"{(.*?)}", pattern)]
        form = re.sub(r"{.*?}", "{}", pattern)
        names += [form.format(*chosen) for chosen in itertools.product(*choices)]
    return tuple(names)
