"""The tokens of a right response, which supervised training imitates. Called by prompts.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlt_megatron.data.tokenizer import Tokenizer
from tlt_megatron.types import Answer, Message

# by which OpenAI, axolotl, ms-swift and slime leave a turn out of the loss
_FLAGS = ("weight", "train", "loss", "loss_mask", "step_loss_mask")


def encode_answer(
    tokenizer: Tokenizer,
    text: str | Sequence[Message],
    label: str,
    template_kwargs: Mapping[str, object],
) -> tuple[tuple[int, ...], Answer]:
    """Return the tokens of the prompt, and of what follows: each turn of the assistant as a policy
    would draw it, up to a stop token, and between turns the observations.

    `label` is the answer to a string, or to messages that do not end with a turn of the assistant.
    A turn with one of `_FLAGS` that is 0 is not imitated. ValueError if all have one, or if the
    chat template writes no stop token, or changes a turn that others follow.
    """
    if isinstance(text, str):
        if not tokenizer.stop_token_ids:
            raise ValueError("the model folder names no eos token, which must end an answer")
        prompt = tokenizer.encode(text)
        end = tokenizer.hf.eos_token_id
        stop = end if isinstance(end, int) else tokenizer.stop_token_ids[0]
        answer = (*_encode_after(tokenizer, prompt[-1:], label), stop)
        return prompt, Answer(answer, (True,) * len(answer))
    messages = list(text)
    if messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": label})
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if turns[0] == 0:
        raise ValueError("the first message is of the assistant: must be what it answers")
    ids: list[int] = []
    mask: list[bool] = []
    written, num_prompt = "", 0
    for i in turns:
        before = tokenizer.render(messages[:i], template_kwargs)
        whole = tokenizer.render(messages[: i + 1], template_kwargs, is_open=False)
        if not (before.startswith(written) and whole.startswith(before)):
            raise ValueError(
                f"the chat template changes what it wrote before message {i}: give a row for each"
                " turn of the assistant"
            )
        ids += _encode_after(tokenizer, ids[-1:], before[len(written) :])
        num_prompt = num_prompt or len(ids)
        mask += [False] * (len(ids) - len(mask))
        turn = _encode_after(tokenizer, ids[-1:], whole[len(before) :])
        ends = [n for n, token in enumerate(turn, start=1) if token in tokenizer.stop_token_ids]
        if not ends:
            raise ValueError(f"the chat template ends message {i} with no stop token")
        ids += turn
        is_imitated = _is_imitated(messages[i], i)
        mask += [is_imitated and n < ends[0] for n in range(len(turn))]
        written = whole
    if True not in mask:
        raise ValueError("no turn of the assistant is to be imitated")
    end = len(mask) - mask[::-1].index(True)
    answer = Answer(tuple(ids[num_prompt:end]), tuple(mask[num_prompt:end]))
    return tuple(ids[:num_prompt]), answer


def _is_imitated(message: Message, index: int) -> bool:
    for name in _FLAGS:
        if message.get(name, 1) not in (0, 1):
            raise ValueError(f"message {index}: {name}={message[name]!r:.80}: must be 0 or 1")
    return all(message.get(name, 1) for name in _FLAGS)


def _encode_after(tokenizer: Tokenizer, last: Sequence[int], text: str) -> tuple[int, ...]:
    """Return the tokens of a text behind the token `last`, or of the begin if there is none."""
    if not last:
        return tuple(tokenizer.encode_texts([text])[0])
    return tokenizer.encode_observation([{"content": text}], last[0], is_chat=False)
