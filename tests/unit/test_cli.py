from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import dataclass, fields
from typing import Any

import pytest

import loramux
from loramux.cli import main as cli
from loramux.cli.options import parse_adapters, with_options
from loramux.config import EngineOptions, ServerOptions
from loramux.types import Completion, RequestId, RequestOutput, SamplingParams


def run(*arguments: str) -> int:
    """The exit status of the command line."""
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    return int(caught.value.code or 0)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineOptions, ServerOptions]]:
    """Adds a command ``probe`` that takes all options; what it received is in the list."""
    received: list[tuple[EngineOptions, ServerOptions]] = []

    def command(*, engine: EngineOptions, server: ServerOptions) -> None:
        """Take options."""
        received.append((engine, server))

    monkeypatch.setattr(
        sys.modules[__name__], "probe_command", with_options(command), raising=False
    )
    monkeypatch.setitem(cli.COMMANDS, "probe", f"{__name__}:probe_command")
    return received


Probe = list[tuple[EngineOptions, ServerOptions]]


def leaves(options: Any) -> dict[str, Any]:
    """Field values by name, of nested dataclasses too."""
    values: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        values |= leaves(value) if hasattr(value, "__dataclass_fields__") else {field.name: value}
    return values


def test_no_options_give_the_defaults(probe: Probe) -> None:
    assert run("probe") == 0
    assert probe == [(EngineOptions(), ServerOptions())]


def test_every_field_has_an_option_that_arrives(probe: Probe) -> None:
    changed = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 77,
        "threads": 3,
        "self_check": False,
        "max_loras": 5,
        "device_cache": "1GiB",
        "host_cache": "3GiB",
        "max_cpu_loras": 44,
        "max_rank": 9,
        "lora_target_modules": "q_proj,attn_v",
        "lenient": True,
        "adapter_max_wait": 0.5,
        "tuning": "/t.json",
        "disk_cache": "/cache",
        "disk_cache_bytes": "3GiB",
        "adapters_offline": True,
        "max_num_seqs": 11,
        "max_step_tokens": 222,
        "kv_cache": "2GiB",
        "gpu_memory": 0.75,
        "prefix_cache": False,
        "max_waiting": 33,
        "adapter_weights": "sql=4,*=0.5",
        "host": "0.0.0.0",
        "port": 1234,
        "served_model_name": "me",
        "max_body_bytes": 99,
        "max_request_seconds": 9.5,
        "stream_interval": 0.25,
        "shutdown_grace": 1.5,
        "adapter_root": "/adapters",
        "adapter_sources": ("hf:org", "s3://bucket/"),
        "registry": "/registry.db",
        "log_format": "json",
        "access_log": True,
        "tool_parser": "mistral",
        "metrics_adapters": 7,
        "keys": "/keys.toml",
        "otlp_traces_endpoint": "http://collector:4318/v1/traces",
    }
    arguments = []
    for name, value in changed.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
            continue
        for word in value if isinstance(value, tuple) else (value,):
            arguments += [f"--{flag}", str(word)]
    assert run("probe", *arguments) == 0
    [(engine, server)] = probe
    assert leaves(engine) | leaves(server) == changed


