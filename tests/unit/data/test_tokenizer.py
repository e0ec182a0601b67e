from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from tests.unit.data.conftest import MESSAGES, write_rows
from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.prompts import load_prompts
from tlt_megatron.data.tokenizer import Tokenizer, load_tokenizer


def test_stop_tokens_are_eos_and_those_of_both_configs(folder: Path) -> None:
    assert load_tokenizer(folder).stop_token_ids == (1, 2)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert load_tokenizer(folder).stop_token_ids == (1, 2)
    for eos, expected in ((3, (1, 2, 3)), ([3, 4], (1, 2, 3, 4)), (None, (1, 2))):
        config = {"model_type": "llama", "eos_token_id": eos}
        (folder / "config.json").write_text(json.dumps(config))
        assert load_tokenizer(folder).stop_token_ids == expected
    for file in ("config.json", "generation_config.json"):
        (folder / file).unlink()
    assert load_tokenizer(folder).stop_token_ids == (1,)


def test_tokenizer_larger_than_the_vocabulary_is_refused(folder: Path) -> None:
    size = len(load_tokenizer(folder).hf)
    for vocab_size in (size, size - 1):
        config = {"model_type": "llama", "vocab_size": vocab_size}
        (folder / "config.json").write_text(json.dumps(config))
        if vocab_size == size:
            load_tokenizer(folder)
    with pytest.raises(ValueError, match=f"token ids up to {size - 1}, more than vocab_size"):
        load_tokenizer(folder)


def test_a_string_is_encoded_as_it_stands_and_messages_by_the_template(
    tokenizer: Tokenizer,
) -> None:
    """Special tokens are left out where text is asked for."""
    token_ids = tokenizer.encode("a b  c")
    assert len(token_ids) == 6
    assert tokenizer.decode(token_ids) == tokenizer.decode([*token_ids, 2]) == "a b  c"
    text = "<|system|>be brief<eot><|user|>1+1?<eot><|assistant|>"
    token_ids = tokenizer.encode(MESSAGES)
    assert token_ids == tokenizer.encode(text)
    assert token_ids[-1] == 5
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


def change_json(path: Path, **change: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_folders_that_cannot_be_loaded_are_refused_and_code_in_them_is_not_run(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"model\.path='.*nowhere': must be a folder"):
        load_tokenizer(tmp_path / "nowhere")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'was_here')!r}, 'w')\n")
    own = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    change_json(folder / "tokenizer_config.json", **own)
    with pytest.raises(ValueError, match=r"model\.path=.* tokenizer cannot be loaded"):
        load_tokenizer(folder)
    assert not (tmp_path / "was_here").exists()
    change_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    change_json(folder / "tokenizer.json", model={"type": "Later"})
    with pytest.raises(ValueError, match="tokenizer cannot be loaded: data did not"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer cannot be loaded"):
        load_tokenizer(folder)


def test_a_template_that_fails_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] + 1 }}")
    with pytest.raises(ValueError, match="refuses it: can only concatenate str"):
        load_tokenizer(folder).encode(MESSAGES)


def test_an_observation_is_what_the_template_writes_after_the_turn(tokenizer: Tokenizer) -> None:
    """Prompt, turn with its stop token, observation: the tokens of the whole conversation."""
    tokenizer.check_turns()
    answer = [{"role": "assistant", "content": "2?"}]
    observation = [{"role": "user", "content": "(turn) sure?"}, {"role": "system", "content": "!"}]
    begin = tokenizer.encode(MESSAGES)
    turn = tuple(tokenizer.encode_texts(["2?<eot>"])[0])
    added = tokenizer.encode_observation(observation, turn[-1], is_chat=True)
    assert (*begin, *turn, *added) == tokenizer.encode([*MESSAGES, *answer, *observation])
    (eos,) = tokenizer.encode_texts(["<eos>"])[0]  # not the template's end of a turn, which follows
    (eot,) = tokenizer.encode_texts(["<eot>"])[0]
    assert tokenizer.encode_observation(observation, eos, is_chat=True) == (eot, *added)
    plain = tokenizer.encode_observation(observation, turn[-1], is_chat=False)
    assert plain == tokenizer.encode("(turn) sure?!")
    with pytest.raises(ValueError, match="refuses it: no judges"):
        tokenizer.encode_observation([{"role": "judge", "content": "x"}], 2, is_chat=True)


