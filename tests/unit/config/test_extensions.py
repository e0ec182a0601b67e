"""Extension points: code of the user's, named by a file or by a module."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tlt_megatron.config.extensions import REGISTRY, load_code, load_extension
from tlt_megatron.config.load import load_config
from tlt_megatron.rewards.workers import RewardPool
from tlt_megatron.trainer.build_embedded import make_speculation
from tlt_megatron.types import Prompt

SELECTOR = '''
from tlt_megatron.speculation.selector import Decision, FixedSelector

class LastWhenAlone(FixedSelector):
    """Uses the last strategy for a batch of one, else the first."""

    def __init__(self, strategies):
        super().__init__(strategies[0])
        self.strategies = strategies

    def choose(self, batch_size):
        strategy = self.strategies[-1 if batch_size == 1 else 0]
        return Decision(strategy=strategy, reason="mine")
'''
REWARD = """
def length(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str))
"""


@pytest.mark.parametrize("place", ["extension_of_mine", "{0}/extension_of_mine.py"])
def test_a_new_selector_needs_one_file(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named by its module, or by its file."""
    (tmp_path / "extension_of_mine.py").write_text(SELECTOR)
    monkeypatch.syspath_prepend(tmp_path)
    overrides = ["speculation.strategies=['ngram_4', 'ngram_2']", "speculation.enabled=true"]
    named = f"speculation.selector={place.format(tmp_path)}:LastWhenAlone"
    selector = make_speculation(load_config(None, [*overrides, named]), None).selector
    chosen = [str(selector.choose(size).strategy) for size in (8, 2, 1)]
    assert chosen == ["ngram_4", "ngram_4", "ngram_2"]


@pytest.mark.parametrize(("max_batch_size", "is_off"), [(8, True), (64, False)])
def test_buckets_of_beg_mab_follow_the_largest_batch(max_batch_size: int, is_off: bool) -> None:
    """Plain decoding begins above half of the largest batch: above 4 of 8, above 32 of 64."""
    overrides = ["speculation.strategies=['ngram_4', 'ngram_2', 'off']", "speculation.enabled=true"]
    named = ["speculation.selector=beg_mab", f"rollout.max_batch_size={max_batch_size}"]
    selector = make_speculation(load_config(None, [*overrides, *named]), None).selector
    assert selector.choose(5).strategy.is_off == is_off


def test_a_reward_of_a_module_is_found_by_its_worker_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward_of_mine.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    function = load_config(None, ["reward.function=reward_of_mine:length"]).reward.function
    with RewardPool(function, num_workers=1, timeout_s=120.0, on_error="raise") as pool:
        pool.submit(0, Prompt(prompt_id="a", draw_index=0, token_ids=(1,)), "four")
        assert pool.collect()[0].score == 4.0


FUNCTIONS = """
def loss(logprobs, old_logprobs, batch, section, delta, *, power=1): ...
def plain(logprobs, old_logprobs, batch, section): ...
def any_loss(logprobs, old_logprobs, batch, section, **others): ...
def narrow(logprobs, delta): ...
def advantage(rewards, power=1.0): ...
"""


@pytest.mark.parametrize(
    ("key", "function", "arguments", "message"),
    [
        ("loss", "loss", "{delta: 4.0}", ""),
        ("loss", "loss", "{delta: 4.0, power: 2}", ""),
        ("loss", "any_loss", "{delta: [1, 2]}", ""),
        ("advantage", "advantage", "{power: 0.5}", ""),
        ("advantage", "advantage", "{}", ""),
        ("loss", "loss", "{delta: 4.0, powr: 2}", r"^algorithm\.loss_args=\{'delta': 4\.0, 'powr': 2\}: must be the parameters of .*:loss\(logprobs, .*, delta, \*, power=1\) behind .*, section: got an unexpected .*'powr'$"),
        ("loss", "loss", "{power: 2}", r"^algorithm\.loss_args=\{'power': 2\}: must be .*: missing a required argument: 'delta'$"),
        ("loss", "loss", "{}", r"^algorithm\.loss_args=\{\}: must be .*: missing a required argument: 'delta'$"),
        ("loss", "plain", "{power: 2}", r"^algorithm\.loss_args=\{'power': 2\}: must be .*: got an unexpected keyword argument 'power'$"),
        ("loss", "any_loss", "{batch: 2}", r"^algorithm\.loss_args=\{'batch': 2\}: must be .* multiple values for keyword argument 'batch'$"),
        ("loss", "narrow", "{delta: 2}", r"^algorithm\.loss='.*:narrow': has parameters \(logprobs, delta\), must accept \(logprobs, "),
        ("advantage", "advantage", "{rewards: 2}", r"^algorithm\.advantage_args=\{'rewards': 2\}: must be .* multiple values"),
    ],
)  # fmt: skip
def test_arguments_of_a_users_function_are_those_of_its_signature(
    key: str, function: str, arguments: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    name, spec = f"algorithm.{key}", f"{tmp_path}/mine.py:{function}"
    config = load_config(None, [f"{name}={spec}", f"{name}_args={arguments}"])
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        load_code(config, name, spec)


def test_a_selector_without_its_methods_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "partial.py"
    file.write_text("class Partial:\n    def choose(self, batch_size): ...\n")
    overrides = ["speculation.strategies=['ngram_4']", "speculation.enabled=true"]
    config = load_config(None, [*overrides, f"speculation.selector={file}:Partial"])
    with pytest.raises(ValueError, match=r"selector='.*:Partial': lacks observe, "):
        make_speculation(config, None)


def test_a_file_is_one_module_whatever_settings_name_it_and_its_path(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"def answer(**about): ...\n{REWARD}")
    one, other = (load_extension("reward.function", f"{tmp_path}/{n}/same.py:length") for n in "ab")
    for function in (one, other):
        assert sys.modules[function.__module__].length is function
    environment = load_extension("rollout.environment", f"{tmp_path}/b/../a/same.py:answer")
    assert one.__globals__ is environment.__globals__ is not other.__globals__


@pytest.mark.parametrize("setting", REGISTRY)
def test_every_registered_name_exists(setting: str) -> None:
    for name in REGISTRY[setting].built_in:
        assert callable(load_extension(setting, name))


def test_a_users_file_may_start_processes_that_import_it(tmp_path: Path) -> None:
    """By spawn, a process imports the module of a function by its name."""
    (tmp_path / "my.reward-1.py").write_text(
        "import multiprocessing\nfrom concurrent.futures import ProcessPoolExecutor\n\n\n"
        "def part(x):\n    return x + 1\n\n\n"
        "def f(**_):\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    with ProcessPoolExecutor(1, mp_context=context) as pool:\n"
        "        return pool.submit(part, 1).result()\n"
    )
    name = f"{tmp_path}/my.reward-1.py:f"
    with RewardPool(name, num_workers=1, timeout_s=60.0, on_error="raise") as pool:
        pool.submit("it", Prompt(prompt_id="1", draw_index=0, token_ids=(1,)), "text")
        found = pool.collect()
    assert found is not None
    assert found["it"].score == 2.0
