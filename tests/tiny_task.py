"""A complete run in a folder: random tiny model, character tokenizer, prompts, a reward that a
random policy can earn.

A run by `torchrun` is what users start, and spends 10 s of CPU on imports; `run` forks the same
program and spends none.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from tests.ranks import LIMIT_S, run_ranks
from tests.tiny_models import make_tiny_hf
from tlt_megatron.config.model_shape import tensor_shapes
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader
from tools.commands.compare_runs import compare, read_run

REPO = Path(__file__).resolve().parent.parent
ALPHABET = "0123456789+-*/=<>.,;:#abcdefghijklmnopqrst"  # 42 characters; with <pad> and <eos> 44, + 4 unused = 48

# Speculation by the learned drafter and by retrieval, and spot training.
TLT = (
    *("speculation.enabled=true", "speculation.strategies=['3_1_3','3_2_6','ngram_4']"),
    *("spot.enabled=true", "drafter.batch_tokens=64"),
)
FEATURES = {  # overrides of each; {task} is the folder of `write_environment`
    "critic": "algorithm.advantage=gae critic.lr=1e-3",
    "KL in the loss": "algorithm.kl_coef=0.1",
    "KL in the reward": "algorithm.kl_coef=0.1 algorithm.kl_placement=reward",
    "partial rollouts": "algorithm.tis_cap=2 rollout.over_sampling_prompts=4"
    " rollout.partial_rollout_tokens=5",
    "conversations": "rollout.environment={task}/environment.py:answer rollout.max_turns=3"
    " rollout.max_observation_tokens=12",
    "environment": "rollout.environment={task}/environment.py:Search rollout.max_turns=3"
    " rollout.max_observation_tokens=12"
    ' reward.function={"environment":1.0,"{task}/reward.py:compute_score":0.5}',
    "tools": "rollout.tools=['{task}/tools.py:add','python'] data.train={task}/chat.jsonl rollout.max_turns=3"
    " data.max_prompt_tokens=1024 rollout.max_observation_tokens=400 rollout.max_tool_tokens=60",
    "dynamic sampling": "algorithm.filter_groups=score",
    "experts": "parallel.expert=2",
    "routing replay": "rollout.routing_replay=true",
    "context parallelism": "parallel.context=2",
    "speculation": " ".join(TLT),
    "own layer": " ".join((*TLT, "speculation.drafter=own", "drafter.algorithm=hass")),
    "stop strings": "rollout.stop=['<3','4','b','dd'] eval.stop=[]",
    "batch invariance": "rollout.batch_invariant=true rollout.dtype=float32",
    "LoRA": "model.lora_rank=4 optimizer.lr=1e-2",
    "second model": "reference.path={task}/teacher algorithm.kl_coef=0.1",
    "distillation": "algorithm.distill_coef=0.5",
}
REWARD = '''"""Share of the digits of a response that are below five, in steps of 1/4: neither always 0 nor always 1."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    digits = [c for c in solution_str if c.isdigit()]
    return round(4 * sum(c < ground_truth for c in digits) / max(1, len(digits))) / 4
'''

# <eos> 0 = > # t: a random policy ends its responses and turns early with one of them.
STOPS = (1, 2, 16, 18, 23, 43)
ENVIRONMENT = """
import asyncio

from tlt_megatron import Environment, Step


class Search(Environment):
    \"\"\"Messages, rewards and the end depend on the seed and all turns so far.\"\"\"

    def start(self, row, seed):
        assert row["ground_truth"] == "5"
        self.state = seed % 1000
        return "abc"[: seed % 3]

    def step(self, turn):
        assert turn.messages[-1] == {"role": "assistant", "content": turn.text}
        self.state += sum(turn.token_ids)
        message = {"role": "tool", "content": "12+" * (self.state % 3)}
        is_done = self.state % 5 == 4
        stop = ["7", "1+"] if self.state % 2 else None
        return Step([message], reward=self.state % 4 / 4 - 0.25, is_done=is_done, stop=stop)

    def end(self):
        return {"score": self.state % 2 / 2, "state": self.state}


class Patient(Search):
    async def step(self, turn):
        await asyncio.sleep(0.01)
        return super().step(turn)


def answer(messages, data_source, ground_truth, extra_info):
    assert ground_truth == "5"
    turn = messages[-1]["content"]
    return [{"role": "tool", "content": "12+" * (len(turn) % 3)}], len(turn) % 5 == 4
"""

# Four tokens of the tiny policy: calls that succeed, fail, and cannot be read.
CALLS = (
    '<tool_call>{"name": "add", "arguments": {"left": 2, "right": 3}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"left": 1}}</tool_call>',
    '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>',
    '<tool_call>{"name": "add"',
)
TOOLS = '''
def add(left: int, right: int) -> int:
    """Add two numbers.

    Args:
        left: The first number.
        right: The second number.
    """
    return left + right


