"""A run whose drafter is the checkpoint's own layer: it changes no token, is trained on idle ranks,
goes on after a resume, and comes home in the exported model.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.test_evaluation import evaluate
from tests.e2e.test_serve import stand_in
from tests.e2e.test_spot_run import UNEVEN, check_second_half
from tests.tiny_task import (
    TLT,
    check_same_run,
    make_tiny_task,
    metric_rows,
    patient_engine,
    python,
    run,
    run_ending,
)
from tlt_megatron.api.text_engine import Engine
from tlt_megatron.config.load import load_config
from tlt_megatron.config.model_folder import check_model
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.models.own_drafter import load_own_drafter
from tools.commands import init_run
from tools.commands.export_drafter import export_drafter, find_drafter
from tools.commands.saved_run import model_and_drafter

pytestmark = pytest.mark.e2e

PLAIN = (*UNEVEN, "run.num_steps=4", "data.eval=", "logging.trackers=[]")
OWN = (*PLAIN, *TLT, "drafter.algorithm=hass", "drafter.lr=0.005", "speculation.drafter=own")
FEATURES = {
    "mimo": ("parallel.tensor=2", "model.lora_rank=4"),
    "glm4_moe": ("parallel.pipeline=2", "rollout.routing_replay=true"),
}
OTHER_LAYOUT = {
    "mimo": ("parallel.pipeline=2",),
    "glm4_moe": ("parallel.tensor=2", "parallel.expert=2", "rollout.routing_replay=true"),
}


@pytest.fixture(scope="module", params=FEATURES)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def task(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_task(tmp_path_factory.mktemp("task"), kind=kind, num_layers=4, has_mtp=True)


@pytest.fixture(scope="module")
def straight(task: Path, kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps, checkpointed after each."""
    run_dir = tmp_path_factory.mktemp("straight")
    engine = patient_engine(tmp_path_factory.mktemp("engine"), "embedded", (60, 60))
    kept = ("checkpoint.interval=1", "checkpoint.keep=0")
    run(2, task, run_dir, *OWN, *FEATURES[kind], engine, *kept)
    return run_dir


def test_no_token_and_no_weight_changes(task: Path, kind: str, straight: Path, tmp_path) -> None:
    said = run_ending(0, 2, task, tmp_path / "off", *PLAIN, *FEATURES[kind])
    assert "the checkpoint has an MTP layer, a trained drafter: speculation.drafter=own" in said
    check_same_run(straight, tmp_path / "off")
    assert metric_rows(straight)[0]["rollout/spec_accept_length"] > 1


def test_no_token_and_no_weight_changes_in_another_layout(
    task: Path, kind: str, tmp_path: Path
) -> None:
    own, off = tmp_path / "own", tmp_path / "off"
    fixed = "speculation.selector=fixed"  # so that every pass drafts
    run(2, task, own, *OWN, *OTHER_LAYOUT[kind], "run.num_steps=2", fixed)
    run(2, task, off, *PLAIN, *OTHER_LAYOUT[kind], "run.num_steps=2")
    check_same_run(own, off)
    assert metric_rows(own)[0]["rollout/spec_accept_length"] > 1


def test_a_resumed_run_goes_on_with_the_trained_layer(
    task: Path, kind: str, straight: Path, tmp_path: Path
) -> None:
    first = straight / "checkpoints" / "iter_0000002"
    run(2, task, tmp_path, *OWN, *FEATURES[kind], f"checkpoint.resume={first}")
    check_second_half(tmp_path, straight, first)


