"""The transformers that SGLang pins has other classes of tokenizers: the same tests with it."""

from __future__ import annotations

from tests.unit.data.test_tokenizer import (
    test_an_observation_gets_no_space_that_the_conversation_has_not as test_observations,
)
from tests.unit.data.test_tokenizer import (
    test_texts_are_split_as_tokenizer_json_says_whatever_class_is_named as test_texts,
)

__all__ = ["test_observations", "test_texts"]
