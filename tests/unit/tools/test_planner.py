"""`tlt plan --simulate`: predictions from run folders whose machine is known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.tiny_models import make_tiny_hf
from tests.tiny_task import make_tiny_task
from tests.unit.config.test_example_settings import EXAMPLES, QWEN_7B
from tlt_megatron import cli

LENGTHS = [[[3, 5], [9, 2]], [[4, 4], [4, 4]]]  # two steps of two prompts with two responses each
OFF_S, SLOPE_S = 10.0, 2.0  # a plain pass: start, and for each request
CHAIN_S = 20.0  # a pass of 2_1_2, whatever its batch
UPDATE_S = 50.0  # and 1.0 for each token of a rank
CACHED_S = 0.5  # a plain pass, for each response token that its requests have
# Those tokens by step, rank and batch size: midway between two ends, the first token not counted.
# A batch size that never runs has those of the nearest one.
CACHED = {(1, 0): {2: 2, 1: 3}, (1, 1): {2: 1, 1: 4.5}, (2, 0): {2: 3, 1: 3}, (2, 1): {2: 3, 1: 3}}

SETTINGS = (
    "data: {max_prompt_tokens: 16}\n"
    "rollout: {num_prompts: 2, num_samples: 2, max_new_tokens: 16}\n"
    "speculation: {enabled: true, strategies: ['2_1_2']}\n"
    "spot: {enabled: true}\nrun: {device: cpu}\n"
)


def _record(
    folder: Path, *, spot: bool = True, cached_s: float = 0.0, settings: str = SETTINGS
) -> Path:
    """Write a run of two ranks whose passes and phases follow the constants above. A drafter of u
    updates has both tokens right with chance min(u / 100, 1).
    """
    rows, metrics = [], []
    for step, prompts in enumerate(LENGTHS, start=1):
        updates = 100 if step == 2 else 0
        for rank in range(2):
            for size in (1, 2):
                requests, right = 200 * size, 2 * updates * size
                pass_s = OFF_S + SLOPE_S * size + cached_s * CACHED[step, rank][size]
                rows.append(_passes(step, rank, "off", size, 200 * pass_s, requests, []))
                committed = requests + 2 * right
                rows.append(
                    _passes(step, rank, "2_1_2", size, 200 * CHAIN_S, committed, [right, right])
                )
        tokens = sum(map(sum, prompts))
        gen_s = sum(row["seconds"] for row in rows if row["step"] == step and row["rank"] == 0)
        update_s = UPDATE_S + tokens / 2
        metrics.append(
            {
                "step": step,
                "prompt_length/mean": 4.0,
                "timing_s/gen": gen_s,
                "timing_s/update_actor": update_s,
                "timing_s/step": gen_s + update_s,
                "spot/updates": 100.0 if spot else 0.0,
                "bubble/idle_s": 1.0,
                "bubble/used_s": 1.0 if spot else 0.0,
            }
        )
        (folder / "rollouts").mkdir(parents=True, exist_ok=True)
        responses = [
            {"draw_index": index, "sample_index": i, "token_ids": [7] * length, "reward": 1.0}
            for index, lengths in enumerate(prompts)
            for i, length in enumerate(lengths)
        ]
        _write(folder / "rollouts" / f"step_{step:07d}.rank_00000.jsonl", responses)
    (folder / "speculation").mkdir(exist_ok=True)
    for rank in range(2):
        own = [row for row in rows if row["rank"] == rank]
        _write(folder / "speculation" / f"rank_{rank:05d}.jsonl", own)
    _write(folder / "metrics.jsonl", metrics)
    model = make_tiny_hf(folder.parent / "model", "qwen2")
    (folder / "config.yaml").write_text(f"model: {{path: {model}}}\n{settings}")
    return folder


def _passes(step, rank, strategy, size, seconds, committed, accepted) -> dict:
    names = ("step", "rank", "strategy", "batch_size", "passes", "seconds", "committed")
    values = (step, rank, strategy, size, 200, seconds, committed)
    return dict(zip(names, values, strict=True)) | {"accepted_by_depth": accepted, "reasons": {}}


def _write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs `tlt plan --simulate` and returns its exit code and the numbers
    of each row.
    """
    monkeypatch.setenv("COLUMNS", "200")
    model = tmp_path / "model"
    make_tiny_hf(model, "qwen2")
    config = tmp_path / "my.yaml"
    config.write_text(f"model: {{path: {model}}}\n{SETTINGS}")

    def run(*words: str) -> tuple[int, str, dict[str, list[float]]]:
        code = cli.main(["plan", str(config), "--ranks", "2", *words])
        printed = capsys.readouterr()
        table = {}
        for line in printed.out.splitlines():
            cells = [cell.strip() for cell in line.split("│")[1:-1]]
            if len(cells) > 1 and all(re.fullmatch(r"[\d.]+", cell) for cell in cells[1:]):
                table[cells[0]] = [float(cell) for cell in cells[1:]]
        return code, printed.out + printed.err, table

    return run