def score(data_source, solution_str, ground_truth, extra_info):
    messages = extra_info["messages"]
    results = [m["content"] for m in messages if m["role"] == "tool"]
    assert all(m["tool_call_id"].startswith("call0000") for m in messages if m["role"] == "tool")
    return {"score": len(solution_str) % 3 / 2, "num": len(results), **{
        name: sum(text in r for r in results) for name, text in (("sum", "5"), ("code", "42"), ("error", "rror"))}}  # the tokenizer has no E
'''
CHAT_TEMPLATE = (
    "#{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}#{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}#assistant:{% endif %}"
)

PATIENT_ENGINE = """
import time

from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.trainer.build_NAME import build_NAME_engine as build


def engine(config, device, run_dir, world):
    engine = build(config, device, run_dir, world)
    generate, step = engine.generate, DrafterTrainer.step
    phases, done = [*enumerate(NUM_UPDATES)], []

    def held(*args, **kwargs):
        groups = generate(*args, **kwargs)
        if len(done) < len(phases):
            done.append(phases[len(done)])
            mark, until = run_dir / f"trained {done[-1][0]}", time.monotonic() + 500
            while world.rank == 0 and not mark.exists():
                assert time.monotonic() < until, f"the other rank trains too little: {done[-1]}"
                time.sleep(0.001)
        return groups

    def marked(*args, **kwargs):
        stats = step(*args, **kwargs)
        if done and stats.num_updates >= done[-1][1]:
            (run_dir / f"trained {done[-1][0]}").touch()
        return stats

    engine.generate, DrafterTrainer.step = held, marked
    return engine
"""


def make_tiny_task(
    folder: Path, *, kind: str = "qwen2", num_layers: int = 2, has_mtp: bool = False
) -> Path:
    """Write model/, train.jsonl, eval.jsonl, reward.py and config.yaml; returns the path of the
    config.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(["<pad>", "<eos>", *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    model = make_tiny_hf(
        folder / "model",
        kind,
        vocab_size=48,
        num_layers=num_layers,
        has_mtp=has_mtp,
        eos_token_id=1,
        pad_token_id=0,
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(model)
    for name, count in (("train", 24), ("eval", 6)):
        rows = [{"prompt": f"{name[0]}{i}=", "label": "5"} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    (folder / "reward.py").write_text(REWARD)
    config = folder / "config.yaml"
    config.write_text(f"""
model: {{path: {model}}}
data: {{train: {folder}/train.jsonl, eval: {folder}/eval.jsonl, max_prompt_tokens: 16}}
reward: {{function: "{folder}/reward.py:compute_score"}}
rollout: {{num_prompts: 4, num_samples: 4, max_new_tokens: 24, max_batch_size: 8, dtype: float64}}
optimizer: {{lr: 1.0e-3}}
mcore: {{micro_batch_tokens: 128}}
logging: {{rollouts: true, progress: lines}}
run: {{num_steps: 3}}
""")
    return config


def write_teacher(task: Path, kind: str = "qwen2", num_layers: int = 4, seed: int = 5) -> Path:
    """Write teacher/, a model of another size with the tokenizer of the folder `task`."""
    ids = {"eos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": 4096}
    teacher = make_tiny_hf(task / "teacher", kind, vocab_size=48, num_layers=num_layers, seed=seed, **ids)  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(task / "model" / name, teacher)
    return teacher


def write_environment(task: Path) -> str:
    """Let the policy of the folder `task` end its turns early. Returns the setting of an
    environment that answers them.
    """
    stops = json.dumps({"eos_token_id": STOPS})
    (task / "model" / "generation_config.json").write_text(stops)
    (task / "environment.py").write_text(ENVIRONMENT)
    return f"rollout.environment={task}/environment.py:answer"


def write_tools(task: Path) -> None:
    """Give the policy of the folder `task` a chat template, tokens that are calls and room for the
    schemas, and write tools.py and chat.jsonl.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(task / "model")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.add_tokens(list(CALLS))
    tokenizer.save_pretrained(task / "model")
    model = task / "model" / "config.json"
    shape = json.loads(model.read_text()) | {"max_position_embeddings": 4096}
    model.write_text(json.dumps(shape))
    (task / "tools.py").write_text(TOOLS)
    rows = [{"prompt": [{"role": "user", "content": f"{i}="}], "label": "5"} for i in range(24)]
    (task / "chat.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def run(num_ranks: int, config: Path, run_dir: Path, *arguments: str) -> None:
    """Run the whole program on forked ranks. AssertionError has what it said if it fails."""
    results = run_forked(num_ranks, "--config", config, f"run.dir={run_dir}", *arguments)
    for rank, (code, stderr) in enumerate(results):
        assert code == 0, f"rank {rank}: {stderr[-5000:]}"


def run_forked(num_ranks: int, *arguments: str | Path) -> list[tuple[int, str]]:
    """Fork what torchrun would start, and return exit code and stderr of every rank."""
    import tlt_megatron.trainer.build
    import tlt_megatron.trainer.finish  # noqa: F401  # both here, once, and not on every rank
    from launch.pretrain_rl import main

    def program() -> tuple[int, str]:
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            code = main([str(argument) for argument in arguments])
        return code, stderr.getvalue()

    return run_ranks(num_ranks, program, has_world=False)


def run_ending(
    code: int, num_ranks: int, config: Path, run_dir: Path, *arguments: str | Path
) -> str:
    """Run the whole program on forked ranks, and return what they say. All must end with `code`,
    and a failure without a traceback.
    """
    results = run_forked(num_ranks, "--config", config, f"run.dir={run_dir}", *arguments)
    said = "".join(stderr for _, stderr in results)
    assert [found for found, _ in results] == [code] * num_ranks, said[-5000:]
    assert code == 0 or "Traceback" not in said
    return said


def python(
    *words: object,
    cwd: Path = REPO,
    given: str | None = None,
    timeout_s: float = LIMIT_S,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run `python words` on this checkout with `given` as its input, and capture what it says."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    try:
        return subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=cwd,
            env=os.environ | own | environment,
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as late:
        said = b"\n".join((late.stdout or b"", late.stderr or b"")).decode(errors="replace")
        raise AssertionError(f"not ended in {timeout_s:g} s:\n{said[-8000:]}") from None


def launch(
    num_ranks: int, *arguments: str | Path, timeout_s: float = LIMIT_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --nproc-per-node num_ranks launch/pretrain_rl.py arguments`."""
    words = torchrun(num_ranks, *arguments)[1:]
    return python(*words, timeout_s=timeout_s, **environment)


def torchrun(num_ranks: int, *arguments: str | Path) -> list[str]:
    """Return the command line of `launch`."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--local-addr", "127.0.0.1"),  # the name of this machine need not resolve
        *("--nproc-per-node", str(num_ranks), "launch/pretrain_rl.py"),
        *map(str, arguments),
    ]


def patient_engine(folder: Path, name: str, num_updates: tuple[int, ...] = (0, 0)) -> str:
    """Return the setting of an engine, embedded or sglang, that makes sure of idle time. In the
    first steps rank 0's rollouts end when rank 1 has trained the drafter, `num_updates[i]` times
    until then in step i. With SGLang there is nothing to train on in the first step.
    """
    path = folder / "patient_engine.py"
    path.write_text(PATIENT_ENGINE.replace("NAME", name).replace("NUM_UPDATES", str(num_updates)))
    return f"rollout.engine={path}:engine"


def rollouts(run_dir: Path) -> list[dict]:
    """Return every response that a run has trained on, as the run logged it."""
    steps: dict[str, list[dict]] = {}
    for file in sorted((run_dir / "rollouts").glob("step_*.jsonl")):
        step = steps.setdefault(file.name.partition(".")[0], [])
        step += [json.loads(line) for line in file.read_text().splitlines()]
    by_draw = itemgetter("draw_index", "sample_index")
    return [row for step in steps.values() for row in sorted(step, key=by_draw)]


def answers(run_dir: Path) -> list[tuple]:
    """Return prompt, sample index, tokens and reward of every response."""
    return [
        (r["prompt_id"], r["sample_index"], r["token_ids"], r["reward"]) for r in rollouts(run_dir)
    ]


def weights(run_dir: Path) -> dict[str, Tensor]:
    """Return the weights of the trained policy. A layer for MTP is none of them."""
    reader = HfReader(run_dir / "hf")
    return {name: reader[name] for name in tensor_shapes(load_model_config(run_dir / "hf"))}


def checkpoints(run_dir: Path) -> list[str]:
    """The names of its checkpoints, oldest step first."""
    return sorted(path.name for path in (run_dir / "checkpoints").glob("iter_*"))


def metric_rows(run_dir: Path) -> list[dict]:
    """Return a row for each step and one for each evaluation."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def check_same_tokens(run_dir: Path, expected: Path) -> None:
    """Check that both drew the same tokens from the same policies and got the same rewards,
    response by response.
    """
    one, other = read_run(run_dir), read_run(expected)
    assert one.keys() == other.keys()
    lines, is_same = compare(one, other)
    assert is_same, "\n".join(lines)
    versions = [[r.get("versions") for r in rollouts(each)] for each in (run_dir, expected)]
    assert versions[0] == versions[1]


def check_same_run(run_dir: Path, expected: Path) -> None:
    """Check that both drew the same tokens and learned the same weights bit for bit."""
    check_same_tokens(run_dir, expected)
    check_same_weights(run_dir, expected)


def check_same_weights(run_dir: Path, expected: Path) -> None:
    """Check that both learned the same weights bit for bit."""
    found = weights(run_dir)
    for name, tensor in weights(expected).items():
        assert torch.equal(found[name], tensor), name