def test_the_export_holds_the_trained_layer(task: Path, straight: Path, kind: str) -> None:
    source, exported = (HfReader(folder) for folder in (task.parent / "model", straight / "hf"))
    assert source.names() == exported.names()
    check_model("model.path", straight / "hf")
    assert metric_rows(straight)[-1]["drafter/version"] >= 1
    prefix = "model.mtp_layers.0." if kind == "mimo" else "model.layers.4."
    changed = {
        name.removeprefix(prefix)
        for name in source.names()
        if name.startswith(prefix) and not torch.equal(source[name], exported[name])
    }
    fusion = "input_proj.weight" if kind == "mimo" else "eh_proj.weight"
    assert {fusion, "self_attn.q_proj.weight", "input_layernorm.weight"} <= changed
    assert not [name for name in changed if ".experts." in name or "mlp.gate." in name]
    for copy in ("embed_tokens", "shared_head.head"):
        if f"{prefix}{copy}.weight" in exported:
            whole = "model.embed_tokens" if copy == "embed_tokens" else "lm_head"
            assert torch.equal(exported[f"{prefix}{copy}.weight"], exported[f"{whole}.weight"])
    config = json.loads((straight / "hf" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    assert not (straight / "hf_drafter").exists()


def test_the_exported_model_loads_the_drafter_that_the_engines_had(straight: Path) -> None:
    """Bit for bit, so its accept length is the same."""
    reader = HfReader(straight / "hf")
    tables = [reader[name] for name in ("model.embed_tokens.weight", "lm_head.weight")]
    policy = load_model_config(straight / "hf")
    model = load_own_drafter(straight / "hf", policy, embedding_VD=tables[0], lm_head_VD=tables[1])
    published = load_file(straight / "drafter" / "model.safetensors")
    assert published.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, published[name]), name


def test_the_commands_and_the_api_draft_with_the_exported_layer(straight: Path) -> None:
    model, drafter = model_and_drafter(str(straight))
    assert (model, drafter) == (str(straight / "hf"), "own")
    settings = {"max_new_tokens": 40, "num_samples": 4, "seed": 3}
    plain, drafted = (
        Engine(model, drafter=each, strategies=strategies, dtype="float64").generate(
            ["t1=", "t2="], **settings
        )
        for each, strategies in ((None, None), (drafter, ["3_1_3"]))
    )
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    lengths = [length for each in drafted for length in each.accept_lengths]
    assert sum(lengths) / len(lengths) > 1


def test_an_evaluation_drafts_with_it_and_draws_the_same(straight: Path, tmp_path: Path) -> None:
    data = straight.parent / "rows.jsonl"
    data.write_text('{"prompt": "e1=", "label": "5"}\n')
    words = f"{straight} --data {data} --samples 4 --trust-run rollout.dtype=float64"
    words += " rollout.engine=embedded"  # the run's own waits for other ranks
    given = [*words.split(), "parallel.tensor=1", "parallel.pipeline=1"]
    plain = evaluate(given, tmp_path / "plain")
    drafted = evaluate([*given, "--drafter", "own"], tmp_path / "drafted")
    assert drafted["metrics"]["avg@4"] == plain["metrics"]["avg@4"]
    used = [load_config(tmp_path / n / "config.yaml").speculation for n in ("plain", "drafted")]
    assert [(each.enabled, each.drafter) for each in used] == [(False, "own"), (True, "own")]


@pytest.mark.parametrize("engine, program", [("sglang", "python"), ("vllm", "vllm")])
def test_other_engines_serve_it(straight: Path, tmp_path: Path, engine: str, program: str) -> None:
    """The export itself holds the drafter: a model card says how, and nothing else is exported."""
    words = ("-m", "tlt_megatron.cli", "serve", straight, "--engine", engine)
    done = python(*words, PATH=stand_in(program, tmp_path))
    assert done.returncode == 0, done.stderr
    hf = straight / "hf"
    drafts = f"--speculative-algorithm NEXTN --speculative-draft-model-path {hf}"
    assert (drafts if engine == "sglang" else '"method": "mtp"') in done.stdout
    card = (hf / "README.md").read_text()
    assert "--speculative-algorithm NEXTN --speculative-draft-model-path HF" in card
    assert "hf_drafter" not in card
    with pytest.raises(ValueError, match=r"is the MTP layer of a policy: hf/ of its run holds it"):
        export_drafter(find_drafter(straight), tmp_path / "out", engine)


def test_init_says_that_there_is_one(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model", task.parent / "model", "--data", task.parent / "train.jsonl")
    init_run.main([*map(str, given), "--gpus", "0", "--out", str(tmp_path / "new")])
    assert "MTP layer, a trained drafter: speculation.drafter=own" in capsys.readouterr().out
