#!/bin/bash
pkill -9 sglang
source "${SCRIPT_DIR}/models/qwen3-4B.sh"
BASE=/data
CKPT_ARGS=(
   --hf-checkpoint ${BASE}/Qwen3-4B
   --load ${BASE}/Qwen3-4B_slime/
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data $BASE/dapo-math-17k.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 0.8
   --rollout-stop "</s>" "<|im_end|>"

   --global-batch-size 128
   --balance-data
)
EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime ${BASE}/aime-2024.jsonl gpqa b.parquet
   --n-samples-per-eval-prompt 16
)
PERF_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --max-tokens-per-gpu 9216 --sglang-disable-cuda-graph)
GRPO_ARGS=(--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --eps-clip 0.2 --eps-clip-high=0.28)
OPTIMIZER_ARGS=(--lr 1e-6 --adam-beta2 0.98)
ray stop --force
pkill -9 python
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py --actor-num-nodes 1 \
   --actor-num-gpus-per-node 4 --colocate ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]}
