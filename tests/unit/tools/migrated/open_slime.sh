none=0
--rollout-batch-size $OPEN --n-samples-per-prompt $OPEN --global-batch-size 8 --num-rollout 7 --seed $((1 + 08))
--use-kl-loss --kl-loss-coef 0.01 --lr $((1 / none)) --eval-prompt-data aime a.jsonl gpqa
