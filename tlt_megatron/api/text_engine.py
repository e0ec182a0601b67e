"""`Engine`: text in, text out, with the embedded engine and speculation. For scripts, notebooks and
`tlt serve`.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt_megatron.api.live_batch import Job, LiveBatch, Response
from tlt_megatron.api.prompt_input import PromptReader, TextPrompt, as_number, as_prompts
from tlt_megatron.api.response_text import ResponseText
from tlt_megatron.config.draft_folder import check_drafter
from tlt_megatron.config.hub import fetch_model
from tlt_megatron.config.layout import PAGE_TOKENS
from tlt_megatron.config.model_folder import check_model
from tlt_megatron.config.model_shape import ModelConfig
from tlt_megatron.config.own_layer import OWN, check_own_layer
from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.data.tokenizer import NOTHING, load_tokenizer
from tlt_megatron.drafter.eagle_folder import load_draft_config, load_drafter
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.engines.embedded.memory_plan import draft_slots_of
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.models.hf_io import checksum_tensors, policy_tensors
from tlt_megatron.models.own_drafter import load_own_drafter
from tlt_megatron.runtime.device import select_device
from tlt_megatron.speculation.selector import make_selector
from tlt_megatron.trainer.before.conversation_checks import check_tools
from tlt_megatron.types import Prompt, SamplingParams

WITH_DRAFTER = ("2_1_2", "4_1_4", "6_1_6")
_VERSION = 0  # the weights never change
_LEAST = {"max_tokens": 2, "max_batch_size": 1}  # a prompt and a response have a token each


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One response."""

    prompt_index: int  # its prompt's place in the list that was given
    sample_index: int  # 0 .. num_samples - 1
    text: str  # without special tokens, and without the stop string that ended it
    token_ids: list[int]
    # under the distribution that was sampled: after temperature, top-p and top-k
    logprobs: list[float]
    accept_lengths: list[int]  # tokens out of each verify pass; empty for plain decoding
    finish_reason: str  # "stop" | "length"