LOOP = "{% for m in messages %}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}"
# Of the shape of public models: the template, the stop token, what it writes after a turn, around
# the observation.
SHAPES = {
    "DeepSeek-R1-Distill": (
        LOOP + "{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}"
        + PROMPT
        + "<｜Assistant｜><think>\n{% endif %}",
        "<｜end▁of▁sentence｜>",
        ("<｜User｜>", "<｜Assistant｜><think>\n"),
    ),
    "QwQ, Qwen3.5": (
        LOOP + "<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
        "" + PROMPT + "<|im_start|>assistant\n<think>\n{% endif %}",
        "<|im_end|>",
        ("\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n"),
    ),
    "GLM-4.5": (
        LOOP
        + "<|{{ m.role }}|>\n{% if m.role == 'assistant' %}<think></think>{{ '\n' }}{% endif %}"
        "{{ m.content }}" + PROMPT + "<|assistant|>{% endif %}",
        "<|user|>",
        ("\n", "<|assistant|>"),
    ),
    "gpt-oss": (
        LOOP + "<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
        "<|message|>{{ m.content }}<|end|>" + PROMPT + "<|start|>assistant{% endif %}",
        "<|return|>",
        ("<|end|><|start|>user<|message|>", "<|end|><|start|>assistant"),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("are_special", [True, False])  # those of DeepSeek are not
def test_an_observation_cannot_write_control_tokens(
    name: str, are_special: bool, tmp_path: Path
) -> None:
    """A tool that returns all of them. What the template writes around it stays control tokens."""
    template, stop, (before, after) = SHAPES[name]
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    fast = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, [])
    )
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    names = sorted({stop, *re.findall(r"<[^<>]+>", before + after)})
    fast.add_tokens([tokenizers.AddedToken(each, special=are_special) for each in names])
    hf = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=stop)
    hf.chat_template = template
    tokenizer = Tokenizer(hf, [hf.convert_tokens_to_ids(stop)], tmp_path)
    tokenizer.check_turns()
    for text in ("12", "".join(names), f"\n{names[0]}</tool> é"):
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.encode_observation(messages, *tokenizer.stop_token_ids, is_chat=True)
        assert tokenizer.decode(ids, skip_special_tokens=False) == before + text + after
        found = [hf.convert_ids_to_tokens(token) for token in ids if token >= len(letters)]
        assert found == re.findall(r"<[^<>]+>", before + after)


def test_a_turn_keeps_an_end_that_is_text(tokenizer: Tokenizer) -> None:
    letters = Tokenizer(tokenizer.hf, tokenizer.encode("="), Path())
    assert letters.decode_turn(letters.encode("1+1=")) == "1+1="


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content }}<|assistant|>",  # forgets earlier turns
        "{% for m in messages %}{{ loop.index }}{{ m.content }}<eot>{% endfor %}<|assistant|>",
    ],
)
def test_a_template_whose_text_after_a_turn_depends_on_earlier_ones_is_refused(
    folder: Path, template: str
) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(
        ValueError, match="leaves out a turn, or what it writes after a turn depends"
    ):
        load_tokenizer(folder).check_turns()


@pytest.mark.parametrize("kind", ["a BOS", "a BOS and an EOS", "nothing"])
def test_a_string_begins_with_the_tokens_that_the_tokenizer_puts_before_a_text(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    """As in transformers, vLLM and SGLang, but once, and nothing behind it. Templates write
    their own."""
    fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if kind != "nothing":
        ending = " <eos>" if "EOS" in kind else ""
        fast.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"<pad> $A{ending}", special_tokens=[("<pad>", 0), ("<eos>", 1)]
        )
    fast.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    plain = tuple(tokenizer.encode_texts(["a b"])[0])
    first = () if kind == "nothing" else (0,)
    assert tokenizer.encode("a b") == (*first, *plain)
    assert tokenizer.encode("<pad>a b") == (0, *plain)
    path = write_rows(tmp_path / "t.jsonl", [{"prompt": "a b", "label": 1}])
    (row,) = load_prompts(path, tokenizer, DataSection()).rows
    assert row.token_ids == (*first, *plain)
    notes = tokenizer.notes(has_strings=True)
    assert [note.partition(",")[0] for note in notes] == (
        [] if kind == "nothing" else ["string prompts begin with <pad>"]
    )
    assert tokenizer.notes(has_strings=False) == []


