"""The environment `glossary` of verifiers for `rollout.environment`. As a program it writes the
rows of its tasks: python examples/glossary_env.py glossary.jsonl
"""

import sys

from tlt_megatron.rewards.verifiers_environment import from_verifiers, write_rows

Glossary = from_verifiers({"taskset": {"id": "glossary"}}, renderer={"name": "qwen3"})

if __name__ == "__main__":
    write_rows(Glossary, sys.argv[1])
