"""Calls to a worker inside an engine's own process, as strings: for an engine whose own RPC carries such.

A call is a method of the ``Backend`` page, or of the worker's own, with its arguments, in the encoding of the wire
protocol. Nothing that a call raises reaches the engine, which may end by it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from drivetrain.host.failures import exception, failure
from drivetrain.host.methods import METHODS, Method, method_of
from drivetrain.host.wire import Failure


class _Question(msgspec.Struct, array_like=True, frozen=True):
    method: str
    arguments: tuple[msgspec.Raw, ...]


class _Answer(msgspec.Struct, array_like=True, frozen=True):
    result: msgspec.Raw
    failure: Failure | None = None


_questions: Final = msgspec.msgpack.Decoder(_Question)
_answers: Final = msgspec.msgpack.Decoder(_Answer)
_NOTHING: Final = msgspec.Raw(msgspec.msgpack.encode(None))


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

    def ask(self, method: str, arguments: tuple[object, ...]) -> str:
        """Encode a call."""
        codecs = self._methods[method].arguments
        encoded = tuple(argument.codec.encode(value) for argument, value in zip(codecs, arguments, strict=True))
        return base64.b64encode(msgspec.msgpack.encode(_Question(method, encoded))).decode()

    def method_of(self, question: str) -> str:
        """Name of the method that a question calls."""
        return _questions.decode(base64.b64decode(question)).method

    def serve(
        self,
        worker: object,
        question: str,
        gather: Callable[[Failure | None], list[Failure | None]] | None = None,
    ) -> str:
        """Call the worker, and encode what it returned, or how it failed.

        Args:
            worker: What has the method.
            question: What :meth:`ask` returned.
            gather: Exchanges what went wrong between ranks that take each call together; the first failure is what
                all answer. None: there is one rank.
        """
        answer = _Answer(_NOTHING)
        try:
            asked = _questions.decode(base64.b64decode(question))
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
        return base64.b64encode(msgspec.msgpack.encode(answer)).decode()

    @staticmethod
    def succeeded(answer: str) -> bool:
        """Whether a call did not fail."""
        return _answers.decode(base64.b64decode(answer)).failure is None

    def result_of(self, method: str, answer: str) -> object:
        """Decode what a call returned.

        Raises:
            DrivetrainError: what it raised.
        """
        decoded = _answers.decode(base64.b64decode(answer))
        if decoded.failure is not None:
            raise exception(decoded.failure)
        return self._methods[method].result.decode(decoded.result)
