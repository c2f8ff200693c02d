"""What requests may hold. An unknown field is refused by its name; ``null`` means the default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from loramux.errors import InvalidRequest
from loramux.guide import Guide
from loramux.server.messages import ChatMessage
from loramux.server.strict import NoOps, Strict
from loramux.server.tools.schema import Tool, ToolChoice
from loramux.types import MAX_PRIORITY, MIN_PRIORITY, Pooling, PoolingParams, SamplingParams

Prompt = str | list[int]
"""One prompt: text, or token ids."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_prompts(value: Any) -> list[Prompt]:
    """The four forms of ``prompt`` as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_token_ids(value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and _is_token_ids(item) for item in value):
            return value
    raise ValueError(
        "must be a string, a list of strings, a list of token ids or a list of such lists, "
        "and not empty"
    )


def _is_token_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 1},
    ]
}


class StreamOptions(Strict):
    """Options of a streamed answer."""

    no_op: ClassVar[NoOps] = {"include_obfuscation": (None, False)}

    include_usage: bool | None = None


_TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
"""A token id as the name of a JSON object's field."""

_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "prompt_logprobs",
)


class PromptFields(Strict):
    """What every request to a model accepts."""

    model: str
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    """Requests with different ones share no part of the prefix cache."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds until the answer must be complete, at most the server's own limit."""
    priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Requests with a lower number are served before others; by default it is 0."""
    user: str | None = None
    """Names the caller's end user; by OpenAI's definition it changes nothing in the answer."""


class GenerationFields(PromptFields):
    """What both endpoints that generate accept; ``SamplingParams`` owns the ranges."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_as_list)] = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[_TokenKey, float] | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def _params(self, **more: Any) -> SamplingParams:
        """The sampling fields that are set, and ``more``. Raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", "stream_options")
        values = {name: getattr(self, name) for name in _SAMPLING_FIELDS} | more
        values["guide"] = self._guide()
        values["logit_bias"] = {int(t): bias for t, bias in (self.logit_bias or {}).items()}
        return SamplingParams(**{name: v for name, v in values.items() if v is not None})

    def _guide(self) -> Guide | None:
        """What the answer must look like. Raises InvalidRequest."""
        asked = self.guides()
        if len(asked) > 1:
            names = " and ".join(asked)
            raise InvalidRequest(f"{names} exclude each other: send one of them", next(iter(asked)))
        return next((make(name) for name, make in asked.items()), None)

    def guides(self) -> dict[str, Callable[[str], Guide]]:
        """The fields that ask for a guide, and how each becomes one by its name."""
        schema, regex = self.guided_json, self.guided_regex
        choices, grammar = self.guided_choice, self.guided_grammar
        asked: dict[str, Callable[[str], Guide]] = {}
        if schema is not None:
            asked["guided_json"] = lambda name: Guide.json(schema, name)
        if regex is not None:
            asked["guided_regex"] = lambda name: Guide.regex(regex, name)
        if choices is not None:
            asked["guided_choice"] = lambda name: Guide.choice(choices, name)
        if grammar is not None:
            asked["guided_grammar"] = lambda name: Guide.grammar(grammar, name)
        return asked


class CompletionRequest(GenerationFields):
    """``POST /v1/completions``."""

    no_op: ClassVar[NoOps] = {"suffix": (None, ""), "best_of": (None, 1)}

    prompt: Annotated[list[Prompt], PlainValidator(_as_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None

    def params(self) -> SamplingParams:
        """Raises InvalidRequest for a value out of range."""
        prompt_logprobs = self.prompt_logprobs
        if self.echo and prompt_logprobs is None:
            prompt_logprobs = self.logprobs
        return self._params(
            max_tokens=16 if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """A JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema; the name and the description are for the caller, and change nothing."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None
    """Answers always keep to the schema."""


class JsonSchemaFormat(Strict):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class ChatRequest(GenerationFields):
    """``POST /v1/chat/completions``."""

    no_op: ClassVar[NoOps] = {
        "audio": (None,),
        "function_call": (None, "none", "auto"),
        "functions": (None, []),
        "metadata": (None, {}),
        "modalities": (None, ["text"]),
        "prediction": (None,),
        "reasoning_effort": (None,),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "tools": (None, []),
        "verbosity": (None,),
        "web_search_options": (None,),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    """Default: ``auto`` where there are tools."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""

    def params(self) -> SamplingParams:
        """Raises InvalidRequest for a value out of range or fields that contradict each other."""
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ: send one of them", "max_tokens"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        return self._params(
            max_tokens=limits.pop() if limits else None,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    def guides(self) -> dict[str, Callable[[str], Guide]]:
        asked = super().guides()
        wanted = self.response_format
        if isinstance(wanted, JsonObjectFormat):
            asked["response_format"] = lambda name: Guide.json({"type": "object"}, name)
        elif isinstance(wanted, JsonSchemaFormat):
            schema = wanted.json_schema.schema_
            asked["response_format"] = lambda name: Guide.json(schema, name)
        return asked


class EmbeddingsRequest(PromptFields):
    """``POST /v1/embeddings``."""

    no_op: ClassVar[NoOps] = {"dimensions": (None,)}

    input: Annotated[list[Prompt], PlainValidator(_as_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, the default, or their 32 bits each, little-endian, in base64."""
    pooling: Pooling | None = None
    """Of what hidden states the vector is made; by default the last token's."""
    normalize: bool | None = None
    """Whether the vector has length 1, as by default."""

    def params(self) -> PoolingParams:
        values = {"pooling": self.pooling, "normalize": self.normalize}
        return PoolingParams(**{name: v for name, v in values.items() if v is not None})


class TokenizeRequest(Strict):
    """``POST /tokenize``: text, or a conversation."""

    no_op: ClassVar[NoOps] = {
        "add_special_tokens": (None, True),
        "add_generation_prompt": (None, True),
    }

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    """With messages: what their template tells of tools."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        if self.tools and self.messages is None:
            raise ValueError("tools need messages")
        return self


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


class LoadAdapterRequest(Strict):
    """``POST /v1/load_lora_adapter``."""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1)]
    load_inplace: bool = False
    pinned: bool = False


class AddAdapterRequest(Strict):
    """``POST /v1/adapters``."""

    name: Annotated[str, Field(min_length=1)]
    source: Annotated[str, Field(min_length=1)]
    load_inplace: bool = False
    pinned: bool = False


class ChangeAdapterRequest(Strict):
    """``PATCH /v1/adapters/{name}``."""

    pinned: bool


class UnloadAdapterRequest(Strict):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: Annotated[str, Field(min_length=1)]
