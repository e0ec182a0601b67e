"""YAML and overrides: what is read, what is refused and how the refusal reads, and that a dump
reads back.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tlt_megatron.config.load import dump_config, load_config
from tlt_megatron.config.schema import ModelSection, RunConfig


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("text", ["", "# nothing\n", "run:\n", "run:\n  # num_steps: 3\n"])
def test_empty_file_or_section_is_defaults(tmp_path: Path, text: str) -> None:
    assert load_config(write(tmp_path, text)) == RunConfig()


def test_override_wins_over_file_and_the_last_one_over_the_first(tmp_path: Path) -> None:
    path = write(tmp_path, "run: {num_steps: 3, seed: 5}")
    config = load_config(path, ["run.num_steps=7", "run.num_steps=9"])
    assert (config.run.num_steps, config.run.seed) == (9, 5)


@pytest.mark.parametrize(
    "text, lr", [("1e-6", 1e-6), ("1.5e-6", 1.5e-6), ("1E-6", 1e-6), ("2", 2.0), ("0.25", 0.25)]
)
def test_floats_are_read_as_everyone_expects(tmp_path: Path, text: str, lr: float) -> None:
    by_override = load_config(None, [f"optimizer.lr={text}"]).optimizer.lr
    by_file = load_config(write(tmp_path, f"optimizer: {{lr: {text}}}")).optimizer.lr
    assert by_override == by_file == lr
    assert isinstance(by_override, float)


def test_an_override_changes_no_other_section_of_the_same_anchor(tmp_path: Path) -> None:
    path = write(tmp_path, "optimizer: &shared {lr: 1e-5, warmup_steps: 3}\ncritic: *shared")
    config = load_config(path, ["optimizer.lr=1e-6", "optimizer.min_lr=1e-7"])
    assert (config.optimizer.lr, config.critic.lr) == (1e-6, 1e-5)


@pytest.mark.parametrize("text", ["/data/my run #3", "'/data/my run #3'"])
def test_an_override_keeps_every_character_of_a_text(text: str) -> None:
    assert load_config(None, [f"run.dir={text}"]).run.dir == "/data/my run #3"


def test_overrides_read_strings_booleans_lists_and_nested_tables(tmp_path: Path) -> None:
    """A dump of them reads back equal."""
    config = load_config(
        None,
        [
            "model.path=some/folder with spaces",
            "logging.project=a=b",
            "checkpoint.resume=",
            "data.shuffle=false",
            "sglang.engine_args.window_size=[128, 0]",
            "sglang.engine_args.a={b: 1e-5, c: null, d: '1e-5'}",
            "optimizer.min_lr=1.25e-12",
            "speculation.strategies=[4_2_8, ngram_4]",
            "spot.data_bytes=1_000_000",
        ],
    )
    assert config.model.path == "some/folder with spaces"
    assert config.logging.project == "a=b"
    assert config.checkpoint.resume == ""
    assert config.data.shuffle is False
    assert config.speculation.strategies == ["4_2_8", "ngram_4"]
    assert config.spot.data_bytes == 1_000_000
    assert config.sglang.engine_args == {
        "window_size": [128, 0],
        "a": {"b": 1e-5, "c": None, "d": "1e-5"},
    }
    assert load_config(write(tmp_path, dump_config(config))) == config


@pytest.mark.parametrize(
    "override, message",
    [
        ("rollout.num_sample=4", r"rollout\.num_sample=4: unknown key; did you mean num_samples\?"),
        ("run.wandb=1", r"run\.wandb=1: unknown key; must be one of .*device, dir, "),
        ("rolout.num_samples=4", r"rolout=.*unknown key; did you mean rollout\?"),
        (
            "sglang-speculative-draft-model-path=d",
            r"unknown key; .*-path: here speculation\.drafter$",
        ),
        (
            "actor_rollout_ref={actor: {ppo_epochs: 2}, rollout: {n: 4, mode: x}}",
            r"actor_rollout_ref\.actor\.ppo_epochs: here algorithm\.num_epochs; "
            r"actor_rollout_ref\.rollout\.n: here rollout\.num_samples$",
        ),
        ("run.dir=$HOME/run", r"run\.dir='\$HOME/run': must be a path as it is on disk"),
        ("run.dir=~nobody/run", r"run\.dir='~nobody/run': must be a path as it is on disk"),
        ('run.dir="a\\nb"', r"run\.dir='a\\nb': must be a path as it is on disk"),
        ("run.num_steps=ten", r"run\.num_steps='ten': must be int, not str"),
        ("optimizer.lr=fast", r"optimizer\.lr='fast': must be float, not str"),
        ("data.shuffle=1", r"data\.shuffle=1: must be bool, not int"),
        ("model.path=7", r"model\.path=7: must be str, not int"),
        ("rollout=4", r"rollout=4: must be a section of keys, not int"),
        ("=3", r"override '=3': must be section\.key=value"),
        ("model.path=[a", r"override 'model\.path=\[a': is not YAML"),
        ("run.dir=2026-13-45", r"override 'run\.dir=2026-13-45': is not YAML: month must be"),
        ("data.eval=3", r"data\.eval=3: must be str or list, not int: put it in quotes"),
        ("run.num_steps=010", r"run\.num_steps='010': must be int, not str"),
        ("reward.function={1: 0.5}", r"key of reward\.function=1: must be str, not int"),
        ("reward.function={math: null}", r"reward\.function\.math=None: must be float"),
        ("reward.function={math: yes}", r"reward\.function\.math=True: must be float, not bool"),
        ("reward.function={maths: 1}", r"reward\.function='maths': must be one of math, exact"),
        ("reward.function={a.py:f: 1, b.py:f: 2}", r"different names, not \['f', 'f'\]"),
    ],
)
def test_refused_override_names_key_value_and_what_is_allowed(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(None, [override])


@pytest.mark.parametrize(
    "text, message",
    [
        ("- a\n- b", r"config='.*run\.yaml': must hold a mapping of sections, not list"),
        ("run: [1, 2]", r"run=\[1, 2\]: must be a section of keys, not list"),
        ("run.seed: 3", r"run\.seed=3: unknown key; a file has sections: run: \{seed: 3\}"),
        ("run: {", r"config='.*run\.yaml': is not YAML"),
        ("1: {}", r"1=\{\}: unknown key"),
        (b"run: {dir: L\xe4ufe}", r"config='.*run\.yaml': cannot be read: 'utf-8' codec"),
    ],
)
def test_refused_file_names_key_value_and_what_is_allowed(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        load_config(path)


def test_files_of_other_systems_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes("\ufeff# ä\r\nrun:\r\n  seed: 5\r\n".encode())
    assert load_config(path).run.seed == 5
    with pytest.raises(ValueError, match=r"is a folder, not a file"):
        load_config(tmp_path)


def test_paths_may_begin_with_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    overrides = ["model.path=~/m", "data.eval=[~/a.jsonl]", "reward.function={~/r.py:f: 1}"]
    overrides += ['rollout.stop=["~/ $"]']
    config = load_config(None, overrides)
    assert config.model.path == "/home/me/m"
    assert config.data.eval == ["/home/me/a.jsonl"]
    assert config.reward.weights == {"/home/me/r.py:f": 1.0}
    assert config.rollout.stop == ["~/ $"]


def test_override_cannot_pass_through_a_value_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_steps is a value, not a section"):
        load_config(write(tmp_path, "run: {num_steps: 3}"), ["run.num_steps.x=1"])


def test_dump_of_defaults_reads_back_equal_and_shows_every_key(tmp_path: Path) -> None:
    text = dump_config(RunConfig())
    assert load_config(write(tmp_path, text)) == RunConfig()
    for section in dataclasses.fields(RunConfig):
        assert f"\n{section.name}:\n" in "\n" + text
        for key in dataclasses.fields(getattr(RunConfig(), section.name)):
            assert f"  {key.name}:" in text


@pytest.mark.parametrize(
    "value",
    ["1e-6", "1e5", "12", "true", "null", "", "a: b", "# x", "é\n", "=", "[x", "2026-01-01"],
)
def test_dump_keeps_strings_that_look_like_something_else(tmp_path: Path, value: str) -> None:
    config = RunConfig(model=ModelSection(path=value))
    assert load_config(write(tmp_path, dump_config(config))) == config


def test_a_later_file_goes_over_an_earlier_one_setting_by_setting(tmp_path: Path) -> None:
    recipe, mine = tmp_path / "recipe.yaml", tmp_path / "mine.yaml"
    recipe.write_text("algorithm: {advantage: rloo, clip_high: 0.28}\nrollout: {num_prompts: 4}\n")
    mine.write_text("algorithm: {clip_high: 0.5}\nrun:\nrollout:\n")
    config = load_config([recipe, mine], ["run.num_steps=3"])
    assert (config.algorithm.advantage, config.algorithm.clip_high) == ("rloo", 0.5)
    assert (config.rollout.num_prompts, config.run.num_steps) == (4, 3)
    with pytest.raises(ValueError, match=r"config='nowhere\.yaml': no such file"):
        load_config([recipe, "nowhere.yaml"])


@pytest.mark.parametrize(
    "name",
    ["[x].jsonl", "{a}.jsonl", "*x.jsonl", "@x", "%x", "a: b: c", "[x", "a: b.jsonl", "- x.jsonl"],
)
def test_a_file_whose_name_is_no_yaml_is_taken_as_it_stands(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"is not YAML|must be str, not list|unknown key"):
        load_config(None, [f"data.train={name}"])
    (tmp_path / name).touch()
    assert load_config(None, [f"data.train={name}"]).data.train == name