def test_field_of_a_new_option_class_needs_no_more_code() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Inner:
        """Inside."""

        depth: int = loramux.config.option(3, "how deep")

    globals()["Inner"] = Inner

    def command(*, inner: Inner) -> None:
        assert inner == Inner(depth=4)

    flat = with_options(command)
    assert list(inspect.signature(flat).parameters) == ["depth"]
    flat(depth=4)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "base", "--max-loras", "0"],
        ["serve", "base", "--max-loras", "many"],
        ["serve", "base", "--port", "70000"],
        ["serve", "base", "--kv-cache", "lots"],
        ["serve", "base", "--lora-target-modules", "q_proj v_proj"],
        ["serve", "base", "--no-such-option"],
        ["serve", "base", "--disk-cache-bytes", "0"],
        ["serve", "base", "--adapter-root", "/no/such/folder"],
        ["serve", "base", "--adapter-sources", "my-org"],
        ["serve", "base", "--tool-parser", "xml"],
        ["serve", "base", "--otlp-traces-endpoint", "collector:4317"],
        ["serve", "base", "--adapter", "nameonly"],
        ["serve", "base", "--adapter", "a=x", "--adapter", "a=y"],
        ["serve", "base", "--adapter", "a=x", "--served-model-name", "a"],
        ["serve"],
        ["no-such-command"],
        ["generate", "base"],
        ["tune"],
        ["tune", "base", "--shape", "llama-8b"],
        ["tune", "base", "--rank", "0"],
    ],
)
def test_wrong_use_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_usage_error_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    run("serve", "base", "--max-loras", "0")
    assert "max_loras must be at least 1, not 0" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"loramux {loramux.__version__}\n"


def test_sources_may_hold_equals_signs() -> None:
    assert parse_adapters(["a=s3://b?x=1", "c=/d"]) == {"a": "s3://b?x=1", "c": "/d"}


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_help_imports_nothing_heavy(command: str) -> None:
    program = (
        "import sys\n"
        "from loramux.cli.main import main\n"
        "try:\n"
        f"    main([{command!r}, '--help'])\n"
        "except SystemExit:\n"
        "    print(*sys.modules, file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0
    assert f"loramux {command}" in result.stdout
    # typer itself may import pydantic.
    heavy = {"torch", "transformers", "fastapi", "uvicorn", "numpy"}
    assert heavy.isdisjoint(result.stderr.split())


class FakeLLM:
    """Records how it was made and called."""

    made: tuple[Any, ...] = ()
    called: tuple[Any, ...] = ()

    def __init__(self, base: str, *, adapters: dict[str, str], options: EngineOptions) -> None:
        FakeLLM.made = (base, adapters, options)

    def generate(
        self, prompts: list[str], params: SamplingParams, *, adapter: str | None
    ) -> list[RequestOutput]:
        return self._answer("generate", prompts, params, adapter)

    def chat(
        self, conversations: list[Any], params: SamplingParams, *, adapter: str | None
    ) -> list[RequestOutput]:
        return self._answer("chat", conversations, params, adapter)

    def _answer(self, *call: Any) -> list[RequestOutput]:
        FakeLLM.called = call
        completion = Completion(0, "the answer", (1,), "stop")
        return [RequestOutput(RequestId("r"), (1,), (completion,))]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    monkeypatch.setitem(vars(loramux), "LLM", FakeLLM)
    return FakeLLM


def test_generate_prints_the_answer(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "generate base hello --adapter a=/a --use a --max-tokens 5 --temperature 0.5"
    assert run(*arguments.split(), "--seed", "7", "--max-loras", "2") == 0
    assert capsys.readouterr().out == "the answer\n"
    base, adapters, options = llm.made
    assert (base, adapters, options.adapters.max_loras) == ("base", {"a": "/a"}, 2)
    params = SamplingParams(max_tokens=5, temperature=0.5, seed=7)
    assert llm.called == ("generate", ["hello"], params, "a")


def test_generate_can_chat(llm: type[FakeLLM]) -> None:
    assert run("generate", "base", "hello", "--chat") == 0
    kind, conversations, _, adapter = llm.called
    assert (kind, conversations) == ("chat", [[{"role": "user", "content": "hello"}]])
    assert adapter is None


def test_error_is_one_line_on_stderr(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "base", "hello", "--temperature", "-1") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: temperature must be at least 0.0 and at most 100.0, not -1.0\n"


def test_unknown_log_level_is_an_error(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORAMUX_LOG", "loud")
    assert run("generate", "base", "hello") == 1
    assert "LORAMUX_LOG" in capsys.readouterr().err
