"""Talks to a trained policy in the terminal, with its drafter.

    tlt chat runs/mine
    tlt chat Qwen/Qwen3-0.6B --drafter drafter
    tlt chat http://127.0.0.1:8000

A run or a model is loaded here; an address is that of `tlt serve` or of another server with
OpenAI's protocol. Without a chat template a line is a prompt of its own. A conversation that is
longer than the model takes loses its oldest turns. An empty line or Ctrl-D ends it.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from tools.commands.saved_run import model_and_drafter

_NEW_TOKENS = 512
Answer = Callable[[list[dict[str, str]]], tuple[str, str]]  # messages -> text, what it took


def main() -> None:
    """Read lines and print answers until there are no more. ValueError for a model that cannot be
    used.
    """
    options = _parse()
    sampling = {"temperature": options.temperature}
    is_server = options.model.startswith(("http://", "https://"))
    make = _of_server if is_server else _of_engine
    answer = make(options, sampling)
    messages: list[dict[str, str]] = []
    for line in iter(_read_line, ""):
        messages.append({"role": "user", "content": line})
        text, took = answer(messages)
        messages.append({"role": "assistant", "content": text})
        print(f"{text}\n({took})", flush=True)


def _read_line() -> str:
    try:
        return input("> ")
    except EOFError:
        return ""


def _of_engine(options: argparse.Namespace, sampling: dict[str, Any]) -> Answer:
    from tlt_megatron import Engine

    model, drafter = model_and_drafter(options.model)
    engine = Engine(model, drafter=options.drafter or drafter, max_batch_size=1)

    def answer(messages: list[dict[str, str]]) -> tuple[str, str]:
        started = time.perf_counter()
        room = 0
        while room < 1:
            prompt = messages if engine.tokenizer.has_chat_template else messages[-1]["content"]
            room = engine.max_tokens - len(engine.encode([prompt])[0])
            if len(messages) == 1:
                break
            del messages[: 2 * (room < 1)]
        most = options.max_new_tokens or max(1, min(_NEW_TOKENS, room))
        (found,) = engine.generate([prompt], max_new_tokens=most, **sampling)
        seconds, lengths = time.perf_counter() - started, found.accept_lengths
        took = f"{len(found.token_ids)} tokens, {len(found.token_ids) / seconds:.0f} tokens/s"
        if lengths:
            took += f", accept length {sum(lengths) / len(lengths):.2f}"
        return found.text, took

    return answer


def _of_server(options: argparse.Namespace, sampling: dict[str, Any]) -> Answer:
    def answer(messages: list[dict[str, str]]) -> tuple[str, str]:
        most = {"max_tokens": options.max_new_tokens} if options.max_new_tokens else {}
        body = {"messages": messages, **most, **sampling}
        request = urllib.request.Request(
            f"{options.model.rstrip('/')}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        started = time.perf_counter()
        try:
            with urllib.request.urlopen(request) as reply:
                found = json.load(reply)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{options.model}: {error}: {error.read().decode()}") from error
        count, seconds = found["usage"]["completion_tokens"], time.perf_counter() - started
        text = found["choices"][0]["message"]["content"]
        return text, f"{count} tokens, {count / seconds:.0f} tokens/s"

    return answer


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", metavar="RUN_OR_MODEL_OR_URL")
    parser.add_argument("--drafter", help="default: the run's")
    rest = f"default: what fits, here at most {_NEW_TOKENS}"
    parser.add_argument("--max-new-tokens", type=int, help=rest)
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit("run it as: tlt chat")
