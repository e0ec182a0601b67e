"""Compares the tokenizer that transformers makes of a folder with the folder's tokenizer.json.

Some classes of transformers build their own pipeline from the vocabulary in that file. The class
that tokenizer_config.json names may not be the model's, and its pipeline loses spaces then.
"""

from __future__ import annotations

import logging
from pathlib import Path

import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

log = logging.getLogger(__name__)

FILE = "tokenizer.json"
_TEXTS = (
    "What is 12 + 7?",
    " one space before,  two  within and after  ",
    "1234567 3.14159 -2,000 x^2 = 4",
    "a\n\n  b\tc\r\n",
    "def f(x):\n    return {x: x**2}  # ok",
    "don't, WE'LL, I'm; U.S.A. ... (end)!",
    "$\\frac{1}{2}$ is \\boxed{42}. #### 42",
    "caf\u00e9 cafe\u0301 \u201cna\u00efve\u201d \u2014 \u2026 \ufb01",
    "\u6570\u5b66 \u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f642\U0001f469\u200d\U0001f467 \u00a0\u3000 \uff21",
    "<think>\nWait.\n</think> <b>x</b>",
)


def as_in_file(hf: PreTrainedTokenizerBase, folder: Path) -> PreTrainedTokenizerBase:
    """Return `hf` if it reads and writes fixed texts as tokenizer.json says, or if there is none.
    Else return the tokenizer of this file.

    ValueError if transformers makes another tokenizer of the file itself.
    """
    if not (folder / FILE).is_file():
        return hf
    truth = tokenizers.Tokenizer.from_file(str(folder / FILE))
    truth.no_truncation()
    truth.no_padding()
    if hf.eos_token is not None and truth.token_to_id(str(hf.eos_token)) is None:
        log.warning(
            "%s: %s does not hold the eos token %s: it gets the new id %s, which no model was trained to draw",
            folder,
            FILE,
            hf.eos_token,
            hf.eos_token_id,
        )
    text = _differing_text(hf, truth)
    if text is None:
        return hf
    own = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    if own.eos_token is None and hf.eos_token in own.get_vocab():  # the default of the class
        own.eos_token = hf.eos_token
    about = (
        f"{type(hf).__name__} of transformers {transformers.__version__} splits {text!r} into"
        f" {_pieces(hf, text)}, {FILE} into {truth.encode(text, add_special_tokens=False).tokens}"
    )
    if _differing_text(own, truth) is not None:
        raise ValueError(
            f"model.path={str(folder)!r}: tokenizer_config.json and {FILE} disagree: {about}"
        )
    log.warning("%s: %s is used, and not the class: %s", folder, FILE, about)
    return own


def _differing_text(hf: PreTrainedTokenizerBase, truth: tokenizers.Tokenizer) -> str | None:
    """Return the first text that `hf` encodes or decodes in another way than `truth`, or None."""
    for text in _TEXTS:
        ids = truth.encode(text, add_special_tokens=False).ids
        decoded = hf.decode(ids, clean_up_tokenization_spaces=False)
        written = truth.decode(ids, skip_special_tokens=False)
        if hf.encode(text, add_special_tokens=False) != ids or decoded != written:
            return text
    return None


def _pieces(hf: PreTrainedTokenizerBase, text: str) -> list[object]:
    return [hf.decode([token]) for token in hf.encode(text, add_special_tokens=False)]
