"""What the engine takes from SGLang's answer to a request, without SGLang."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tlt_megatron.engines.sglang.answers import VERIFY_PASSES
from tlt_megatron.engines.sglang.sglang_responses import make_rollout
from tlt_megatron.stop_strings import StopStrings
from tlt_megatron.types import FinishReason, Prompt, Rollout, SamplingParams

PROMPT = Prompt(prompt_id="p7", draw_index=7, token_ids=(3, 4))


def answer(
    logprobs: list[tuple[float, int, None]],
    *,
    token_ids: tuple[int, ...] = (5, 6, 2),
    top: list[tuple[float, int, None]] | None = None,
    temperature: float = 1.0,
    reason: str = "stop",
    version: str = "1",
    prompt: Prompt = PROMPT,
    **further: object,
) -> Rollout:
    params = SamplingParams(
        num_samples=2, max_new_tokens=8, temperature=temperature, stop_token_ids=(2,), top_k=9
    )
    meta = {
        "finish_reason": {"type": reason},
        "weight_version": version,
        "output_token_logprobs": logprobs,
        "output_top_logprobs": None if top is None else [[entry, entry] for entry in top],
        **further,
    }
    return make_rollout(prompt, 1, params, 1, {"output_ids": list(token_ids), "meta_info": meta})


RIGHT = [(-0.5, 5, None), (-0.25, 6, None), (-1.0, 2, None)]


def test_logprobs_belong_to_the_tokens_of_the_response() -> None:
    rollout = answer(RIGHT, top=[(-1.5, 5, None), (-1.25, 6, None), (-2.0, 2, None)])
    assert rollout.logprobs.tolist() == [-0.5, -0.25, -1.0]
    assert rollout.policy_logprobs.tolist() == [-1.5, -1.25, -2.0]
    assert rollout.finish_reason == FinishReason.STOP
    assert answer(RIGHT, temperature=0.0).logprobs.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (RIGHT[:2], "2 log-probabilities for 3 tokens: at position 2 of token None, must be 2"),
        ([*RIGHT, (-0.1, 9, None)], "4 .* for 3 tokens: at position 3 of token 9, must be None"),
        ([RIGHT[0], RIGHT[2], RIGHT[1]], "3 .* for 3 tokens: at position 1 of token 2, must be 6"),
    ],
)
def test_logprobs_of_other_tokens_are_an_error(entries: list, text: str) -> None:
    for answers in ({"logprobs": entries}, {"logprobs": RIGHT, "top": entries}):
        with pytest.raises(RuntimeError, match=f"response 1 to prompt 'p7' has {text}"):
            answer(**answers)


def test_a_response_that_was_given_up_or_has_other_weights_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"response 1 to prompt 'p7' ended after 3 tokens"):
        answer(RIGHT, reason="abort")
    with pytest.raises(RuntimeError, match=r"ended after 2 tokens with .*stop"):
        answer(RIGHT[:2], token_ids=(5, 6))
    with pytest.raises(RuntimeError, match=r"weights of version 4: must be 1"):
        answer(RIGHT, version="4")


def test_an_answer_is_cut_after_the_token_that_completes_a_stop_string() -> None:
    """SGLang goes on to its stop token or limit. What is left is the begin of the whole answer."""
    texts = {5: "a", 6: "bc", 2: ""}
    stop = StopStrings(["xy", "ab"], lambda token_id: texts[token_id].encode())
    top = [(-1.5, 5, None), (-1.25, 6, None), (-2.0, 2, None)]
    passes = {VERIFY_PASSES: [(0, 1), (1, 2)]}
    for reason in ("stop", "length"):
        ids = (5, 6, 2) if reason == "stop" else (5, 6, 5)
        entries = [(value, i, None) for (value, _, _), i in zip(RIGHT, ids, strict=True)]
        tops = [(value, i, None) for (value, _, _), i in zip(top, ids, strict=True)]
        given = {"token_ids": ids, "top": tops, "reason": reason, **passes}
        whole = answer(entries, **given)
        cut = answer(entries, prompt=replace(PROMPT, stop=stop), **given)
        assert cut.finish_reason is FinishReason.STOP
        assert cut.token_ids.tolist() == [5, 6]
        assert cut.logprobs.tolist() == whole.logprobs[:2].tolist()
        assert cut.policy_logprobs.tolist() == whole.policy_logprobs[:2].tolist()
        assert cut.kept is not None
        assert (cut.kept.token_ids.tolist(), cut.kept.counts.tolist()) == ([5, 6], [1, 1])
        assert (whole.passes, cut.passes) == (((2, 1), (3, 2)), ((2, 1), (3, 1)))
        assert cut.versions == ((1, 2),)
    other = StopStrings(["ba"], lambda token_id: texts[token_id].encode())
    assert answer(RIGHT, prompt=replace(PROMPT, stop=other)).token_ids.tolist() == [5, 6, 2]
