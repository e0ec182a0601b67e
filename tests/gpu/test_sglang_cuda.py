"""SGLang on a GPU, where it is installed (`pip install tlt_megatron[sglang]`): tokens are greedy
with and without EAGLE, updates by CUDA IPC reach the model that they are meant for, sleep gives
memory back, on two GPUs too. tests/sglang has the rest, on a CPU.

In bfloat16, as SGLang's kernels for GPUs have no float32. Two correct engines then differ in some
tokens, whose logits are close to the largest, so tokens are judged by a reference in float32.
Written from SGLang's sources; not run on hardware yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.cuda_ranks import needs_gpus, run_cuda_ranks
from tests.tiny_models import make_tiny_hf
from tests.unit.engines.conftest import make_prompts
from tlt_megatron.config.schema import RolloutSection, SglangSection, SpeculationSection
from tlt_megatron.drafter.eagle_folder import save_drafter
from tlt_megatron.engines.base import RolloutEngine
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.models.hf_io import HfReader, checksum_tensors
from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.device import select_device
from tlt_megatron.runtime.process_groups import SINGLE, Group, group_of, init_world
from tlt_megatron.types import SamplingParams

if TYPE_CHECKING:
    from tlt_megatron.engines.sglang.sglang_engine import SglangEngine

pytestmark = needs_gpus()
VERSION = "0.5.23"
Weights = list[tuple[str, Tensor]]
PARAMS = SamplingParams(num_samples=1, max_new_tokens=48, temperature=0.0, seed=5)
NEAR = 0.2  # by `distance`: greedy tokens of this policy in bfloat16 have 0.01, tokens of other weights 12
PROMPTS = make_prompts(4, 9, 31, 70)


@pytest.fixture(scope="module", autouse=True)
def _sglang() -> None:
    pytest.importorskip("sglang", reason=f"needs sglang=={VERSION}")
    if metadata.version("sglang") != VERSION:
        pytest.skip(f"needs sglang=={VERSION}: {metadata.version('sglang')} is installed")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, which SGLang's attention kernels have."""
    return make_tiny_hf(
        tmp_path_factory.mktemp("policy"),
        "llama",
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )


