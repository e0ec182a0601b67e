"""Models and data sets by their id of the Hugging Face Hub, from a server on this machine that
speaks its protocol.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.fake_hub import COMMIT, FakeHub, serve
from tests.tiny_task import REPO, python, rollouts

IDS = (
    "model.path=tiny/policy",
    "data.train=tiny/sums:train",
    "data.eval=tiny/sums@main:test",
    "data.input_key=question",
    "data.label_key=answer",
)


@pytest.fixture
def hub(config: Path, tmp_path: Path) -> Iterator[FakeHub]:
    data = tmp_path / "sums"
    data.mkdir()
    for split in ("train", "test"):
        rows = [{"question": f"{i}+1=", "answer": "5"} for i in range(12)]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = shutil.copytree(config.parent / "model", tmp_path / "policy")
    (model / "onnx").mkdir()
    (model / "onnx" / "model.safetensors").write_bytes(b"another format of the same weights")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    with serve(FakeHub(models={"tiny/policy": model}, datasets={"tiny/sums": data})) as hub:
        yield hub


def tlt(hub: FakeHub, home: Path, *words: object, offline: bool = False) -> tuple[int, str]:
    """Run a command of `tlt`, as `run`."""
    return run(hub, home, "-m", "tlt_megatron.cli", *words, offline=offline)


def run(hub: FakeHub, home: Path, *words: object, offline: bool = False) -> tuple[int, str]:
    """Run Python with a cache of its own. Return the exit code and all that it says."""
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": str(int(offline))}
    done = python(*words, **own)
    return done.returncode, done.stdout + done.stderr


def test_a_run_fetches_once_and_repeats_offline(hub: FakeHub, config: Path, tmp_path: Path) -> None:
    unused = "critic.path=tiny/none"  # there is no critic without algorithm.advantage=gae
    settings = (*IDS, unused, "run.num_steps=1", "eval.num_prompts=2")
    words = ("train", config, *settings, "--nproc-per-node=2")
    for number, offline in enumerate((False, True)):
        asked = len(hub.requests)
        code, output = tlt(
            hub, tmp_path / "hf", *words, f"run.dir={tmp_path / str(number)}", offline=offline
        )
        assert code == 0, output
        assert offline == (len(hub.requests) == asked), hub.requests[asked:]
    downloads = hub.downloads()
    assert downloads.count("model.safetensors") == 1, downloads
    assert downloads.count("train.jsonl") == 1, downloads
    assert downloads.count("tool_use.jinja") == 1, downloads
    exported = tmp_path / "0" / "hf" / "additional_chat_templates" / "tool_use.jinja"
    assert exported.read_text() == "{{ tools }}"
    first, again = (rollouts(tmp_path / name) for name in ("0", "1"))
    assert first == again
    assert first[0]["prompt"].endswith("+1=")


@pytest.mark.parametrize(
    "setting, reason",
    [
        ("model.path=tiny/other", "Repository Not Found"),
        ("model.path=tiny/policy@v2", "Revision Not Found"),
        ("data.train=tiny/others:train", "tiny/others"),
        ("data.train=tiny/sums:validation", "validation"),
    ],
)
def test_what_the_hub_lacks_is_refused_in_one_line(
    hub: FakeHub, config: Path, tmp_path: Path, setting: str, reason: str
) -> None:
    code, output = tlt(hub, tmp_path / "hf", "train", config, *IDS, setting)
    line = output.splitlines()[-1]
    key, _, value = setting.partition("=")
    assert code == 2, output
    assert line.startswith(f"tlt train: {key}={value!r}: is no "), output
    assert reason in line
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("breaks off", "model.path='tiny/policy': .* and the Hugging Face Hub does not give it: "),
        (
            ".safetensors",
            "model.path='tiny/policy': model.safetensors has the SHA-256 .*: it was deleted from the cache",
        ),
        (
            ".jsonl",
            "data.train='tiny/sums:train': train.jsonl has the SHA-256 .*: it was deleted from the cache",
        ),
    ],
)
def test_a_download_that_fails_is_one_line_and_works_the_next_time(
    hub: FakeHub, config: Path, tmp_path: Path, fault: str, reason: str
) -> None:
    words = ("train", config, *IDS, "--dry-run", f"run.dir={tmp_path / 'run'}")
    hub.fault = fault
    _, output = tlt(hub, tmp_path / "hf", *words)
    assert len(re.findall(reason, output)) == 1, output
    assert "Traceback" not in output
    blobs = [path for path in (tmp_path / "hf").rglob("blobs/*") if path.stat().st_size > 10_000]
    if fault != ".jsonl":
        assert not [path for path in blobs if "incomplete" not in path.name]
    hub.fault = ""
    code, output = tlt(hub, tmp_path / "hf", *words)
    assert code == 0, output


def test_without_a_network_the_line_says_how_to_get_the_folder(
    hub: FakeHub, config: Path, tmp_path: Path
) -> None:
    code, output = tlt(hub, tmp_path / "hf", "train", config, *IDS, offline=True)
    assert code == 2
    assert "hf download tiny/policy --local-dir policy, then copy policy here" in output
    assert not hub.requests


def test_a_plan_fetches_the_config_alone(hub: FakeHub, config: Path, tmp_path: Path) -> None:
    code, output = tlt(hub, tmp_path / "hf", "plan", config, "--ranks", 2, *IDS)
    assert code == 0, output
    assert hub.downloads() == ["config.json"]


def test_init_reads_no_weights_and_pins_the_commit(
    hub: FakeHub, config: Path, tmp_path: Path
) -> None:
    data, out = config.parent / "train.jsonl", tmp_path / "mine"
    words = ("--model", "tiny/policy", "--data", data, "--gpus", 0, "--out", out)
    code, output = tlt(hub, tmp_path / "hf", "init", *words)
    assert code == 0, output
    assert "model.safetensors" not in hub.downloads()
    settings = yaml.safe_load((out / "config.yaml").read_text())
    assert settings["model"]["path"] == f"tiny/policy@{COMMIT}"


def test_a_conversion_takes_an_id_and_an_export_is_uploaded(
    hub: FakeHub, config: Path, tmp_path: Path
) -> None:
    megatron, target = tmp_path / "megatron", tmp_path / "exported"
    code, output = tlt(hub, tmp_path / "hf", "convert", "--from", "tiny/policy", "--to", megatron)
    assert code == 0, output
    words = ("convert", "--from", megatron, "--model", config.parent / "model", "--to", target)
    code, output = tlt(hub, tmp_path / "hf", *words, "--push-to-hub", "me/mine")
    assert code == 0, output
    assert output.splitlines()[-1].endswith(f"/me/mine/commit/{COMMIT}")
    assert [(each["name"], each["visibility"]) for each in hub.created] == [("mine", "private")]
    written = {str(f.relative_to(target)): f.read_bytes() for f in target.rglob("*") if f.is_file()}
    assert {name: hub.uploads[name] for name in written} == written


@pytest.mark.parametrize("name", ["mine", "me/mine@main"])
def test_what_is_no_id_is_refused_before_an_export(hub: FakeHub, tmp_path: Path, name: str) -> None:
    words = ("--from", "no", "--to", tmp_path / "new", "--format", "sglang", "--push-to-hub", name)
    code, output = tlt(hub, tmp_path / "hf", "export-drafter", *words)
    assert code == 2
    assert f"--push-to-hub {name}: must be an id of the Hub" in output.splitlines()[-1]


def test_a_recipe_converts_a_data_set_by_its_id(hub: FakeHub, tmp_path: Path) -> None:
    samples, folder, out = REPO / "examples/datasets/samples", tmp_path / "gsm8k", tmp_path / "rows"
    folder.mkdir()
    shutil.copy(samples / "gsm8k.jsonl", folder / "train.jsonl")
    hub.datasets["openai/gsm8k"] = folder
    program = "examples/datasets/convert.py"
    for name in ("openai/gsm8k:train", str(samples / "gsm8k.jsonl")):
        words = ("gsm8k", name, "--out", str(out / name.replace("/", "_")))
        code, output = run(hub, tmp_path / "hf", program, *words)
        assert code == 0, output
    from_hub, from_file = (file.read_text() for file in out.iterdir())
    assert from_hub == from_file
