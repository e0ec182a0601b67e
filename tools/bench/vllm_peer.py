"""vLLM in a process of its own environment: `against_vllm.py` starts it, and it answers on stdout.

Each line of stdin is a JSON value: first the arguments of `vllm.LLM`, then batches of [token ids of
the prompt, tokens to generate]. The answer to a batch is its CPU seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM prints on stdout
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    llm = LLM(**json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        requests = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        params = [
            SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for _, n in requests
        ]
        llm.reset_prefix_cache()  # else a prompt of the round before costs nothing
        started = time.process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.process_time() - started
        assert [len(each.outputs[0].token_ids) for each in outputs] == [n for _, n in requests]
        print(json.dumps(seconds), file=answers, flush=True)


if __name__ == "__main__":
    main()
