"""A policy that calls the tool of the environment `glossary` often, and its tokenizer, for the
renderer of Qwen 3.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import make_tiny_hf

MARKS = "<pad> <|endoftext|> <|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CALLS = [
    f'\n{{"name": "glossary_lookup", "arguments": {{"word": "{word}"}}}}\n'
    for word in ("blorp", "fendle", "x")
]
TOKENS = [*MARKS.split(), *CALLS, *LETTERS, *" \n'\"{}:,.?_"]
STOPS = [3, 1]  # <|im_end|> and <|endoftext|>
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# logits of a token behind another one, above the others
LIKELY = {
    "\n": {"<tool_call>": 4.5},
    "<tool_call>": dict.fromkeys(CALLS, 7.0),
    **{call: {"</tool_call>": 9.0} for call in CALLS},
    "</tool_call>": {"<|im_end|>": 6.0},
    **{letter: {"<|im_end|>": 2.0} for letter in LETTERS},
}


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are `TOKENS`."""
    numbers = {token: i for i, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<pad>", eos_token="<|im_end|>"
    )
    hf.add_tokens([token for token in TOKENS if len(token) > 1])
    hf.chat_template = TEMPLATE
    hf.save_pretrained(folder)


def write_policy(folder: Path) -> None:
    """Write a policy whose next token depends on the last one alone, but for a little."""
    size = {"vocab_size": 64, "num_layers": 2, "max_position_embeddings": 4096}
    make_tiny_hf(folder, "qwen2", eos_token_id=STOPS, pad_token_id=0, **size)
    write_tokenizer(folder)
    numbers = {token: i for i, token in enumerate(TOKENS)}
    logits = torch.full((64, 64), -9.0)
    logits[:, len(MARKS.split()) : len(TOKENS)] = 0.0
    for last, following in LIKELY.items():
        for token, logit in following.items():
            logits[numbers[last], numbers[token]] = logit
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(1e-3)
    tensors["model.norm.weight"] = torch.ones(64)
    tensors["model.embed_tokens.weight"] = 8 * torch.eye(64)  # RMSNorm keeps it
    tensors["lm_head.weight"] = logits.T.contiguous() / 8
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