def _open_drafter(
    drafter: str | PathLike[str] | None, folder: Path, config: ModelConfig
) -> tuple[tuple[int, ...], Callable[..., DraftModel] | None]:
    """Return the layers whose states a drafter reads, and the function that loads it over embedding
    and LM head. ValueError for one that the model cannot use.
    """
    if drafter is None:
        return (), None
    if drafter == OWN:
        check_own_layer(folder, config, "drafter")
        return (), partial(load_own_drafter, folder, config)
    path, num_layers = fetch_model("drafter", fspath(drafter)), config.num_layers
    check_drafter("drafter", path, config, folder)
    tap_layers = load_draft_config(path, num_layers).aux_layer_ids
    return tap_layers, partial(load_drafter, path, num_layers=num_layers)


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
        strategies: str | Sequence[str] | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_batch_size: int = 8,
        max_tokens: int = 2048,
    ) -> None:
        """`model` and `drafter` are folders or ids of the Hub, or `drafter` is own, the model's MTP
        layer. ValueError for one that cannot be used.

        The engine chooses among `strategies` before each decode pass: a drafter's are 2_1_2, 4_1_4
        and 6_1_6 by default, and ngram_8 needs no drafter. `dtype` "auto" is bfloat16 on a GPU and
        float32 on a CPU. `max_tokens` limits prompt and response together; the KV memory holds
        `max_batch_size` of them.
        """
        for name, size in (("max_tokens", max_tokens), ("max_batch_size", max_batch_size)):
            if as_number(name, size) < _LEAST[name]:
                raise ValueError(f"{name}={size}: must be at least {_LEAST[name]}")
        folder = fetch_model("model", str(model))
        config = check_model("model", folder)
        strategies = [strategies] if isinstance(strategies, str) else strategies
        tap_layers, self._load_drafter = _open_drafter(drafter, folder, config)
        self._strategies = [
            SpeculationStrategy.parse(text)
            for text in (strategies if strategies is not None else WITH_DRAFTER if drafter else ())
        ]
        place = select_device(device)
        if dtype == "auto":
            dtype = "bfloat16" if place.is_cuda else "float32"
        self.max_tokens = min(max_tokens, config.max_position_embeddings)
        self.tokenizer = load_tokenizer(folder)
        half = self.max_tokens // 2
        # rows in lanes, and beside them room for the prompt of the next one
        row_pages = -(-(self.max_tokens + draft_slots_of(self._strategies)) // PAGE_TOKENS)
        self._engine = EmbeddedEngine(
            config,
            RolloutSection(
                dtype=dtype,
                max_batch_size=max_batch_size,
                max_new_tokens=half,
                kv_cache_tokens=(max_batch_size + 1) * row_pages * PAGE_TOKENS,
            ),
            place,
            max_prompt_tokens=self.max_tokens - half,
            tap_layers=tap_layers,
            make_speculation=self._speculation if self._strategies else None,
        )

        def tensors() -> Iterator[tuple[str, Tensor]]:  # one in memory at a time
            return policy_tensors(folder, config, getattr(torch, dtype))

        self._engine.load_weights(
            tensors(), version=_VERSION, checksum=lambda: checksum_tensors(tensors())
        )
        self.batch = LiveBatch(
            self._engine,
            longest=self.max_tokens,
            stop_token_ids=self.tokenizer.stop_token_ids,
            policy_version=_VERSION,
        )
        self._request_numbers = itertools.count()
        self._reader = PromptReader(self.tokenizer, config.vocab_size, self.max_tokens)

    def _speculation(self, embedding_VD: Tensor, lm_head_VD: Tensor) -> Speculation:
        draft = None
        if self._load_drafter is not None:
            model = self._load_drafter(embedding_VD=embedding_VD, lm_head_VD=lm_head_VD)
            draft = DraftInference(model)
        selector = make_selector("cost_model", self._strategies, max_batch_size=1)
        return Speculation(draft, selector, self._strategies)

    def generate(
        self,
        prompts: TextPrompt | Sequence[TextPrompt],
        *,
        max_new_tokens: int = 256,
        num_samples: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> list[Completion]:
        """Return `num_samples` responses to each prompt, those of the first prompt first.

        A prompt is a text, encoded behind BOS, a list of chat messages, or a list, array or tensor
        of token ids. `prompts` is one of them or a list of them. `temperature` 0 is greedy.
        The tokens depend on the prompt's place in the list and on `seed`, and not on what else is
        generated. Without a seed it is random. A response ends before the first of the `stop`
        strings. Several threads may call it: their responses share the running batch. ValueError
        for a prompt that is empty, does not fit into `max_tokens` or is none.
        """
        params = self.sampling(
            seed,
            max_new_tokens=max_new_tokens,
            num_samples=num_samples,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
        )
        over = threading.Event()

        def on_news(job: Job) -> None:
            if job.is_over:
                over.set()

        encoded = self.encode(as_prompts(prompts))
        job = self.job(encoded, params, stop=stop, on_news=on_news)
        if not job.responses:
            return []
        self.batch.submit(job)
        try:
            over.wait()
        finally:  # also at a KeyboardInterrupt
            self.batch.cancel(job)
        if job.error is not None:
            raise RuntimeError(f"the engine has failed: {job.error}") from job.error
        return [self.completion(response) for response in job.responses.values()]

    def sampling(self, seed: int | None, **settings: Any) -> SamplingParams:
        """Return settings with the stop tokens of the model. ValueError for a bad one."""
        given = {"seed": secrets.randbits(63) if seed is None else seed, **settings}
        numbers: dict[str, Any] = {name: as_number(name, value) for name, value in given.items()}
        return SamplingParams(stop_token_ids=self.tokenizer.stop_token_ids, **numbers)

    def job(
        self,
        encoded: Sequence[tuple[int, ...]],
        params: SamplingParams,
        *,
        stop: str | Sequence[str] = (),
        on_news: Callable[[Job], None],
        is_read: bool = False,
        num_top: int | None = None,
    ) -> Job:
        """Return a job for `batch`, which `tlt serve` submits. `encoded` comes from `encode`.
        ValueError as for `generate`.

        `is_read`: the text is needed while it grows, also without stop strings. `num_top`: see
        `Job`.
        """
        params = replace(params, stop=self.tokenizer.stop_strings(stop))

        def make_text() -> ResponseText | None:
            is_needed = is_read or stop
            return ResponseText(self.tokenizer.decode, params.stop) if is_needed else None

        prompts = [self._prompt(*each, params) for each in enumerate(encoded)]
        return Job(prompts, params, make_text, on_news, num_top=num_top)

    def encode(
        self,
        prompts: Sequence[TextPrompt],
        name: str = "prompts[{}]",
        template_kwargs: Mapping[str, object] = NOTHING,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> list[tuple[int, ...]]:
        """Return the token ids of prompts. ValueError for one that is none, by its `name`.

        The chat template gets `template_kwargs` and `tools`.
        """
        if tools:
            template_kwargs = {**template_kwargs, "tools": list(tools)}
            check_tools(self.tokenizer, template_kwargs, "tools")
        return [
            self._reader.encode(prompt, name.format(i), template_kwargs)
            for i, prompt in enumerate(prompts)
        ]

    def _prompt(self, index: int, token_ids: tuple[int, ...], params: SamplingParams) -> Prompt:
        num_tokens = len(token_ids) + params.max_new_tokens
        if not token_ids or num_tokens > self.max_tokens:
            raise ValueError(
                f"prompts[{index}] has {len(token_ids)} tokens, and its response up to"
                f" {params.max_new_tokens}: a prompt must have at least 1, and both at most"
                f" max_tokens={self.max_tokens} together"
            )
        prompt_id = f"request {next(self._request_numbers)}"
        return Prompt(prompt_id=prompt_id, draw_index=index, token_ids=token_ids)

    def completion(self, response: Response) -> Completion:
        """Return a response that has ended."""
        text = response.text
        return Completion(
            prompt_index=response.prompt_index,
            sample_index=response.sample_index,
            text=self.tokenizer.decode(response.token_ids) if text is None else text.text,
            token_ids=response.token_ids,
            logprobs=response.logprobs,
            accept_lengths=response.accept_lengths,
            finish_reason=str(response.finish_reason),
        )

    def close(self) -> None:
        """Free the memory, after whatever is being generated was stopped. The engine cannot be used
        again.
        """
        self.batch.close()
        self._engine.close()