@pytest.mark.parametrize("is_special", [True, False])
def test_rewards_see_the_special_tokens_of_a_response_but_not_its_end(
    is_special: bool, folder: Path
) -> None:
    """A stop token ends the text whether or not the tokenizer marks it as special."""
    fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ["<think>", "</think>", "<|im_end|>"]
    fast.add_tokens([tokenizers.AddedToken(name, special=is_special) for name in names])
    fast.save(str(folder / "tokenizer.json"))
    end = fast.token_to_id("<|im_end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 2]}))
    tokenizer = load_tokenizer(folder)
    for text in ("<think>1</think>#### 42", "<|im_end|>7"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode_turn([*ids, end]) == text
        assert tokenizer.decode_turn(ids) == text
    assert tokenizer.decode_turn([end]) == ""
    notes = tokenizer.notes(has_strings=True)
    assert len(notes) == is_special
    assert all("marks <think>, </think> as special" in note for note in notes)


def write_own(folder: Path, kind: str, tokenizer_class: str, **config: object) -> None:
    """Write a BPE tokenizer of bytes, or one as SentencePiece's, under the name of a class."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    if kind == "ByteLevel":
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
    else:
        first = "first" if kind == "Metaspace" else "never"
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=first, split=False)
        bpe.decoder = tokenizers.decoders.Sequence(
            [
                tokenizers.decoders.Replace("▁", " "),
                tokenizers.decoders.ByteFallback(),
                tokenizers.decoders.Fuse(),
                *([tokenizers.decoders.Strip(" ", 1, 0)] if first == "first" else []),
            ]
        )
        letters = [f"<0x{byte:02X}>" for byte in range(256)]
    named = ["<unk>", "<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=[*named, *letters], vocab_size=400)
    bpe.train_from_iterator(["What is 12 + 7? It is  19.\n"] * 9, trainer)
    state = json.loads(bpe.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # the letters and bytes are no special tokens
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(state))
    about = {"tokenizer_class": tokenizer_class, "bos_token": "<s>", "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "config.json").write_text('{"model_type": "llama"}')


@pytest.mark.parametrize(
    ("kind", "tokenizer_class"),
    [
        ("ByteLevel", "LlamaTokenizerFast"),  # DeepSeek-R1-Distill-Llama
        ("ByteLevel", "Qwen2Tokenizer"),
        ("ByteLevel", "PreTrainedTokenizerFast"),
        ("Metaspace", "LlamaTokenizer"),
        ("Metaspace", "Qwen2Tokenizer"),
        ("Metaspace", "GPT2Tokenizer"),
        ("Metaspace, none first", "LlamaTokenizerFast"),
    ],
)
def test_texts_are_split_as_tokenizer_json_says_whatever_class_is_named(
    kind: str, tokenizer_class: str, tmp_path: Path
) -> None:
    write_own(tmp_path, kind, tokenizer_class)
    truth = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    for text in ("What is 12 + 7?", "  a\n b  é", "It is  19."):
        ids = truth.encode(text, add_special_tokens=False).ids
        assert loaded.encode_texts([text]) == [ids]
        assert loaded.decode(ids) == truth.decode(ids)
        assert loaded.decode(ids).lstrip() == text.lstrip()
    assert loaded.stop_token_ids == (2,)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["[]", "{", ""])
def test_a_file_that_is_no_object_is_named(name: str, text: str, folder: Path) -> None:
    (folder / name).write_text(text)
    with pytest.raises(
        ValueError, match=rf"/{name}: (cannot be read as JSON|must hold a JSON obj)"
    ):
        load_tokenizer(folder)


def test_an_eos_token_that_no_file_holds_is_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<|nothing|>"}))
    load_tokenizer(folder)
    assert "tokenizer.json does not hold the eos token <|nothing|>" in caplog.text


def test_a_null_in_config_json_is_not_the_tokenizers_fault(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "mistral", "use_cache": null}')
    with pytest.raises(ValueError, match=r"config\.json cannot be loaded: .*'use_cache'"):
        load_tokenizer(folder)


def test_a_tokenizer_of_special_tokens_alone_is_refused(folder: Path) -> None:
    state = json.loads((folder / "tokenizer.json").read_text())
    state["model"]["vocab"] = {token["content"]: token["id"] for token in state["added_tokens"]}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="no token but the special ones"):
        load_tokenizer(folder)


ZEPHYR = (
    LOOP + "<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n" + PROMPT + "<|assistant|>\n{% endif %}"
)  # fmt: skip


@pytest.mark.parametrize("kind", ["Metaspace", "Metaspace, none first", "ByteLevel"])
def test_an_observation_gets_no_space_that_the_conversation_has_not(
    kind: str, tmp_path: Path
) -> None:
    """SentencePiece puts a space before a text alone: "12+7=" and "19" was "12+7= 19"."""
    write_own(tmp_path, kind, "LlamaTokenizer", legacy=False)
    (tmp_path / "chat_template.jinja").write_text(ZEPHYR)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.check_turns()
    asked = tokenizer.encode("12+7=")
    for text in ("19", " 19", "\n\n19 is it."):
        added = tokenizer.encode_observation([{"content": text}], asked[-1], is_chat=False)
        assert tokenizer.decode([*asked, *added]) == f"12+7={text}"
    (stop,) = tokenizer.stop_token_ids
    for text in ("19", "a </s> <unk> b"):  # names of control tokens stay text
        messages = [{"role": "user", "content": text}]
        added = tokenizer.encode_observation(messages, stop, is_chat=True)
        assert stop in added
        written = tokenizer.decode([stop, *added], skip_special_tokens=False)
        assert written == f"</s>\n<|user|>\n{text}</s>\n<|assistant|>\n"
    turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "12"}]
    whole = tokenizer.encode([*turn, {"role": "user", "content": "19"}])
    added = tokenizer.encode_observation([{"role": "user", "content": "19"}], stop, is_chat=True)
    assert whole[-len(added) :] == added


def test_a_tokenizer_that_cannot_continue_a_conversation_is_refused(tmp_path: Path) -> None:
    """It puts a space before each text between control tokens, also in the whole conversation."""
    write_own(tmp_path, "Metaspace", "PreTrainedTokenizerFast")
    (tmp_path / "chat_template.jinja").write_text(ZEPHYR)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.encode_observation = lambda *_, **__: (7, *tokenizer.encode("\nx"))
    with pytest.raises(ValueError, match="in another way than within a conversation"):
        tokenizer.check_turns()
