"""Engines without workers, which accept requests: the test reads and answers what they send."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gllm.config.engine import EngineConfig
from gllm.config.sampling import StructuredOutput
from gllm.engine.engine import Engine
from gllm.engine.pipeline import PipelineBackend
from gllm.engine.preflight import plan_model
from gllm.engine.text_engine import TextEngine
from gllm.messages.requests import AbortSequences, SubmitRequest
from gllm.models.split import layer_costs
from gllm.observability.logs import DEFAULT_LOG_CONFIG
from gllm.runtime.head.layer_planner import LayerPlanner
from gllm.text.grammar.compiler import GrammarCompiler


class ReadyBackend(PipelineBackend):
    """A pipeline that accepts requests although no worker has started."""

    is_accepting = True
    """False: requests are refused, as before the start."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent: list[SubmitRequest | AbortSequences] = []
        """Messages to the driver that the test is."""
        self.client.attach(self.sent.append)

    @property
    def accepts_requests(self) -> bool:
        return self.is_accepting or super().accepts_requests

    @property
    def state(self) -> str:
        return "ready" if self.is_accepting else super().state

    async def stop(self) -> None:
        self.client.fail_all("the test has ended")


def create_engine(config: EngineConfig) -> tuple[Engine, ReadyBackend]:
    """Return an engine without workers, and its pipeline."""
    backends = []

    def create(*args: Any) -> ReadyBackend:
        backends.append(ReadyBackend(*args))
        return backends[-1]

    return Engine(config, create_backend=create), backends[0]


class ScriptedCompiler(GrammarCompiler):
    """Compiler whose process is a function of the test."""

    def __init__(self, compile_output: Callable[[StructuredOutput], Any]) -> None:
        """Create the compiler.

        Args:
            compile_output: coroutine function that returns the compiled grammar.
        """
        self._compile_output = compile_output

    async def compile_structured_output(self, structured: StructuredOutput) -> str:
        grammar: str = await self._compile_output(structured)
        return grammar


def create_text_engine(grammars: GrammarCompiler) -> tuple[TextEngine, ReadyBackend]:
    """Return an engine of the demo model without workers whose grammars the test compiles."""
    config = EngineConfig("demo")
    plan = plan_model(config)
    config = replace(config, max_model_len=plan.max_model_len)
    planner = LayerPlanner(config, plan.layers, layer_costs(plan.config.model))
    backend = ReadyBackend(config, plan.folder, planner, DEFAULT_LOG_CONFIG, False, None)
    engine = TextEngine(
        backend, "demo", plan.folder, plan.config, plan.max_model_len, None, None, grammars
    )
    return engine, backend
