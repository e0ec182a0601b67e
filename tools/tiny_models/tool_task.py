"""Makes a tiny policy and three tasks for conversations: `python -m tools.tiny_models.tool_task
--out build/tool_task`. docs/tool_user.md trains on them.

The folder gets policy/ (untrained, with tokenizer and chat template), demonstrations.jsonl for
`algorithm.advantage: sft`, and calculator.jsonl, python.jsonl and lookup.jsonl for RL. A question
is a product or the remainder of a power, and the label is its value:

    47*83       the tool `calculate` gives 3901, and ####3901 is right
    47^5%91     the tool `python` gives pow(47,5,91)

A share of the demonstrations guesses the value. So the policy knows how to call a tool, and RL can
teach it that calls pay. A third of the demonstrations has no tool at all: the policy copies a
number of a page, such as "see 47 old 15". No question of RL is in a demonstration.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tlt_megatron.runtime.durable import new_folder
from tools.tiny_models.make_tiny_policy import make_model
from tools.tiny_models.reasoning_task import ANSWER_MARK
from tools.tiny_models.task_rows import write_rows

_ROLES = ("<|tools|>", "<|user|>", "<|assistant|>", "<|tool|>")
_END, _PAD, _UNKNOWN = "<|end|>", "<|pad|>", "<|unk|>"
_WORDS = (  # one token each, as a tokenizer of a language model has for frequent text
    *("<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": "', '"}}'),
    *("calculate", "expression", "python", "code", "pow", "Error: ", "see ", "old ", ANSWER_MARK),
)
_TEMPLATE = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }}"
    "({{ tool.function.parameters.properties | join(',') }}){% endfor %}<|end|>{% endif %}"
    "{# calls are written as <tool_call>{...}</tool_call> #}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TOOLS = {"calculate": "expression", "python": "code"}
_SLIP_SHARE = 0.6  # of the demonstrations that guess, and of the pages that are old
_NUM_PAGES = 3
_MAX_POSITIONS = 512

Row = dict[str, Any]


def schema(name: str) -> Row:
    """Return the OpenAI schema of a tool with one argument, a text."""
    properties = {_TOOLS[name]: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [_TOOLS[name]]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def draw(tool: str, rng: random.Random) -> tuple[str, str, str]:
    """Return a question, the argument of the right call, and the answer."""
    one, other = rng.randrange(11, 100), rng.randrange(11, 100)
    if tool == "calculate":
        return f"{one}*{other}", f"{one}*{other}", str(one * other)
    power = rng.randrange(2, 10)
    return f"{one}^{power}%{other}", f"pow({one},{power},{other})", str(pow(one, power, other))


def demonstration(tool: str, rng: random.Random) -> Row:
    """Return a conversation with a call, or with a guess of as many digits."""
    question, argument, answer = draw(tool, rng)
    messages = [{"role": "user", "content": question}]
    if rng.random() < _SLIP_SHARE:
        answer = str(rng.randrange(10 ** (len(answer) - 1), 10 ** len(answer)))
    else:
        call = {"name": tool, "arguments": {_TOOLS[tool]: argument}}
        content = f"<tool_call>{json.dumps(call)}</tool_call>"
        messages.append({"role": "assistant", "content": content})
        printed = answer + "\n" * (tool == "python")
        messages.append({"role": "tool", "content": printed})
    messages.append({"role": "assistant", "content": f"{ANSWER_MARK}{answer}"})
    return {"messages": messages, "tools": [schema(tool)]}


def page_demonstration(rng: random.Random) -> Row:
    """Return a walk through pages that each name the next one and an old one. No tool is there.
    It ends at an old page.
    """
    messages = []
    for page in [str(rng.randrange(10, 100)) for _ in range(_NUM_PAGES)]:
        old = str(rng.choice([n for n in range(10, 100) if str(n) != page]))
        parts = [f"see {page}", f"old {old}"]
        rng.shuffle(parts)
        chosen = old if rng.random() < _SLIP_SHARE else page
        messages.append({"role": "user", "content": " ".join(parts)})
        messages.append({"role": "assistant", "content": chosen})
        if chosen == old:
            break
    return {"messages": messages}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words above and single characters, padded to a multiple of 8."""
    special = (_PAD, _END, _UNKNOWN, *_ROLES)
    tokens = [*special, *_WORDS, "\n", *map(chr, range(32, 127))]
    tokens += [f"<unused{i}>" for i in range(-len(tokens) % 8)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    words = "|".join(word.replace("{", r"\{").replace("}", r"\}") for word in _WORDS)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{words}|[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(role, special=True) for role in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        eos_token=_END,
        unk_token=_UNKNOWN,
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _row(question: str, answer: str) -> Row:
    return {"prompt": [{"role": "user", "content": question}], "label": answer}


def main(arguments: list[str] | None = None) -> None:
    """Write the folder, unless it is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/tool_task"))
    parser.add_argument("--demonstrations", type=int, default=9000)
    parser.add_argument("--questions", type=int, default=512, help="of each task")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.out.exists():
        print(f"{options.out} is there already")
        return
    rng = random.Random(options.seed)
    makers = [functools.partial(demonstration, tool) for tool in _TOOLS] + [page_demonstration]
    rows = [makers[i % 3](rng) for i in range(options.demonstrations)]
    shown = {row["messages"][0]["content"] for row in rows}
    with new_folder(options.out) as folder:
        write_rows(folder / "demonstrations.jsonl", rows)
        for name, tool in (("calculator", "calculate"), ("python", "python")):
            drawn = (draw(tool, rng) for _ in itertools.count())
            new = ({"question": q, "answer": a} for q, _, a in drawn if q not in shown)
            questions = [_row(**each) for each in itertools.islice(new, options.questions)]
            write_rows(folder / f"{name}.jsonl", questions)
            if name == "calculator":
                own = {"tools": [schema(tool)]}
                write_rows(folder / "lookup.jsonl", [row | own for row in questions])
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(folder / "policy")
        torch.manual_seed(options.seed)
        make_model(tokenizer, _MAX_POSITIONS).save_pretrained(folder / "policy")
    print(f"made {options.out}: a policy, {len(rows)} demonstrations, three tasks")


if __name__ == "__main__":
    main()
