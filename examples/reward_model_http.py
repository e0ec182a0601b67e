"""A reward model behind a URL, asked with a timeout and a bounded number of retries. Only the
standard library.

    export REWARD_MODEL_URL=http://judge:8000/score
    reward:
      function: examples/reward_model_http.py:compute_score
      timeout_s: 60         # for one response, all attempts together
      on_error: zero  # a model that stays away gives 0, counted in reward/num_{errors,timeouts}

The model gets POST {"prompt_source", "response", "reference"} as JSON and answers {"score": 0.7}.
Further numbers of the answer become metrics. Change `_question` for a model with other keys. One
worker asks about up to 64 responses at once.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

URL = os.environ.get("REWARD_MODEL_URL", "")
if not URL.startswith(("http://", "https://")):
    raise ValueError(f"REWARD_MODEL_URL={URL!r}: must be the http(s) address of the reward model")
REQUEST_TIMEOUT_S = 30.0  # for one attempt
NUM_ATTEMPTS = 4
FIRST_WAIT_S = 0.25  # before the second attempt; doubles with each further one
BUSY = (429, 500, 502, 503, 504)  # repeated; another status of failure is an error

_threads = ThreadPoolExecutor(max_workers=64)
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignores http_proxy


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, object] | None = None,
) -> dict[str, float]:
    """Return the answer of the reward model. RuntimeError after NUM_ATTEMPTS that failed."""
    body = json.dumps(_question(data_source, solution_str, ground_truth)).encode()
    failure: Exception | None = None
    for attempt in range(NUM_ATTEMPTS):
        if attempt:
            await asyncio.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
        try:
            return await asyncio.get_running_loop().run_in_executor(_threads, _post, body)
        except urllib.error.HTTPError as error:
            if error.code not in BUSY:
                raise
            failure = error
        except (OSError, http.client.HTTPException, ValueError) as error:
            failure = error  # no connection, too slow, cut off, or not JSON
    raise RuntimeError(f"{URL}: no answer in {NUM_ATTEMPTS} attempts") from failure


def _question(data_source: str, response: str, reference: str) -> dict[str, str]:
    return {"prompt_source": data_source, "response": response, "reference": reference}


def _post(body: bytes) -> dict[str, float]:
    request = urllib.request.Request(URL, body, {"Content-Type": "application/json"})
    with _opener.open(request, timeout=REQUEST_TIMEOUT_S) as answer:
        return json.load(answer)
