"""The policy's tokenizer: the one of the model folder, with the tokens that end a response.

Used by `prompts.load_prompts`, by the rollout worker (stop tokens) and before scoring
(decode_turn). A string prompt gets the tokens that the tokenizer puts before a text, such as BOS. A
chat template writes its own.
"""

from __future__ import annotations

import copy
import functools
import inspect
import keyword
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tlt_megatron.config.model_shape import read_eos_token_ids
from tlt_megatron.data.token_bytes import TokenBytes
from tlt_megatron.data.tokenizer_file import as_in_file
from tlt_megatron.saved_files import read_json
from tlt_megatron.stop_strings import StopStrings, check_stop_strings
from tlt_megatron.types import Message

log = logging.getLogger(__name__)

NOTHING: Mapping[str, object] = MappingProxyType({})
_MAX_NAMED = 6  # tokens in a message
_MOST_STOPS = 64  # sets of stop strings whose steps are kept
_TAG = re.compile(r"[<\[]/?\w+[>\]]")  # <think>, [THINK]; not <|im_start|>
# goes before a template, whose arguments can be no functions; a date that stands before it wins
_PIN_DATE = (
    "{% set date_parts = date_parts | default(DATE) %}{% macro strftime_now(format) %}{% set text = namespace(now=format) %}"
    "{% for part, value in date_parts.items() %}{% set text.now = text.now | replace(part, value) %}{% endfor %}"
    "{{ text.now }}{% endmacro +%}"
)
_DATE_PARTS = [
    f"%{sign}{part}" for part in "aAbBcCdDeFfgGhHIjklmMnpPrRsStTuUVwWxXyYzZ" for sign in ("", "-")
]
_TURN = "(turn)"  # stands for a turn of the policy, whose tokens are never encoded again
# Texts that may stand before another one, of which at least one does not merge with it.
_ANCHORS = ("\n", "a", ".", "0", "\u00e9")
_CUT = "\ufdd0"  # no character: stands within the name of a control token that is meant as text


