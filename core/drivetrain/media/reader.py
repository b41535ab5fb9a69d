"""Reading of a prompt's media: fetch, prepare for the model, and keep for the prompt's other samples.

For backends, in the engine's process.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Final, Generic, Protocol, TypeVar

from drivetrain.backend.base import ReadMedium
from drivetrain.errors import DeadlineExceeded, InvalidRequest, UnsupportedCapability
from drivetrain.media.inputs import named, read_bytes, unreadable
from drivetrain.types.config import EngineConfig
from drivetrain.types.prompts import MediaInput

HELD_BYTES: Final = 1 << 29
"""Maximum bytes of prepared media cached for the other samples of a prompt or its next turn."""

_FETCHES: Final = 16
"""Maximum media that are fetched at a time."""


class Prepared(Protocol):
    """One medium as the model's processor prepared it."""

    @property
    def name(self) -> str:
        """Digest of the kind and the file's bytes."""
        ...

    @property
    def count(self) -> int:
        """Number of tokens."""
        ...

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        ...


OneMedium = TypeVar("OneMedium", bound=Prepared)


@dataclass(frozen=True, slots=True)
class Place:
    """Token ids of one kind of media."""

    token_id: int
    """Placeholder, repeated once per token of the medium."""
    follows: int | None
    """Token id that must directly precede the placeholders; None: any."""


class MediaReader(ABC, Generic[OneMedium]):
    """Reads the media of prompts within ``config.media``.

    The methods do not block the event loop. Cancelling the caller ends its fetch or decoding.

    Args:
        config: The engine's configuration.
        context_length: Maximum tokens of prompt and output together.
    """

    says: ClassVar[str]
    """The kinds of media, for error messages."""

    def __init__(self, config: EngineConfig, context_length: int) -> None:
        self._config = config
        self._context_length = context_length
        self._held: OrderedDict[str, OneMedium] = OrderedDict()
        self._lock = threading.Lock()
        self._fetching = asyncio.Semaphore(_FETCHES)

    @abstractmethod
    def place(self, medium: MediaInput) -> Place:
        """Return the token ids that stand for this kind of medium.

        Raises:
            InvalidRequest: The model does not take this kind.
        """

    @abstractmethod
    def _threads(self, medium: MediaInput) -> ThreadPoolExecutor:
        """Return the threads that prepare this kind of medium."""

    @abstractmethod
    def _prepare(self, medium: MediaInput, data: bytes, name: str, look: Callable[[], None]) -> OneMedium:
        """Decode a file and prepare it for the model. Called in a thread.

        Args:
            medium: The medium, for its kind.
            data: The file's bytes.
            name: Their digest.
            look: To be called repeatedly in long work; raises if the caller was cancelled or the time is over.

        Raises:
            Exception: The file cannot be read; the text of a plain ValueError is told to the user.
        """

    async def read(self, media: Sequence[MediaInput]) -> list[ReadMedium]:
        """Fetch and decode the media of one prompt.

        Raises:
            InvalidRequest: A medium is of another kind, cannot be fetched, or is too large; or all together are.
            DeadlineExceeded: One medium took longer than ``config.timeouts.media``.
        """
        found: list[ReadMedium] = []
        size = tokens = 0
        for medium in media:
            place = self.place(medium)
            async with self._fetching:
                data = await read_bytes(medium, self._config)
            size += len(data)
            if size > self._config.media.max_bytes:
                raise InvalidRequest(
                    f"the {self.says} beside a prompt have more than {self._config.media.max_bytes} bytes together "
                    "(media.max_bytes); give fewer or smaller ones",
                    field="prompts",
                )
            count = (await self._prepared(medium, data)).count
            tokens += count
            if tokens > self._context_length:
                raise InvalidRequest(
                    f"{len(found) + 1} {self.says} beside a prompt take {tokens} tokens; the context holds "
                    f"{self._context_length}, so give fewer or smaller ones",
                    field="prompts",
                )
            found.append(ReadMedium(place.token_id, count, None if medium.data is not None else data, place.follows))
        return found

    async def prepared(self, media: Sequence[MediaInput]) -> list[OneMedium]:
        """Return each medium as the model takes it, in order.

        Raises:
            InvalidRequest: As in :meth:`read`.
        """
        made: list[OneMedium] = []
        for medium in media:
            self.place(medium)
            made.append(await self._prepared(medium, await read_bytes(medium, self._config)))
        return made

    async def _prepared(self, medium: MediaInput, data: bytes) -> OneMedium:
        left = threading.Event()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads(medium), self._held_or_made, medium, data, left)
        finally:
            left.set()

    def _held_or_made(self, medium: MediaInput, data: bytes, left: threading.Event) -> OneMedium:
        # The same bytes can be media of two kinds.
        kind = type(medium).__name__.encode()
        name = hashlib.blake2b(data, digest_size=16, person=kind[:16]).hexdigest()
        with self._lock:
            held = self._held.get(name)
            if held is not None:
                self._held.move_to_end(name)
                return held
        made = self._made(medium, data, name, left)
        with self._lock:
            self._held[name] = made
            while len(self._held) > 1 and sum(one.nbytes for one in self._held.values()) > HELD_BYTES:
                self._held.popitem(last=False)
        return made

    def _made(self, medium: MediaInput, data: bytes, name: str, left: threading.Event) -> OneMedium:
        seconds = self._config.timeouts.media
        ends = time.monotonic() + seconds

        def look() -> None:
            if left.is_set() or time.monotonic() > ends:
                raise DeadlineExceeded(
                    f"timed out after {seconds:g} s waiting for {named(medium)} to be decoded (timeouts.media)"
                )

        try:
            return self._prepare(medium, data, name, look)
        except (DeadlineExceeded, UnsupportedCapability):
            raise
        except Exception as error:  # broken files make decoders raise anything
            told = type(error) is ValueError and str(error)
            raise unreadable(medium, told or f"{type(error).__name__}: {error}") from error
