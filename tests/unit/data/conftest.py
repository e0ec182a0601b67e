"""A character tokenizer in a folder, as a model brings it: two stop tokens, a chat template."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'judge' %}{{ raise_exception('no judges') }}{% endif %}"
    "<|{{ m.role }}|>{% if 'name' in m %}({{ m.name }}){% endif %}{{ m.content }}<eot>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(folder: Path, *, chat_template: str | None) -> Path:
    special = ["<pad>", "<eos>", "<eot>", "<|user|>", "<|system|>", "<|assistant|>"]
    vocab = {token: i for i, token in enumerate(special + sorted(string.printable))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<pad>"
    )
    hf.chat_template = chat_template
    hf.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("chat"), chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def plain_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("plain"), chat_template=None)
