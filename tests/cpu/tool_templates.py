"""Chat templates with tools in three styles, and tokenizers that have their markers."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer

HERMES = """\
{%- if tools %}<|im_start|>system
You may call:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Answer with <tool_call>{"name": <name>, "arguments": <object>}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls %}
<tool_call>
{{ '{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """\
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>' }}
{%- if tools is not none %}
{{- 'Respond as {"name": the name, "parameters": an object of arguments}.' }}
{%- for tool in tools %}{{ tool | tojson(indent=1) }}{% endfor %}
{%- endif %}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>' }}
{%- if 'tool_calls' in message %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}}
{%- else %}{{ message.content }}{% endif %}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>' }}"""

MISTRAL = """\
{%- if tools is defined and tools is not none %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message['tool_calls'] is defined %}[TOOL_CALLS][
{%- for call in message['tool_calls'] %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
{{- call.function | tojson }}{% if not loop.last %}, {% endif %}
{%- endfor %}]
{%- elif message['role'] == 'tool' %}[TOOL_RESULTS]{{ message['content'] }}[/TOOL_RESULTS]
{%- else %}[INST]{{ message['content'] }}[/INST]
{%- endif %}
{%- endfor %}"""

TEMPLATES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL}

_TOKENS = {
    "hermes": (("<tool_call>", "</tool_call>", "<think>"), False),
    "llama3": (("<|python_tag|>",), True),
    "mistral": (("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), True),
}
"""Markers that are tokens, and whether they are special, as in models of each style; and a token
that marks something else."""


def with_tools(tokenizer: Any, style: str) -> Any:
    """A copy of ``tokenizer`` with a style's template, and its markers as tokens from 300 on."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    tokens, special = _TOKENS[style]
    backend.add_tokens([AddedToken(t, special=special, normalized=False) for t in tokens])
    copy = type(tokenizer)(tokenizer_object=backend, eos_token=tokenizer.eos_token)
    copy.chat_template = TEMPLATES[style]
    return copy