class Tokenizer:
    """Encodes and decodes. `stop_token_ids` is sorted; `hf` is transformers', of folder `path`."""

    def __init__(
        self,
        hf: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        path: Path,
        template_date: str = "",
    ):
        """`template_date` (2026-11-28) is the day that a chat template writes; empty: today."""
        self.hf = hf
        self._date = datetime.fromisoformat(template_date) if template_date else None
        self.stop_token_ids = tuple(sorted(set(stop_token_ids)))
        self.path = path
        self._fast = hf.backend_tokenizer if isinstance(hf, PreTrainedTokenizerFast) else None
        if self._fast is not None:  # tokenizer.json may turn both on
            self._fast.no_truncation()
            self._fast.no_padding()

    @property
    def has_chat_template(self) -> bool:
        """Return whether lists of messages can be encoded."""
        return bool(self.hf.chat_template)

    @property
    def definition(self) -> str:
        """Return all that its tokens depend on, as text."""
        if self._fast is None:
            return repr(sorted(self.hf.get_vocab().items()))
        return self._fast.to_str()

    def encode(
        self, prompt: str | Sequence[Message], template_kwargs: Mapping[str, object] = NOTHING
    ) -> tuple[int, ...]:
        """Return the token ids of a text, or of messages with the generation prompt. ValueError
        for messages without a chat template, or that the template refuses.
        """
        ids = self.encode_texts([self.render(prompt, template_kwargs)])[0]
        return tuple(self.with_first(ids) if isinstance(prompt, str) else ids)

    @functools.cached_property
    def first_tokens(self) -> list[int]:
        """Return the tokens that the tokenizer puts before a text, such as BOS."""
        plain, whole = self.encode_texts(["a"])[0], list(self.hf("a")["input_ids"])
        starts = range(len(whole) - len(plain) + 1)
        return whole[: next((i for i in starts if whole[i : i + len(plain)] == plain), 0)]

    def with_first(self, token_ids: list[int]) -> list[int]:
        """Return the tokens of a string prompt, which begin with `first_tokens`, once."""
        first = self.first_tokens
        has_them = not token_ids or token_ids[: len(first)] == first
        return token_ids if has_them else first + token_ids

    def notes(self, *, has_strings: bool) -> list[str]:
        """Return lines on what this tokenizer does to string prompts and to texts of rewards."""
        found = []
        if has_strings and self.first_tokens:
            names = " ".join(self.hf.convert_ids_to_tokens(self.first_tokens))
            found.append(
                f"string prompts begin with {names}, which the tokenizer puts before a text: prompts without it"
                " need another tokenizer_config.json"
            )
        roles = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
        named = {str(getattr(self.hf, f"{role}_token", "")) for role in roles}
        tags = [
            token.content
            for number, token in self.hf.added_tokens_decoder.items()
            if token.special and _TAG.fullmatch(token.content)
            if number not in self.stop_token_ids and token.content not in named
        ]
        if tags:
            shown = ", ".join(tags[:_MAX_NAMED]) + (", ..." if len(tags) > _MAX_NAMED else "")
            found.append(
                f"the tokenizer marks {shown} as special: the texts that reward functions get have them all the same"
            )
        return found

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        if self._fast is None:
            return [self.hf.encode(text, add_special_tokens=False) for text in texts]
        # without the offsets of characters, which transformers would make: 1.6 times as fast
        encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def render(
        self,
        prompt: str | Sequence[Message],
        template_kwargs: Mapping[str, object] = NOTHING,
        *,
        is_open: bool = True,
    ) -> str:
        """Return a string unchanged, messages through the template, and with `is_open` the begin of
        the next turn. ValueError as in `encode`, or for an argument that it does not have.
        """
        if isinstance(prompt, str):
            return prompt
        if not self.has_chat_template:
            raise ValueError(
                f"the tokenizer in {self.path} has no chat template, which a list of messages needs: "
                "give string prompts, or put chat_template.jinja into the folder"
                f"{', not chat_template.json' * (self.path / 'chat_template.json').is_file()}"
            )
        self._check_template_kwargs(template_kwargs)
        messages: list[Any] = [dict(message) for message in prompt]
        given: dict[str, Any] = dict(template_kwargs)
        try:
            if self._pinned_date:
                template = self.hf.get_chat_template(tools=given.get("tools"))
                given["chat_template"] = self._pinned_date + template
            text = self.hf.apply_chat_template(
                messages, add_generation_prompt=is_open, tokenize=False, **given
            )
        except Exception as error:  # a template is a program of the folder
            raise ValueError(f"the chat template of {self.path} refuses it: {error}") from error
        assert isinstance(text, str)  # the text of one conversation
        return text

    def _check_template_kwargs(self, names: Iterable[str]) -> None:
        own = inspect.signature(self.hf.apply_chat_template).parameters.keys()
        for name in names:
            if name in ("messages", "strftime_now", "date_parts", *(own - {"tools", "documents"})):
                raise ValueError(f"chat_template_kwargs.{name}: is set by the trainer")
            if not self._has_argument(name):
                raise ValueError(
                    f"the chat template of {self.path} has no argument {name!r}, so it would have no effect"
                )

    def _has_argument(self, name: str) -> bool:
        is_name = name.isidentifier() and not keyword.iskeyword(name)
        return is_name and bool(re.search(rf"\b{name}\b", str(self.hf.chat_template)))

    @functools.cached_property
    def _pinned_date(self) -> str:
        """Return what makes a template write the date of the run; "" if it needs nothing."""
        if self._date is None or "strftime_now" not in str(self.hf.chat_template):
            return ""
        parts = {part: self._date.strftime(part) for part in _DATE_PARTS}
        return _PIN_DATE.replace("DATE", f"{parts!a}")

    def pinned_template(self, template_kwargs: Mapping[str, object]) -> Any:
        """Return the `chat_template` of `hf` with these arguments and the date as its defaults."""
        begin = self._pinned_date + "".join(
            f"{{% set {name} = {name} | default({value!a}) +%}}"
            for name, value in template_kwargs.items()
            if self._has_argument(name)
        )
        found = self.hf.chat_template
        if isinstance(found, dict):
            return {name: begin + template for name, template in found.items()}
        return begin + found if found else found

    def pin_template(self, folder: Path, template_kwargs: Mapping[str, object]) -> None:
        """Write `pinned_template` into the folder of a model that has this tokenizer. So each
        server, too, writes prompts as the run did.
        """
        pinned = copy.copy(self.hf)
        pinned.chat_template = self.pinned_template(template_kwargs)
        if pinned.chat_template != self.hf.chat_template:
            pinned.save_chat_templates(folder, {}, None, save_jinja_files=True)

    def check_turns(self, template_kwargs: Mapping[str, object] = NOTHING) -> None:
        """Raise ValueError if the template's text after a turn depends on the turns before it, or
        if its tokens are not those in the whole conversation.
        """
        prompt = {"role": "user", "content": "x"}
        turn = [{"role": "assistant", "content": _TURN}, {"role": "user", "content": "y"}]
        short = self.render([prompt, *turn], template_kwargs).split(_TURN)
        long = self.render([prompt, *turn, *turn], template_kwargs).split(_TURN)
        if (len(short), len(long)) != (2, 3) or short[-1] != long[-1]:
            raise ValueError(
                f"the chat template of {self.path} leaves out a turn, or what it writes after a turn depends on those before,"
                f" so an observation cannot be appended to the tokens before it: {short!r} with one turn, {long!r} with two."
                " Give string prompts, or change chat_template.jinja"
            )
        observation = turn[1:]
        whole = self.encode([prompt, *turn], template_kwargs)
        for stop in self.stop_token_ids:
            added = self.encode_observation(
                observation, stop, is_chat=True, template_kwargs=template_kwargs
            )
            end = self.decode([stop], skip_special_tokens=False)
            written = self.decode([stop, *added], skip_special_tokens=False).removeprefix(end)
            if whole[-len(added) :] != added and written != short[-1].removeprefix(end):
                raise ValueError(
                    f"the tokenizer in {self.path} splits a text that follows the token {end!r} in another way than within"
                    f" a conversation, so an observation cannot be appended: {written!r} instead of {short[-1]!r}"
                )

    @functools.cached_property
    def _added(self) -> set[int]:
        return {*self.hf.added_tokens_decoder, *self.hf.all_special_ids}

    @functools.cached_property
    def _control_tokens(self) -> re.Pattern[str]:
        """Return what matches special and stop tokens, and other added tokens of the template."""
        template = str(self.hf.chat_template)
        names = [
            token.content
            for number, token in self.hf.added_tokens_decoder.items()
            if token.special
            or number in self.stop_token_ids
            or (token.content in template and token.content.strip())
        ]
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")

    def _as_texts(self, message: Message) -> Message:
        """Return a message with a cut in every name of a control token."""
        cut = functools.partial(self._control_tokens.sub, lambda n: f"{n[0][0]}{_CUT}{n[0][1:]}")
        return {k: cut(v) if isinstance(v, str) else v for k, v in message.items()}

    def encode_observation(
        self,
        messages: Sequence[Message],
        last_token: int,
        *,
        is_chat: bool,
        template_kwargs: Mapping[str, object] = NOTHING,
    ) -> tuple[int, ...]:
        """Return the tokens of an observation after a turn that ended with `last_token`.

        They include the begin of the next turn. With `is_chat` the chat template writes them, and
        names of control tokens in a message are plain text. Without it, the texts are encoded as
        they stand. ValueError if the template refuses a message.
        """
        if not is_chat:
            text = "".join(str(message["content"]) for message in messages)
            return tuple(self._encode_after(last_token, text))
        begin = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _TURN}]
        messages = [*begin, *map(self._as_texts, messages)]
        text = self.render(messages, template_kwargs).partition(_TURN)[2]
        if last_token in self.stop_token_ids:  # the template writes it too; no stop string does
            text = text.removeprefix(self.decode([last_token], skip_special_tokens=False))
        first, *rest = text.split(_CUT)
        parts = [self._encode_after(last_token, first)]
        return tuple(chain(*parts, *(self._encode_after(None, part) for part in rest)))

    def encode_start(
        self,
        prompt: Sequence[Message],
        messages: Sequence[Message],
        template_kwargs: Mapping[str, object] = NOTHING,
    ) -> tuple[int, ...]:
        """Return the tokens of a chat prompt and of messages that an environment adds to it. In
        those, names of control tokens are plain text. ValueError as in `encode`."""
        text = self.render([*prompt, *map(self._as_texts, messages)], template_kwargs)
        first, *rest = text.split(_CUT)
        parts = self.encode_texts([first])
        return tuple(chain(*parts, *(self._encode_after(None, part) for part in rest)))

    @functools.cached_property
    def _marks_begin(self) -> bool:
        """Return whether a text alone gets a space before it, as by SentencePiece."""
        pair = [token for ids in self.encode_texts(["\n", "a"]) for token in ids]
        return self.decode(pair, skip_special_tokens=False) != "\na"

    def _encode_after(self, last_token: int | None, text: str) -> list[int]:
        """Return the tokens of a text that follows others; `last_token` is the last of them."""
        if not self._marks_begin:
            return self.encode_texts([text])[0]
        before = "" if last_token is None else self.decode([last_token], skip_special_tokens=False)
        for anchor in (before, *_ANCHORS):
            head, whole = self.encode_texts([anchor, anchor + text])
            is_kept = head == whole[: len(head)] and (anchor != before or head == [last_token])
            if is_kept:
                return whole[len(head) :]
        raise ValueError(f"the tokenizer in {self.path} cannot continue a text by {text!r}")

    def stop_strings(self, given: object, name: str = "stop") -> StopStrings | None:
        """Return a string or a list of them for `SamplingParams.stop` and `Prompt.stop`, None for
        None. ValueError for what cannot be stop strings, by its `name`.
        """
        return None if given is None else self._make_stop(check_stop_strings(given, name))

    @functools.cached_property
    def _make_stop(self) -> Callable[[tuple[str, ...]], StopStrings]:
        decode = functools.partial(self.decode, skip_special_tokens=False)
        anchor = self.encode_texts(["a"])[0]
        of_token = TokenBytes(decode, self.hf.convert_ids_to_tokens, anchor)
        return functools.lru_cache(maxsize=_MOST_STOPS)(lambda texts: StopStrings(texts, of_token))

    def decode_turn(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn or response with its special tokens, but without the one that
        ends it.

        A stop token that is a word of the text, and no token of its own (`<|im_end|>`), stays.
        """
        last = token_ids[-1]
        is_ended = last in self.stop_token_ids and last in self._added
        return self.decode(token_ids[: -1 if is_ended else None], skip_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a response, by default without stop and other special tokens."""
        text = self.hf.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)  # the text of one response
        return text


