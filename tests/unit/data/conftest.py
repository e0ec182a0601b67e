"""A character tokenizer in a folder, as a model brings it: two stop tokens, a chat template."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.prompts import PromptSet, load_prompts
from tlt_megatron.data.tokenizer import Tokenizer as OurTokenizer
from tlt_megatron.data.tokenizer import load_tokenizer

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}]
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
def tokenizer(tokenizer_folder: Path) -> OurTokenizer:
    return load_tokenizer(tokenizer_folder)


def write_rows(path: Path, rows: str | list[Mapping[str, object]]) -> Path:
    if isinstance(rows, str):
        path.write_text(rows)
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def load(tokenizer: OurTokenizer, tmp_path: Path) -> Callable[..., PromptSet]:
    """Return a function that writes rows, or a text, to t.jsonl or t.parquet and loads them."""

    def load(
        rows: str | list[Mapping[str, object]], suffix: str = ".jsonl", **section: object
    ) -> PromptSet:
        path = write_rows(tmp_path / f"t{suffix}", rows)
        return load_prompts(path, tokenizer, DataSection(**section))

    return load


@pytest.fixture
def folder(tokenizer_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tokenizer's folder, to be changed."""
    return shutil.copytree(tokenizer_folder, tmp_path / "model")
