"""The model of a started engine: its sizes, its tokenizer, and the requests that fit it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from drivetrain.backend.base import Backend, ModelInfo
from drivetrain.backend.toolkit.daemon_thread import in_daemon_thread
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.backend.toolkit.translation import eos_token_ids
from drivetrain.checks.safe_repr import shown
from drivetrain.engine.controller import Controller
from drivetrain.engine.request_builder import RequestBuilder
from drivetrain.errors import InvalidRequest
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.config import Task


class StartedModel:
    """Loads the tokenizer, starts the backend, and holds the tokenizer and the ``ModelInfo``."""

    def __init__(self, controller: Controller, backend: Backend) -> None:
        self.controller = controller
        self.backend = backend
        self._tokenizer: Tokenizer | None = None
        self._info: ModelInfo | None = None
        self._builder: RequestBuilder | None = None

    async def start(self, report: Callable[[str], None]) -> None:
        """Load the tokenizer and start the backend."""
        report("loading the tokenizer")
        config = self.controller.config
        async with deadline(config.timeouts.start, f"the tokenizer {shown(config.tokenizer or config.model)}"):
            tokenizer = await in_daemon_thread(partial(Tokenizer.load, config), "drivetrain-tokenizer")
        self.take(tokenizer, await self.backend.start(report))

    def take(self, tokenizer: Tokenizer, info: ModelInfo) -> None:
        """Store the tokenizer and the backend's description of the model."""
        self._tokenizer = tokenizer
        self._info = self.with_all_eos_ids(info)
        self._builder = self.new_builder()

    def with_all_eos_ids(self, info: ModelInfo) -> ModelInfo:
        """Add the tokenizer's EOS id: some chat models name it in no other file."""
        named = (*info.eos_token_ids, *eos_token_ids(self.tokenizer.inner))
        ends = tuple(token_id for token_id in dict.fromkeys(named) if 0 <= token_id < info.vocab_size)
        return replace(info, eos_token_ids=ends)

    def new_builder(self) -> RequestBuilder:
        """Make the builder that validates requests against this model."""
        return RequestBuilder(
            self.controller.config, self.controller.capabilities, self.info, self.tokenizer, self.holder
        )

    @property
    def holder(self) -> int:
        """Number of this process among those that make requests of the engine; 0: its owner."""
        return 0

    @property
    def info_if_started(self) -> ModelInfo | None:
        """The backend's description of the model; None before start."""
        return self._info

    @property
    def info(self) -> ModelInfo:
        """The backend's description of the model.

        Raises:
            EngineStateError: the engine was not started.
        """
        if self._info is None:
            raise self.controller.not_started("model_info")
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            EngineStateError: the engine was not started.
        """
        if self._tokenizer is None:
            raise self.controller.not_started("tokenizer")
        return self._tokenizer

    def builder_for(self, task: Task, action: str) -> RequestBuilder:
        """Return the request builder.

        Raises:
            EngineStateError: the engine's state admits no requests.
            InvalidRequest: the engine was created for another task.
        """
        self.controller.require_admission(action)
        if self._builder is None:
            raise self.controller.not_started(action)
        if self.controller.config.task is not task:
            raise InvalidRequest(
                f"{action} needs an engine with task={task.value!r}; this one was created with "
                f"task={self.controller.config.task.value!r}",
                field="task",
            )
        return self._builder