def test_seconds_are_those_of_the_recorded_machine(plan, tmp_path: Path) -> None:
    code, text, table = plan("--simulate", str(_record(tmp_path / "run")))
    assert code == 0, text
    # Rank 0 has [3, 5] and rank 1 [9, 2]: 8 plain passes, one of them with two requests. Then two
    # times [4, 4].
    first_s = 7 * (OFF_S + SLOPE_S) + (OFF_S + 2 * SLOPE_S)
    second_s = 3 * (OFF_S + 2 * SLOPE_S)
    plain, fixed, frozen, tlt = table["gen"]
    assert plain == pytest.approx((first_s + second_s) / 2, abs=0.01)
    # A trained drafter commits 3 tokens in a pass of 20 s: 3 passes for 8 tokens, then one for 3.
    assert fixed == pytest.approx((3 + 1) * CHAIN_S / 2, abs=0.01)
    assert frozen <= plain
    assert tlt <= plain + 2 * CHAIN_S
    trained = (19 + 16) / 2 / 2  # tokens of a rank, mean of the steps
    assert table["update_actor"] == pytest.approx([UPDATE_S + trained] * 4, abs=0.01)
    assert table["step"][0] == pytest.approx(plain + table["update_actor"][0], abs=0.02)


def test_a_pass_over_longer_contexts_takes_longer(plan, tmp_path: Path) -> None:
    _, _, without = plan("--simulate", str(_record(tmp_path / "without")))
    _, _, table = plan("--simulate", str(_record(tmp_path / "run", cached_s=CACHED_S)))
    # Rank 1 begins with a pass without tokens, then its request has 1 to 7. In step 2 two requests
    # have 0, 1 and 2 each.
    cached = (0 + sum(range(1, 8)) + 2 * sum(range(3))) / 2
    assert table["gen"][0] - without["gen"][0] == pytest.approx(cached * CACHED_S, abs=0.02)


def test_compared_settings_have_a_row_and_the_best_that_fits_is_taken(plan, tmp_path: Path) -> None:
    run = str(_record(tmp_path / "run"))
    words = ("--simulate", run, "--compare", "rollout.num_samples=3", "--compare", "ranks=1")
    code, text, _ = plan(*words)
    assert code == 0, text
    # One rank has all the work, and a second request in a pass costs little.
    assert re.search(r"│ ranks=1 .*│ +- │", text)
    assert "Take ranks=1: " in text
    _, text, _ = plan(*words, "--memory", "0.001")
    assert "None fits. as given: memory: the" in text


def test_a_prediction_stands_beside_what_was_measured_and_both_are_drawn(
    plan, tmp_path: Path
) -> None:
    run, path = str(_record(tmp_path / "run")), tmp_path / "plan.svg"
    code, text, table = plan("--simulate", run, "--against", run, "--figure", str(path))
    assert code == 0, text
    predicted, measured, ratio = table["update_actor"]
    assert (predicted, ratio) == (measured, 1.0)
    drawn = ElementTree.parse(path).getroot()
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"plain", "TLT", "update_actor", "run, predicted", "run, measured"} <= set(texts)
    seconds = json.loads(path.with_suffix(".json").read_text("utf-8"))
    assert seconds["run, measured"]["gen"] > 0.0
    assert seconds.keys() <= set(texts)


