"""Calls to a worker inside an engine's own process, as bytes: for a channel to it, or for an engine's own RPC.

A call is a method of the ``Backend`` page, or of the worker's own, with its arguments, in the encoding of the wire
protocol. Nothing that a call raises reaches the engine, which may end by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from drivetrain.errors import DrivetrainError
from drivetrain.process.rpc_methods import METHODS, Method, method_of
from drivetrain.process.wire import Failure
from drivetrain.process.wire_errors import exception, failure
from drivetrain.types.modes import PauseMode


class _Question(msgspec.Struct, array_like=True, frozen=True):
    method: str
    arguments: tuple[msgspec.Raw, ...]
    freeze: PauseMode | None = None


class _Answer(msgspec.Struct, array_like=True, frozen=True):
    result: msgspec.Raw
    failure: Failure | None = None
    not_taken: str | None = None


_questions: Final = msgspec.msgpack.Decoder(_Question)
_answers: Final = msgspec.msgpack.Decoder(_Answer)
_NOTHING: Final = msgspec.Raw(msgspec.msgpack.encode(None))


class CallNotTaken(Exception):
    """The worker could not be called, or did not come back; says what the engine's process saw."""


class FailedElsewhere(Exception):
    """Another rank could not do its part of what all do together; it says why."""


class Calls:
    """The methods that can be called: those of the ``Backend`` page, and more.

    Args:
        more: Methods of the worker that the page does not have, by their functions.
    """

    def __init__(self, *more: Callable[..., object]) -> None:
        self._methods: Mapping[str, Method] = {
            **METHODS,
            **{function.__name__: method_of(function) for function in more},
        }

    def ask(self, method: str, arguments: tuple[object, ...], freeze: PauseMode | None = None) -> bytes:
        """Encode a call, before which requests are to be frozen if ``freeze`` says how."""
        codecs = self._methods[method].arguments
        encoded = tuple(argument.codec.encode(value) for argument, value in zip(codecs, arguments, strict=True))
        return msgspec.msgpack.encode(_Question(method, encoded, freeze))

    @staticmethod
    def method_of(question: bytes) -> str:
        """Name of the method that a question calls."""
        return _questions.decode(question).method

    @staticmethod
    def freeze_of(question: bytes) -> PauseMode | None:
        """How requests are to be frozen before it is called."""
        return _questions.decode(question).freeze

    def serve(
        self,
        worker: object,
        question: bytes,
        gather: Callable[[Failure | None], list[Failure | None]] | None = None,
    ) -> bytes:
        """Call the worker, and encode what it returned, or how it failed.

        Args:
            worker: What has the method.
            question: What :meth:`ask` returned.
            gather: Exchanges what went wrong between ranks that take each call together; the first failure is what
                all answer. None: there is one rank.
        """
        answer = _Answer(_NOTHING)
        try:
            asked = _questions.decode(question)
            method = self._methods[asked.method]
            arguments = [
                argument.codec.decode(data) for argument, data in zip(method.arguments, asked.arguments, strict=True)
            ]
            answer = _Answer(method.result.encode(getattr(worker, asked.method)(*arguments)))
        except FailedElsewhere:
            pass  # the other rank's failure is what all answer
        except Exception as error:
            answer = _Answer(_NOTHING, failure(0, error))
        if gather is not None:
            for rank, failed in enumerate(gather(answer.failure)):
                if failed is not None:
                    answer = _Answer(
                        _NOTHING, msgspec.structs.replace(failed, message=f"rank {rank}: {failed.message}")
                    )
                    break
        return msgspec.msgpack.encode(answer)

    @staticmethod
    def not_taken(error: Exception) -> bytes:
        """Answer a call that did not come to its worker, or not back."""
        if isinstance(error, DrivetrainError):
            return msgspec.msgpack.encode(_Answer(_NOTHING, failure(0, error)))
        return msgspec.msgpack.encode(_Answer(_NOTHING, None, f"{type(error).__name__}: {error}"))

    @staticmethod
    def succeeded(answer: bytes) -> bool:
        """Whether a call did not fail."""
        decoded = _answers.decode(answer)
        return decoded.failure is None and decoded.not_taken is None

    def result_of(self, method: str, answer: bytes) -> object:
        """Decode what a call returned.

        Raises:
            DrivetrainError: what it raised.
            CallNotTaken: the engine's process could not call the worker.
        """
        decoded = _answers.decode(answer)
        if decoded.not_taken is not None:
            raise CallNotTaken(decoded.not_taken)
        if decoded.failure is not None:
            raise exception(decoded.failure)
        return self._methods[method].result.decode(decoded.result)
