"""`Engine`: text in, text out, with the embedded engine and speculation. For scripts, notebooks and
`tlt serve`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

import torch
from torch import Tensor

from tlt_megatron.config.hub import fetch_model
from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.data.tokenizer import load_tokenizer
from tlt_megatron.drafter.eagle_folder import load_draft_config, load_drafter
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.hf_io import checksum_tensors, policy_tensors
from tlt_megatron.runtime.device import select_device
from tlt_megatron.speculation.selector import make_selector
from tlt_megatron.types import Message, Prompt, Rollout, SamplingParams

TextPrompt = str | Sequence[Message] | Sequence[int]
WITH_DRAFTER = ("2_1_2", "4_1_4", "6_1_6")
_VERSION = 0  # of the weights: they never change


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One response."""

    prompt_index: int  # of its prompt in the list that was given
    sample_index: int  # 0 .. num_samples - 1
    text: str  # without special tokens
    token_ids: list[int]
    # of the distribution that was sampled: after temperature, top-p and top-k
    logprobs: list[float]
    accept_lengths: list[int]  # tokens out of each verify pass; empty for plain decoding
    finish_reason: str  # "stop" | "length"


class Engine:
    """Generates with a model of this machine or of the Hugging Face Hub. Speculation changes no
    token.

    Example: `Engine("Qwen/Qwen3-0.6B").generate(["12+7="], max_new_tokens=64)[0].text`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        drafter: str | PathLike[str] | None = None,
        strategies: Sequence[str] | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_batch_size: int = 8,
        max_tokens: int = 2048,
    ) -> None:
        """`model` and `drafter` are folders or ids of the Hub. ValueError for one that cannot be
        used.

        The engine chooses among `strategies` before each decode pass: a drafter's are 2_1_2, 4_1_4
        and 6_1_6 by default, and ngram_8 needs no drafter. `dtype` "auto" is bfloat16 on a GPU and
        float32 on a CPU. `max_tokens` limits prompt and response together; the KV memory holds
        `max_batch_size` of them.
        """
        folder = fetch_model("model", str(model))
        self._drafter = None if drafter is None else fetch_model("drafter", fspath(drafter))
        self._strategies = [
            SpeculationStrategy.parse(text)
            for text in (strategies if strategies is not None else WITH_DRAFTER if drafter else ())
        ]
        place = select_device(device)
        if dtype == "auto":
            dtype = "bfloat16" if place.is_cuda else "float32"
        config = load_model_config(folder, "model")
        self.max_tokens = min(max_tokens, config.max_position_embeddings)
        self.tokenizer = load_tokenizer(folder)
        half = self.max_tokens // 2
        self._engine = EmbeddedEngine(
            config,
            RolloutSection(dtype=dtype, max_batch_size=max_batch_size, max_new_tokens=half),
            place,
            max_prompt_tokens=self.max_tokens - half,
            tap_layers=load_draft_config(self._drafter).aux_layer_ids if self._drafter else (),
            make_speculation=self._speculation if self._strategies else None,
        )

        def tensors() -> Iterator[tuple[str, Tensor]]:  # one in memory at a time
            return policy_tensors(folder, config, getattr(torch, dtype))

        self._engine.load_weights(
            tensors(), version=_VERSION, checksum=lambda: checksum_tensors(tensors())
        )

    def _speculation(self, embedding_VD: Tensor, lm_head_VD: Tensor) -> Speculation:
        draft = None
        if self._drafter is not None:
            model = load_drafter(self._drafter, embedding_VD=embedding_VD, lm_head_VD=lm_head_VD)
            draft = DraftInference(model)
        selector = make_selector("cost_model", self._strategies, max_batch_size=1)
        return Speculation(draft, selector, self._strategies)

    def generate(
        self,
        prompts: Sequence[TextPrompt],
        *,
        max_new_tokens: int = 256,
        num_samples: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
    ) -> list[Completion]:
        """Return `num_samples` responses to each prompt, those of the first prompt first.

        A prompt is a text, encoded behind BOS, chat messages, or token ids. `temperature` 0 is
        greedy. The tokens depend on the prompt's place in the list and on `seed`, and not on what
        else is generated. ValueError for a prompt that is empty or does not fit into `max_tokens`.
        """
        params = SamplingParams(
            num_samples=num_samples,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop_token_ids=self.tokenizer.stop_token_ids,
            seed=seed,
        )
        requests = [self._request(index, prompt, params) for index, prompt in enumerate(prompts)]
        groups = self._engine.generate(requests, params, policy_version=_VERSION)
        return [self._completion(rollout) for group in groups for rollout in group.rollouts]

    def _request(self, index: int, prompt: TextPrompt, params: SamplingParams) -> Prompt:
        token_ids = _given_ids(prompt) or self.tokenizer.encode(prompt)  # pyright: ignore[reportArgumentType]
        num_tokens = len(token_ids) + params.max_new_tokens
        if not token_ids or num_tokens > self.max_tokens:
            raise ValueError(
                f"prompts[{index}] has {len(token_ids)} tokens: must have 1 to {self.max_tokens - params.max_new_tokens}"
                f" with max_new_tokens={params.max_new_tokens} and max_tokens={self.max_tokens}"
            )
        return Prompt(prompt_id=str(index), draw_index=index, token_ids=token_ids)

    def _completion(self, rollout: Rollout) -> Completion:
        token_ids = rollout.token_ids.tolist()
        return Completion(
            prompt_index=rollout.draw_index,
            sample_index=rollout.sample_index,
            text=self.tokenizer.decode(token_ids),
            token_ids=token_ids,
            logprobs=rollout.logprobs.tolist(),
            accept_lengths=list(rollout.accept_lengths),
            finish_reason=str(rollout.finish_reason),
        )

    def close(self) -> None:
        """Free the memory. The engine cannot be used again."""
        self._engine.close()


def _given_ids(prompt: TextPrompt) -> tuple[int, ...]:
    """Return the token ids of a prompt of token ids; () for a text or messages."""
    return () if isinstance(prompt, str) else tuple(p for p in prompt if isinstance(p, int))