def test_a_selector_that_a_finished_run_names_runs_only_if_the_user_trusts_it(
    plan, tmp_path: Path
) -> None:
    run, file = _record(tmp_path / "run"), tmp_path / "theirs.py"
    file.write_text("from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n")
    written = (run / "config.yaml").read_text()
    assert "speculation: {" in written
    (run / "config.yaml").write_text(
        written.replace("speculation: {", f"speculation: {{selector: '{file}:f', ")
    )
    words = ("--simulate", str(run), "--against", str(run))
    code, text, _ = plan(*words)
    assert (code, file.with_suffix(".ran").exists()) == (2, False)
    assert f"{run}/config.yaml names code outside of the package" in text
    code, text, _ = plan(*words, "--trust-run")
    assert file.with_suffix(".ran").exists(), text


def test_figure_of_another_form_is_refused(plan, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        plan("--simulate", "absent", "--figure", "plan.png")
    assert "--figure plan.png: must end in .svg" in capsys.readouterr().err


def test_without_a_recorded_run_a_roofline_is_computed_and_called_so(plan) -> None:
    words = ("--machine", "h100", "--lengths", "4,8", "--accept-rate")
    code, text, table = plan(*words, "0.9")
    assert code == 0, text
    assert "computed, not measured" in text
    plain, fixed, _ = table["times as fast as plain"]  # and frozen; TLT is not known
    assert plain == 1.0 < fixed
    _, _, table = plan(*words, "0")
    assert table["times as fast as plain"][1] < 1.0
    code, text, _ = plan(*words, "1.5")
    assert (code, "--accept-rate 1.5: must be in [0, 1)" in text) == (2, True)


def test_measured_passes_of_the_gpu_check_scale_the_roofline(plan, tmp_path: Path) -> None:
    words = ("--machine", "h100", "--accept-rate", "0.5", "--lengths", "4,8")
    path, start = tmp_path / "results.jsonl", {"command": ["gpu_check.py"], "time": "now"}
    gen = []
    for pass_ms in (1e9, 3e9):  # so long that the passes of a tiny model take seconds
        figures = {f"b{batch}": {"pass_ms": pass_ms} for batch in (1, 8, 64)}
        _write(path, [start, {"stage": "2b", "item": "plain_2048", "figures": figures}])
        code, text, table = plan(*words, "--gpu-check", str(path))
        assert code == 0, text
        gen.append(table["gen"][0])
    assert "computed, scaled to measured passes of a 7B" in " ".join(text.split())
    assert gen[1] / gen[0] == pytest.approx(3.0, rel=0.01)
    del figures["b8"]
    _write(path, [{"stage": "2b", "item": "plain_2048", "figures": figures}])
    code, text, _ = plan(*words, "--gpu-check", str(path))
    assert (code, "has no pass_ms of all batches of item 2b.plain_2048" in text) == (2, True)


def test_partial_rollouts_end_a_step_with_enough_complete_groups(plan, tmp_path: Path) -> None:
    run = str(_record(tmp_path / "run"))
    words = ("rollout.partial_rollout_tokens=4", "algorithm.tis_cap=2")
    code, text, table = plan("--simulate", run, *words)
    assert code == 0, text
    one, two = OFF_S + SLOPE_S, OFF_S + 2 * SLOPE_S
    # Rank 0 begins with [3, 4] tokens, rank 1 with [4, 2]. Then rank 1 goes on with 4 of 5. Then
    # it draws a group more, [4, 4], while rank 0 ends the last one. The second step draws one.
    first_s = (2 * two + one) + 3 * one + 3 * two
    assert table["gen"][0] == pytest.approx((first_s + 3 * two) / 2, abs=0.01)


def test_drafter_training_is_not_predicted_from_runs_without_it(plan, tmp_path: Path) -> None:
    frozen, trained = (_record(tmp_path / str(spot), spot=spot) for spot in (False, True))
    code, text, _ = plan("--simulate", str(frozen), "--against", str(trained))
    assert code == 2
    assert "trained its drafter, but no run of --simulate did" in text


def test_longer_responses_take_longer(plan, tmp_path: Path) -> None:
    run = str(_record(tmp_path / "run"))
    _, _, short = plan("--simulate", run, "--lengths", "4,8", "rollout.max_new_tokens=400")
    _, _, long = plan("--simulate", run, "--lengths", "40,300", "rollout.max_new_tokens=400")
    assert long["gen"][0] > 5 * short["gen"][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "9,4"], "--lengths 9,4: must be MEDIAN,P99"),
        (["--lengths", "many"], "--lengths many: must be MEDIAN,P99"),
        (["--lengths", "1,inf"], "--lengths 1,inf: must be MEDIAN,P99"),
        (["--lengths", "nan,9"], "--lengths nan,9: must be MEDIAN,P99"),
        (["--memory", "nan"], "--memory nan: must be a number of GiB above 0"),
        (["--memory", "-1"], "--memory -1: must be a number of GiB above 0"),
        (["--prompt-tokens", "nan"], "--prompt-tokens nan: must be a number >= 1"),
        (["--prompt-tokens", "9"], "--gpu-check and --prompt-tokens need --machine"),
        (["--compare", "ranks=9999999999"], "--compare ranks=9999999999: must be >= 1 and <= "),
        (["run.device=cuda"], "ran on cpu, the plan is for run.device=cuda, unlike as given"),
        (["rollout.dtype=bfloat16"], "has rollout.dtype=float32, unlike as given"),
        (["speculation.strategies=[4_1_4]"], "4_1_4 did not run in the recorded runs"),
        (["--compare", "rollout.num_prompts=1000000000"], "step has at most 1048576 responses"),
        (["--compare", "ranks=none"], "--compare ranks=none: must be >= 1"),
        (["parallel.context=2"], "unlike as given; record a run of each"),
        (["--machine", "h100"], "--machine needs --lengths and --accept-rate, and no --simulate"),
        (["--gpu-check", "none"], "--gpu-check and --prompt-tokens need --machine"),
        (["--against", "nowhere"], "nowhere: has no config.yaml"),
        (
            ["speculation.drafter=own"],
            "drafter='own': the checkpoint {model} has no MTP layer (it is",
        ),
    ],
)
def test_what_is_missing_is_named(plan, tmp_path: Path, words: list[str], message: str) -> None:
    code, text, _ = plan("--simulate", str(_record(tmp_path / "run")), *words)
    assert code == 2
    assert message.replace("{model}", str(tmp_path / "model")) in text