@pytest.fixture(scope="module")
def drafter(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained EAGLE drafter of this policy."""
    tensors = dict(HfReader(policy).items())
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    config = make_draft_config(load_model_config(policy), "eagle", embedding)
    folder = tmp_path_factory.mktemp("drafter")
    model = DraftModel(config, embedding_VD=embedding, lm_head_VD=head)
    save_drafter(folder, model.bfloat16())
    return folder


def weights_of(policy: Path, *, is_changed: bool = False) -> Weights:
    """In the engine's dtype. With `is_changed`, the rows of the LM head have moved by one."""
    named = [(name, tensor.bfloat16()) for name, tensor in HfReader(policy).items()]
    if not is_changed:
        return named
    return [(n, t.roll(1, 0) if "lm_head" in n else t) for n, t in named]


def distance(policy: Path, weights: Weights, answers: list[list[int]]) -> float:
    """How far the largest logit is above that of an answer's token, on average: by transformers, in
    float32 on the CPU.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(policy)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    model.load_state_dict({name: tensor.float() for name, tensor in weights})
    gaps = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([[*prompt.token_ids, *answer]])
        with torch.no_grad():
            logits_TV = model(ids).logits[0, len(prompt.token_ids) - 1 : -1]
        gaps.append(logits_TV.amax(-1) - logits_TV.gather(1, ids[0, -len(answer) :, None])[:, 0])
    return float(torch.cat(gaps).mean())


def start(
    policy: Path,
    drafter: Path | None,
    rank: int,
    *,
    replica: Group = SINGLE,
    **engine_args: object,
) -> SglangEngine:
    from tlt_megatron.engines.sglang.sglang_engine import SglangEngine

    speculation = None
    if drafter is not None:
        speculation = SpeculationSection(
            enabled=True, drafter=str(drafter), strategies=["4_2_8"], selector="fixed"
        )
    engine = SglangEngine(
        str(policy),
        RolloutSection(dtype="bfloat16", max_batch_size=8, max_new_tokens=48, num_samples=1),
        SglangSection(engine_args={"mem_fraction_static": 0.3} | engine_args),
        select_device("cuda"),
        rank=rank,
        max_prompt_tokens=128,
        speculation=speculation,
        replica=replica,
    )
    load(engine, weights_of(policy), version=1)
    return engine


def load(engine: RolloutEngine, tensors: Weights, *, version: int) -> None:
    """On the GPU, as the trainer has them: they travel by CUDA IPC."""
    there = [(name, tensor.cuda()) for name, tensor in tensors]
    engine.load_weights(there, version=version, checksum=lambda: checksum_tensors(there))


def tokens(engine: RolloutEngine, version: int = 1) -> list[list[int]]:
    groups = engine.generate(PROMPTS, PARAMS, policy_version=version)
    return [r.token_ids.tolist() for g in groups for r in g.rollouts]


@pytest.fixture(scope="module")
def eagle(policy: Path, drafter: Path) -> Iterator[SglangEngine]:
    engine = start(policy, drafter, rank=1)
    yield engine
    engine.close()


def test_plain_tokens_are_greedy(policy: Path) -> None:
    """Before the engine with a drafter takes the GPU."""
    engine = start(policy, None, rank=0)
    found = tokens(engine)
    engine.close()
    assert distance(policy, weights_of(policy), found) < NEAR


def test_eagle_changes_no_greedy_token(eagle: SglangEngine, policy: Path) -> None:
    assert distance(policy, weights_of(policy), tokens(eagle)) < NEAR


def test_updates_by_cuda_ipc_change_what_they_are_meant_for(
    eagle: SglangEngine, policy: Path, drafter: Path
) -> None:
    from tlt_megatron.engines.sglang.connection import DRAFT, TARGET

    first, changed = weights_of(policy), weights_of(policy, is_changed=True)
    target, draft = eagle.checksum(TARGET), eagle.checksum(DRAFT)
    own = {name: tensor.flip(0).cuda() for name, tensor in HfReader(drafter).items()}
    eagle.load_drafter_weights(own, version=2, checksum=checksum_tensors(own.items()))
    assert eagle.checksum(TARGET) == target
    assert eagle.checksum(DRAFT) == checksum_tensors(own.items()) != draft
    assert distance(policy, first, tokens(eagle)) < NEAR
    load(eagle, changed, version=2)
    assert eagle.checksum(DRAFT) == checksum_tensors(own.items())
    assert eagle.checksum(TARGET) == checksum_tensors(changed) != target
    found = tokens(eagle, version=2)
    assert distance(policy, changed, found) < NEAR < distance(policy, first, found)
    load(eagle, first, version=1)


def test_sleep_gives_memory_back_and_weights_are_sent_anew(
    eagle: SglangEngine, policy: Path
) -> None:
    """The policy's weights are dropped, the drafter's are parked; others use the memory; graphs
    replay after waking.
    """
    from tlt_megatron.engines.sglang.connection import DRAFT, TARGET

    changed = weights_of(policy, is_changed=True)
    draft, free = eagle.checksum(DRAFT), torch.cuda.mem_get_info()[0]
    eagle.sleep()
    assert torch.cuda.mem_get_info()[0] > free
    num_bytes = int(0.9 * torch.cuda.mem_get_info()[0])
    torch.full((num_bytes,), 255, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    eagle.wake()
    with pytest.raises(RuntimeError, match="holds no weights"):
        tokens(eagle)
    load(eagle, changed, version=2)
    assert eagle.checksum(TARGET) == checksum_tensors(changed)
    assert distance(policy, changed, tokens(eagle, version=2)) < NEAR
    assert eagle.checksum(DRAFT) == draft
    load(eagle, weights_of(policy), version=1)
    assert distance(policy, weights_of(policy), tokens(eagle)) < NEAR


def run_two_ranks(policy: str) -> tuple[list[list[int]], bool]:
    """Return the tokens before and after a sleep, and whether this rank's GPU had more free memory
    in between.
    """
    device = select_device("cuda")
    init_world(device.backend, timeout_s=900.0)
    replica = group_of(dist.new_group([0, 1], backend="gloo"))
    engine = start(Path(policy), None, rank=2, replica=replica, tp_size=2)
    found = tokens(engine) if replica.is_first else []
    gather_objects(None, replica)
    free = torch.cuda.mem_get_info()[0]
    engine.sleep()
    has_more = torch.cuda.mem_get_info()[0] > free
    engine.wake()
    load(engine, weights_of(Path(policy)), version=2)
    found += tokens(engine, version=2) if replica.is_first else []
    gather_objects(None, replica)
    engine.close()
    dist.destroy_process_group()
    return found, has_more


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_an_engine_of_two_ranks_takes_each_ranks_own_weights(policy: Path) -> None:
    (found, leader_has_more), (_, follower_has_more) = run_cuda_ranks(
        2, run_two_ranks, str(policy), timeout_s=1200.0
    )
    for answers in (found[: len(PROMPTS)], found[len(PROMPTS) :]):
        assert distance(policy, weights_of(policy), answers) < NEAR
    assert leader_has_more
    assert follower_has_more