def load_tokenizer(path: str | Path, template_date: str = "") -> Tokenizer:
    """Load the tokenizer of a local model folder. Code in the folder is never run.

    The stop tokens are the tokenizer's eos token and those of config.json and
    generation_config.json. ValueError if the folder is missing or has no usable tokenizer.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"model.path={str(path)!r}: must be a folder with a tokenizer")
    try:
        hf = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # tokenizers raises Exception itself for a file of a newer version
        for file in folder.glob("*token*.json"):
            read_json(file)
        reason = " ".join(str(error).split())
        is_config = reason.startswith("Validation error for field")  # config.json was read first
        part = "config.json" if is_config else "its tokenizer"
        raise ValueError(f"model.path={str(path)!r}: {part} cannot be loaded: {reason}") from error
    hf = as_in_file(hf, folder)
    _check_vocabulary(hf, folder)
    stop_token_ids = read_eos_token_ids(folder)
    if hf.eos_token_id is not None:
        stop_token_ids.append(int(hf.eos_token_id))  # pyright: ignore[reportArgumentType]
    if not stop_token_ids:
        log.warning("%s names no eos token: every response runs to max_new_tokens", folder)
    return Tokenizer(hf, stop_token_ids, folder, template_date)


def _check_vocabulary(hf: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raise ValueError if a token id exceeds the vocab_size of config.json, or all are special."""
    file = folder / "config.json"
    vocab_size = read_json(file).get("vocab_size") if file.is_file() else None
    vocabulary = hf.get_vocab()
    if len(vocabulary) <= len(hf.added_tokens_decoder):
        raise ValueError(
            f"model.path={str(folder)!r}: its tokenizer has no token but the special ones: a file of it is missing or empty"
        )
    highest = max(vocabulary.values())
    if isinstance(vocab_size, int) and highest >= vocab_size:
        raise ValueError(
            f"model.path={str(folder)!r}: its tokenizer has token ids up to {highest}, more than vocab_size={vocab_size} "
            "of config.json holds"
        )
