"""`Engine`: each form of a prompt means one thing, and threads share one running batch."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.served_model import make_chat_model, tokens_until
from tlt_megatron import Engine

IDS = [3, 4, 13]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = make_chat_model(tmp_path_factory.mktemp("model"))
    engine = Engine(model, dtype="float64", max_batch_size=4, max_tokens=96)
    yield engine
    engine.close()


def texts(engine: Engine, prompts: Any, **settings: Any) -> list[str]:
    found = engine.generate(prompts, **{"max_new_tokens": 12, "seed": 1, **settings})
    return [one.text for one in found]


@pytest.mark.parametrize(
    "prompts",
    [
        "12+7=",
        ("12+7=",),
        [[3, 4, 12, 9, 16]],
        [3, 4, 12, 9, 16],
        (np.int64(3), 4, np.int32(12), 9, 16),
        np.array([3, 4, 12, 9, 16]),
        np.array([[3, 4, 12, 9, 16]], dtype=np.uint16),
        torch.tensor([3, 4, 12, 9, 16]),
        [torch.tensor(3), torch.tensor(4), 12, 9, 16],
        [torch.tensor([3, 4, 12, 9, 16], dtype=torch.int32)],
    ],
    ids=repr,
)
def test_every_form_of_one_prompt_is_that_prompt(engine: Engine, prompts: Any) -> None:
    assert engine.encode([("12+7=")]) == [(3, 4, 12, 9, 16)]
    assert texts(engine, prompts) == texts(engine, ["12+7="])


def test_messages_are_one_prompt_and_text_parts_are_joined(engine: Engine) -> None:
    plain = [{"role": "user", "content": "12"}]
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]}
    ]
    assert texts(engine, plain) == texts(engine, [plain]) == texts(engine, "u:12;a:")
    assert texts(engine, [parts]) == texts(engine, parts) == texts(engine, plain)
    assert len(texts(engine, [plain, "1", IDS])) == 3
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    "prompts, said",
    [
        ([2.5, 3], r"prompts\[0\]\[0\]=2.5: must be a token id, 0 to 47"),
        ([[3, 2.5]], r"prompts\[0\]\[1\]=2.5: must be a token id"),
        (np.array([2.0, 3.0]), r"prompts\[0\]\[0\]=2.0"),
        ([3, 48], r"prompts\[0\]\[1\]=48: must be a token id"),
        ([-1], r"prompts\[0\]\[0\]=-1"),
        ([True], r"prompts\[0\]\[0\]=True"),
        ([3, "1"], r"prompts\[0\]\[1\]='1'"),
        ([10**30], r"must be a token id"),
        ([None], r"prompts\[0\]=None: must be a text"),
        (None, r"prompts=None: must be a text"),
        (b"12", r"prompts=b'12'"),
        ({"role": "user"}, r"prompts=\{"),
        (["\ud800"], r"prompts\[0\]: character 0 is '\\ud800', half of a surrogate pair"),
        ([{"role": "user", "content": "\udfff"}], r"half of a surrogate pair"),
        ([{"role": "user"}], r"prompts\[0\]\[0\].content=None"),
        ([{"content": "1"}], r"must be a message with the keys role and content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"prompts\[0\]\[0\].content\[0\] has the type 'image_url'",
        ),
        ([[]], r"prompts\[0\] has 0 tokens, .* a prompt must have at least 1"),
        (
            "1" * 1_000_000,
            r"prompts\[0\] has 1000000 characters: max_tokens=96 tokens hold at most",
        ),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_no_prompt_is_refused_by_its_place(engine: Engine, prompts: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        engine.generate(prompts, max_new_tokens=4)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"temperature": 1e-39}, "temperature=1e-39: must be 0"),
        ({"stop": ["a", ""]}, r"stop\[1\]=''"),
        ({"stop": "\ud800"}, r"stop\[0\]: character 0"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"num_samples": True}, "num_samples=True: must be an integer"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5: must be an integer"),
        ({"max_new_tokens": "4"}, "max_new_tokens='4': must be an integer"),
        ({"max_new_tokens": None}, "max_new_tokens=None: must be an integer"),
        ({"top_k": [1]}, r"top_k=\[1\]: must be an integer"),
        ({"seed": 1.5}, "seed=1.5: must be an integer"),
        ({"temperature": "1"}, "temperature='1': must be a number"),
        ({"temperature": float("nan")}, "temperature=nan: must be 0"),
        ({"top_p": None}, "top_p=None: must be a number"),
        ({"max_new_tokens": 96}, "its response up to 96: .* at most max_tokens=96 together"),
    ],
)
def test_a_bad_setting_is_refused(engine: Engine, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        engine.generate("1", **{"max_new_tokens": 4, **settings})


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"max_tokens": 1}, "max_tokens=1: must be at least 2"),
        ({"max_tokens": 9.5}, "max_tokens=9.5: must be an integer"),
        ({"max_batch_size": 0}, "max_batch_size=0: must be at least 1"),
        ({"device": "cuda:0"}, "device='cuda:0': must be one of auto, cpu, cuda"),
        ({"strategies": "ngram"}, "strategy='ngram'"),
    ],
)
def test_a_bad_engine_is_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Engine(make_chat_model(tmp_path), **settings)


def test_one_strategy_may_be_a_text(tmp_path: Path) -> None:
    engine = Engine(make_chat_model(tmp_path), max_tokens=64, strategies="ngram_2")
    assert engine.generate("1212", max_new_tokens=9, temperature=0)[0].accept_lengths
    engine.close()


def test_a_setting_may_be_a_number_of_numpy_and_a_seed_any_integer(engine: Engine) -> None:
    plain = texts(engine, "1", seed=7, max_new_tokens=9, temperature=0.5)
    numbers = {"seed": np.int64(7), "max_new_tokens": np.int32(9), "temperature": np.float32(0.5)}
    assert texts(engine, "1", **numbers) == plain
    for seed in (-1, 2**64, 10**30):
        assert texts(engine, "1", seed=seed, max_new_tokens=9)


def test_the_seed_is_random_unless_it_is_given(engine: Engine) -> None:
    assert texts(engine, "1", seed=None, max_new_tokens=40) != texts(
        engine, "1", seed=None, max_new_tokens=40
    )
    for seed in (0, -5, 2**70):
        assert texts(engine, "1", seed=seed) == texts(engine, "1", seed=seed)
    assert texts(engine, "1", seed=2) != texts(engine, "1", seed=3)
    (one,) = engine.generate("1", temperature=1e-5, max_new_tokens=9)
    assert all(map(math.isfinite, one.logprobs))


def test_a_stop_string_cuts_text_and_tokens(engine: Engine) -> None:
    (whole,) = engine.generate("12+7=", max_new_tokens=60, seed=8)
    stop = whole.text[10:12]
    place = whole.text.find(stop)
    (cut,) = engine.generate("12+7=", max_new_tokens=60, seed=8, stop=stop)
    assert (cut.text, cut.finish_reason) == (whole.text[:place], "stop")
    count = tokens_until(stop, whole.token_ids, engine)
    assert cut.token_ids == whole.token_ids[:count]
    assert cut.logprobs == whole.logprobs[:count]
    (other,) = engine.generate("12+7=", max_new_tokens=60, seed=8, stop=["\n\n", "xyz"])
    assert other == whole


def test_threads_share_the_batch_and_get_what_each_gets_alone(engine: Engine) -> None:
    settings = [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.0},
        {"temperature": 0.5, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "top_k": 5, "seed": 4, "num_samples": 3},
        {"stop": "1", "seed": 5},
        {"stop": "2", "seed": 6, "num_samples": 2},
    ]
    alone = [engine.generate("3*4=", max_new_tokens=30, **each) for each in settings]
    found: dict[int, Any] = {}

    def ask(index: int) -> None:
        found[index] = engine.generate("3*4=", max_new_tokens=30, **settings[index])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(settings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, each in enumerate(alone):
        assert [a.token_ids for a in found[index]] == [a.token_ids for a in each], settings[index]


def test_nothing_stays_of_an_engine(tmp_path: Path) -> None:
    engine = Engine(make_chat_model(tmp_path), max_batch_size=2, max_tokens=64)
    engine.generate("1", max_new_tokens=9, num_samples=5)
    while any(thread.name == "decode" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert engine.batch.num_open == 0
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.generate("1", max_new_tokens=9)


def test_a_failure_of_the_engine_reaches_who_waits(tmp_path: Path) -> None:
    engine = Engine(make_chat_model(tmp_path), max_tokens=64)
    engine._engine.sleep()
    with pytest.raises(RuntimeError, match="the engine is asleep"):
        engine.generate("1", max_new_tokens=9)
    engine._engine.wake()
    assert len(engine.generate("1", max_new_tokens=9)) == 1
    gc.collect()