def test_a_thousand_replicas_decode_at_the_speed_of_the_first_ones(plan, tmp_path: Path) -> None:
    run = str(_record(tmp_path / "run"))
    words = ("--simulate", run, "--lengths", "20,21", "rollout.max_new_tokens=400")
    _, _, few = plan(*words, "rollout.num_prompts=8", "--ranks", "8")
    _, _, many = plan(*words, "rollout.num_prompts=1024", "--ranks", "1024")
    assert many["gen"][0] == pytest.approx(few["gen"][0], rel=0.1)


def test_a_recording_of_another_model_is_refused(plan, tmp_path: Path) -> None:
    run = _record(tmp_path / "other" / "run")
    make_tiny_hf(run / "hf", "qwen2", hidden_size=32)
    code, text, _ = plan("--simulate", str(run))
    assert code == 2
    assert "has another model" in text
    assert "record a run of each" in text
    status = run / "status" / "rank_00000.json"
    status.parent.mkdir()
    status.write_text('{"device": "NVIDIA H100"}')
    code, text, _ = plan("--simulate", str(run))
    assert (code, "ran on NVIDIA H100, the plan is for run.device=cpu" in text) == (2, True)


@pytest.mark.parametrize(
    ("key", "value"),
    [("passes", 0), ("batch_size", 0), ("seconds", float("nan")), ("accepted_by_depth", [-1])],
)
def test_passes_that_no_run_writes_are_refused(
    plan, tmp_path: Path, key: str, value: object
) -> None:
    run = _record(tmp_path / "run")
    file = run / "speculation" / "rank_00000.jsonl"
    first, *rows = map(json.loads, file.read_text().splitlines())
    _write(file, [first | {key: value}, *rows])
    code, text, _ = plan("--simulate", str(run))
    assert code == 2
    assert "must be at least 1, 1 and 0" in text.splitlines()[-1]


