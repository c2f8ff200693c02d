"""An engine without a model, for the process of an engine."""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from loramux.adapters.registry import Registry
from loramux.config import EngineOptions
from loramux.engine.interface import Service
from loramux.engine.service import EngineService
from loramux.guide import Guide
from loramux.plan import StepPlan
from loramux.testing import FakeCodec, FakeWorker
from loramux.testing.codec import FakeGrammar
from loramux.testing.worker import FakeLaunchedStep
from loramux.types import AdapterInfo
from tests.unit.small_engine import SmallEngine

log = logging.getLogger("loramux.testing")

STEP_SECONDS = 0.02


class SlowWorker(FakeWorker):
    def launch(self, plan: StepPlan) -> FakeLaunchedStep:
        time.sleep(STEP_SECONDS)
        return super().launch(plan)


def build_service(
    base: str,
    options: EngineOptions,
    adapters: Mapping[str, str],
    *,
    registry: Registry | None = None,
    base_alias: str | None = None,
) -> EngineService:
    """In place of that of ``engine.build``."""
    weights = options.scheduler.weights(base_alias or base)
    if weights is not None:
        log.info("the base has weight %g", weights.of(None))
    small = SmallEngine(
        worker_type=SlowWorker,
        num_blocks=4096,
        max_num_seqs=64,
        max_step_tokens=512,
        max_model_len=options.model.max_model_len or 100,
        weights=weights,
    )
    return EngineService(
        small.core,
        small.worker,
        small.admission,
        small.languages,
        base_name=base,
        max_open=100,
        adapters=tuple(adapters.items()),
        registry=registry,
    )


def over_fake_worker(build: Callable[[], Service]) -> Service:
    """What ``build`` makes, with ``build_service`` in place of ``engine.build``'s."""
    module = ModuleType("loramux.engine.build")
    module.__dict__["build_service"] = build_service
    sys.modules["loramux.engine.build"] = module
    import loramux.engine

    loramux.engine.build = module  # type: ignore[attr-defined]
    return build()


def with_slow_guides(build: Callable[[], Service]) -> Service:
    """What ``build`` makes, where compiling a guide takes half a second."""
    compile_at_once = FakeCodec.compile

    def compile_slowly(codec: FakeCodec, guide: Guide) -> FakeGrammar:
        time.sleep(0.5)
        return compile_at_once(codec, guide)

    FakeCodec.compile = compile_slowly
    return build()


def with_settings_kept(build: Callable[[], Service], file: Path) -> Service:
    """Writes down what the interpreter is set to when the service is asked for its adapters."""
    service = build()
    adapters = service.adapters

    async def found() -> list[AdapterInfo]:
        settings = [sys.getswitchinterval(), gc.get_threshold()[0], gc.get_freeze_count()]
        file.write_text(json.dumps(settings))
        return await adapters()

    service.adapters = found
    return service
