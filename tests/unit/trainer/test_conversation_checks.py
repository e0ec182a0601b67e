"""Chat templates that drop tools in silence are refused before a run. The templates have the parts
of real ones that matter.
"""

from __future__ import annotations

import dataclasses
import string
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tlt_megatron.data.tokenizer import Tokenizer
from tlt_megatron.trainer.before.conversation_checks import check_conversations, check_tools
from tlt_megatron.types import Prompt

VOCABULARY = {c: i for i, c in enumerate(["<eos>", *string.printable])}
PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": PARAMETERS}}]
LOOP = "{% for m in messages %}"
PLAIN = "<|{{ m.role }}|>{{ m.content }}"
QWEN = (
    "{% if tools %}# Tools{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}" + LOOP
    + "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}" + PLAIN
    + "{% endif %}{% endfor %}"
)  # fmt: skip
LLAMA_31 = (
    "{% if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}"
    '{"name": function name, "parameters": dictionary}{% endif %}' + LOOP
    + "{% if m.role == 'tool' %}ipython{{ m.content | tojson }}{% else %}" + PLAIN + "{% endif %}{% endfor %}"
)  # fmt: skip
MISTRAL = (
    LOOP
    + "{% if m.role == 'user' %}{% if tools is not none %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}{% if m.tool_call_id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }}{% else %}{% if m.tool_calls %}[TOOL_CALLS]{% endif %}{{ m.content }}{% endif %}{% endfor %}"
)
LLAMA_3 = LOOP + PLAIN + "{% endfor %}"
DEEPSEEK = (
    LOOP
    + "{% if m.role == 'tool' %}<tool_outputs>{{ m.content }}{% else %}"
    + PLAIN
    + "{% endif %}{% endfor %}"
)
PHI_3 = LOOP + "{% if m.role in ('user', 'assistant') %}" + PLAIN + "{% endif %}{% endfor %}"
GEMMA_3 = (
    LOOP
    + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}"
    "{% endif %}" + PLAIN + "{% endfor %}"
)
HEAD = "{% if tools %}{{ tools | tojson }}{% endif %}"
NAMES = "{% if tools %}{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}"


def tokenizer_with(template: str | None) -> Tokenizer:
    backend = Backend(models.WordLevel(VOCABULARY, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    hf.chat_template = template
    return Tokenizer(hf, [0], Path("model"))


@pytest.mark.parametrize(
    "template", [QWEN, LLAMA_31, MISTRAL], ids=("qwen", "llama 3.1", "mistral")
)
def test_templates_with_tools_are_taken(template: str) -> None:
    check_tools(tokenizer_with(template), {"tools": TOOLS}, "rollout.tools")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (LLAMA_3, "has no argument 'tools'"),
        (DEEPSEEK, "has no argument 'tools'"),
        (PHI_3, "has no argument 'tools'"),
        (GEMMA_3, "has no argument 'tools'"),
        (HEAD + PHI_3, "leaves out messages of the role tool"),
        (HEAD + GEMMA_3, "Conversation roles must alternate"),
        (NAMES + QWEN.partition(LOOP)[2].join([LOOP, ""]), "leaves out 'word' of the tool 'lookup'"),
        ("{# tools #}" + DEEPSEEK, "leaves out 'lookup' of the tool 'lookup'"),
        (None, "has no chat template"),
    ],
)  # fmt: skip
def test_templates_that_drop_tools_are_refused_by_name(template: str | None, says: str) -> None:
    with pytest.raises(
        ValueError, match=r"rollout\.tools: the (chat template of|tokenizer in) model"
    ) as error:
        check_tools(tokenizer_with(template), {"tools": TOOLS}, "rollout.tools")
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert "use a model that is made for tools" in str(error.value)


def test_calls_of_an_unknown_form_are_refused_for_tools_and_named_for_an_environment() -> None:
    tokenizer = tokenizer_with(HEAD + DEEPSEEK)
    messages = ({"role": "user", "content": "x"},)
    prompt = Prompt(prompt_id="x", draw_index=0, token_ids=(), messages=messages)
    (line,) = check_conversations(
        tokenizer, [prompt], TOOLS, setting="rollout.environment='e.py:E'", is_complete=False
    )
    assert line.startswith(
        "rollout.environment='e.py:E': the chat template of model has calls in a form"
    )
    assert "`turn.tool_calls` is empty" in line
    own = dataclasses.replace(prompt, template_kwargs={"tools": TOOLS})
    with pytest.raises(
        ValueError, match=r"^rollout\.tools: the chat template of model has calls in a"
    ):
        check_conversations(tokenizer, [own], TOOLS, setting="rollout.tools", is_complete=True)
    named = {"name": "look"}
    lists = (named | {"parameters": ["word"]}, named | {"parameters": {"properties": ["word"]}})
    for bad in ({"type": "function"}, {"function": {"name": ["x"]}}, {"function": "x"}, *lists):
        with pytest.raises(ValueError, match="must be OpenAI's schema of a tool with a name"):
            check_conversations(
                tokenizer, [prompt], [bad], setting="rollout.environment", is_complete=False
            )
