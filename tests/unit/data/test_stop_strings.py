"""A response ends with the first token whose decoding, with all tokens before it, holds a stop
string, in whatever runs the tokens come.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.unit.data.test_tokenizer import write_own
from tlt_megatron.config.schema import EvalSection, RolloutSection
from tlt_megatron.data.tokenizer import Tokenizer, load_tokenizer
from tlt_megatron.stop_strings import StopStrings

NUM_SEQUENCES, LIMIT, EOS = 1500, 24, 2
KINDS = ("ByteLevel", "Metaspace", "Metaspace, none first")


def draw_pieces(tokenizer: Tokenizer, kind: str, draw: random.Random) -> list[int]:
    """Any tokens of byte-level BPE. SentencePiece's byte tokens come in whole characters, because a
    run that is no character hides the ones before it.
    """
    highest = len(tokenizer.hf.get_vocab())
    if kind == "ByteLevel":
        return [draw.randrange(highest) for _ in range(LIMIT + 6)]
    found: list[int] = []
    while len(found) < LIMIT + 6:
        if draw.random() < 0.3:
            found += [3 + byte for byte in draw.choice("aé€\n ").encode()]
        else:
            found.append(draw.choice([0, 1, 2, *range(259, highest)]))
    return found


def draw_stops(tokenizer: Tokenizer, token_ids: list[int], draw: random.Random) -> list[str]:
    """Pieces of a text like the one to come, and names of special tokens."""
    text = tokenizer.decode(token_ids[::-1], skip_special_tokens=False)
    pieces = [text[i : i + draw.randint(1, 5)] for i in (draw.randrange(len(text)) for _ in "abc")]
    pieces = [each for each in pieces if "\ufffd" not in each]
    return [*pieces[: draw.randint(1, 3)], draw.choice(["</s>", "<s>1", "é9", "it is"])]


def end_by_decoding(tokenizer: Tokenizer, token_ids: list[int], stops: list[str]) -> int:
    """The number of tokens of the response: to a stop string, the EOS token or the limit."""
    anchor = tokenizer.encode_texts(["a"])[0]
    for count in range(1, LIMIT + 1):
        ids = [*anchor, *token_ids[:count]]
        text = tokenizer.decode(ids, skip_special_tokens=False)[1:]
        if token_ids[count - 1] == EOS or any(stop in text for stop in stops):
            return count
    return LIMIT


def end_in_runs(stop: StopStrings, token_ids: list[int], draw: random.Random, most: int) -> int:
    """As `end_by_decoding`, for tokens that are accepted in runs of up to `most`."""
    state, count = stop.start, 0
    while True:
        run = token_ids[count : min(count + draw.randint(1, most), LIMIT)]
        run = run[: run.index(EOS) + 1] if EOS in run else run
        num_kept, state = stop.run(state, run)
        count += num_kept
        if state is None or run[-1] == EOS or count == LIMIT:
            return count


@pytest.mark.parametrize("kind", KINDS)
def test_the_automaton_ends_responses_where_decoding_does(kind: str, tmp_path: Path) -> None:
    write_own(tmp_path, kind, "PreTrainedTokenizerFast")
    tokenizer, draw = load_tokenizer(tmp_path), random.Random(kind)
    num_stops = num_inside = 0
    for _ in range(NUM_SEQUENCES):
        token_ids = draw_pieces(tokenizer, kind, draw)
        stops = draw_stops(tokenizer, token_ids, draw)
        stop = tokenizer.stop_strings(stops)
        assert stop is not None
        expected = end_by_decoding(tokenizer, token_ids, stops)
        assert end_in_runs(stop, token_ids, draw, 1) == expected
        assert end_in_runs(stop, token_ids, draw, 8) == expected
        cut = draw.randrange(expected)  # as a partial rollout is
        rest, end = stop.after(token_ids[:cut]), stop.run(b"", token_ids[:expected])[1]
        assert rest.run(rest.start, token_ids[cut:expected]) == (expected - cut, end)
        if end is None:
            num_stops += 1
            text = tokenizer.decode(token_ids[:expected], skip_special_tokens=False)
            num_inside += not text.endswith(tuple(stops))
    assert num_stops > NUM_SEQUENCES / 4
    assert num_inside > 50, "stop strings that end within a token"


def test_a_special_token_stops_and_equal_strings_share_their_steps(tokenizer: Tokenizer) -> None:
    stop = tokenizer.stop_strings("<|user|>")
    assert stop is not None
    assert stop.strings == ("<|user|>",)
    written = tokenizer.encode_texts(["1<|user|>2"])[0]
    assert stop.run(b"", written) == (2, None)
    assert tokenizer.stop_strings(["<|user|>"]) is stop
    assert tokenizer.stop_strings(None) is None
    assert stop.after(written[:1]).start == b""


def test_an_observation_after_a_stop_string_ends_the_turn_as_the_template_does(
    tokenizer: Tokenizer,
) -> None:
    """The policy has drawn no <eot>, and its last token, <, is not the begin of one."""
    messages = [{"role": "user", "content": "5"}]
    last, eot = (tokenizer.hf.convert_tokens_to_ids(name) for name in ("<", "<eot>"))
    after = tokenizer.encode_observation(messages, eot, is_chat=True)
    assert tokenizer.encode_observation(messages, last, is_chat=True) == (eot, *after)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([""], r"stop\[0\]='': must be a string that is not empty"),
        (["a", 5], r"stop\[1\]=5: must be a string that is not empty"),
        (["a"] * 65, r"stop has 65 strings: must be at most 64"),
        (["é" * 129], r"stop\[0\]='.* has 258 bytes: must have at most 256"),
        (["\ud800"], r"stop\[0\]: character 0 is '\\ud800', half of a surrogate pair"),
        ({"a": 1}, r"stop=\{'a': 1\}: must be a string or a list of strings"),
    ],
)
def test_what_cannot_be_stop_strings_is_refused_in_one_line(
    given: object, text: str, tokenizer: Tokenizer
) -> None:
    for make, section in (
        (lambda: tokenizer.stop_strings(given), ""),
        (lambda: RolloutSection(stop=given), "rollout."),
        (lambda: EvalSection(stop=given), "eval."),
    ):
        with pytest.raises(ValueError, match=f"^{section}{text}$"):
            make()