def test_seconds_that_no_run_writes_are_refused(plan, tmp_path: Path) -> None:
    run = _record(tmp_path / "run")
    first, *rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    _write(run / "metrics.jsonl", [first | {"timing_s/gen": -1.0}, *rows])
    code, text, _ = plan("--simulate", str(run))
    assert code == 2
    assert "a timing_s/ of metrics.jsonl is no number of seconds" in text.splitlines()[-1]


def test_requests_wait_while_the_kv_is_full(plan, tmp_path: Path) -> None:
    """Two requests of 101 tokens, with prompts of 4 that siblings share, do not fit in 192 slots
    together to their ends: the newer one is interrupted when both have 94 tokens.
    """
    run = str(_record(tmp_path / "run"))
    one, two = OFF_S + SLOPE_S, OFF_S + 2 * SLOPE_S
    words = ("--simulate", run, "--lengths", "101,101.0001", "rollout.max_new_tokens=101")
    words += ("data.max_prompt_tokens=16", "rollout.num_prompts=2")
    _, _, roomy = plan(*words)
    _, text, table = plan(*words, "rollout.kv_cache_tokens=192")
    assert roomy["gen"][0] == pytest.approx(100 * two, rel=0.01), text
    assert table["gen"][0] == pytest.approx(94 * two + (6 + 6) * one, rel=0.005), text


def test_the_passes_of_a_recording_take_as_long_as_they_took(plan, tmp_path: Path) -> None:
    """Long passes count as much as they take: a stalled one is in the mean."""
    run = _record(tmp_path / "run")
    for rank in range(2):
        file = run / "speculation" / f"rank_{rank:05d}.jsonl"
        rows = list(map(json.loads, file.read_text().splitlines()))
        for row in rows:
            row["seconds"] *= 3.0 if row["strategy"] == "off" and row["step"] == 2 else 1.0
        _write(file, rows)
    _, _, table = plan("--simulate", str(run))
    _, _, before = plan("--simulate", str(_record(tmp_path / "before")))
    assert table["gen"][0] == pytest.approx(2 * before["gen"][0], rel=0.2)  # the mean of both steps


def test_a_verdict_says_whether_it_fits_and_what_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B), encoding="utf-8")
    example = str(EXAMPLES / "qwen2_5_7b_8gpu.yaml")
    words = ["plan", example, "--ranks", "8", f"model.path={tmp_path}", "--memory"]
    assert cli.main(words[:-1]) == 0
    assert capsys.readouterr().out.endswith(" phase: --memory GIB says whether it fits\n")
    assert cli.main([*words, "80"]) == 0
    assert "\nfits 80 GiB: memory of a rank: " in capsys.readouterr().out
    assert cli.main([*words, "40"]) == 1
    _, problem, advice = capsys.readouterr().out.splitlines()[-3:]
    assert problem.startswith("does not fit 40 GiB: memory: the ")
    assert advice.startswith("it fits with ")
    settings = advice.removeprefix("it fits with ").split()
    assert cli.main([*words, "40", *settings]) == 0
    assert cli.main([*words, "0.5"]) == 1
    assert "nothing was found with which it fits" in capsys.readouterr().out


def test_prompts_are_as_long_as_they_are(plan, tmp_path: Path) -> None:
    words = ("--machine", "h100", "--lengths", "1500,12000", "--accept-rate", "0.5")
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B), encoding="utf-8")
    example = (str(EXAMPLES / "qwen2_5_7b_8gpu.yaml"), f"model.path={tmp_path}", "--ranks", "8")
    example += ("rollout.num_prompts=16", *words)
    _, text, longest = plan(*example)
    assert "all prompts of 2048 tokens" in " ".join(text.split())
    _, text, short = plan(*example, "--prompt-tokens", "200")
    assert "all prompts" not in " ".join(text.split())
    assert short["update_actor"][0] < 0.7 * longest["update_actor"][0]
    code, text, _ = plan(*example, "--prompt-tokens", "1e18")
    assert (code, "1e+18: must be <= data.max_prompt_tokens=2048" in text) == (2, True)
    (tmp_path / "task").mkdir()
    task = make_tiny_task(tmp_path / "task")  # its prompts and tokenizer are on this machine
    code, text, _ = plan(str(task), "rollout.dtype=float32", *words)
    assert code == 0, text
    assert "all prompts" not in " ".join(text.split())
