"""Encoded calls to a worker inside an engine's process, over a channel to it or the engine's own RPC.

A call names a method of the ``Backend`` page, or an additional method of the worker, with arguments in the wire
protocol's encoding. Exceptions are returned as answers and never reach the engine, which could end by them.
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
    """The worker could not be called, or its answer was lost; the message holds the engine process's error."""


class FailedElsewhere(Exception):
    """Another rank failed in a collective step; the message holds its error."""


class Calls:
    """The callable methods: those of the ``Backend`` page, and additional ones.

    Args:
        more: Functions of the worker's additional methods.
    """

    def __init__(self, *more: Callable[..., object]) -> None:
        self._methods: Mapping[str, Method] = {
            **METHODS,
            **{function.__name__: method_of(function) for function in more},
        }

    def ask(self, method: str, arguments: tuple[object, ...], freeze: PauseMode | None = None) -> bytes:
        """Encode a call; ``freeze`` says how to freeze requests before it."""
        codecs = self._methods[method].arguments
        encoded = tuple(argument.codec.encode(value) for argument, value in zip(codecs, arguments, strict=True))
        return msgspec.msgpack.encode(_Question(method, encoded, freeze))

    @staticmethod
    def method_of(question: bytes) -> str:
        """Return the name of the method that an encoded call names."""
        return _questions.decode(question).method

    @staticmethod
    def freeze_of(question: bytes) -> PauseMode | None:
        """Return how to freeze requests before the call; None: not at all."""
        return _questions.decode(question).freeze

    def serve(
        self,
        worker: object,
        question: bytes,
        gather: Callable[[Failure | None], list[Failure | None]] | None = None,
    ) -> bytes:
        """Call the worker and encode its result or its error.

        Args:
            worker: Object that has the method.
            question: An encoded call from :meth:`ask`.
            gather: Exchanges errors between ranks that make each call together; all ranks answer with the first
                failure. None: there is one rank.
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
            pass  # all ranks answer with the other rank's failure
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
        """Encode the answer to a call that did not reach its worker, or whose answer was lost."""
        if isinstance(error, DrivetrainError):
            return msgspec.msgpack.encode(_Answer(_NOTHING, failure(0, error)))
        return msgspec.msgpack.encode(_Answer(_NOTHING, None, f"{type(error).__name__}: {error}"))

    @staticmethod
    def succeeded(answer: bytes) -> bool:
        """Return True if the call did not fail."""
        decoded = _answers.decode(answer)
        return decoded.failure is None and decoded.not_taken is None

    def result_of(self, method: str, answer: bytes) -> object:
        """Decode the result of a call.

        Raises:
            DrivetrainError: The error that the method raised.
            CallNotTaken: The engine's process could not call the worker.
        """
        decoded = _answers.decode(answer)
        if decoded.not_taken is not None:
            raise CallNotTaken(decoded.not_taken)
        if decoded.failure is not None:
            raise exception(decoded.failure)
        return self._methods[method].result.decode(decoded.result)
