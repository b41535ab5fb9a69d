"""Media of requests, prepared by a reader of core and placed among the tokens of a row."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final, Generic

import torch

from drivetrain.backend.base import GenerateRequest, ReadMedium
from drivetrain.errors import EngineStartError, InvalidRequest
from drivetrain.media.reader import MediaReader, OneMedium, Prepared
from drivetrain.types.prompts import MediaInput
from drivetrain_transformers.model import LoadedModel
from drivetrain_transformers.row_media import RowMedia

_TOLERATED: Final = 0.1
"""Largest change of the logits by rounding in a batch, as a share of their norm."""


class MediaPreparation(ABC, Generic[OneMedium]):
    """Prepares the media of requests for one model.

    Args:
        model: The model.
        reader: Reads the media.
    """

    one: ClassVar[str]
    """One medium, with its article, for error messages."""

    def __init__(self, model: LoadedModel, reader: MediaReader[OneMedium]) -> None:
        self._loaded = model
        self._model: Any = model.module
        self._media = reader

    async def check(self) -> None:
        """Check that the model sees or hears a medium in a padded batch as it does alone.

        Raises:
            EngineStartError: It does not, or the medium cannot be prepared or run.
        """
        name = type(self._model).__name__
        try:
            token_ids, given = await self._example()
            media = await self._placed(token_ids, given)
            difference = await asyncio.to_thread(self._difference, [*token_ids, 7, 11], media)
        except torch.OutOfMemoryError:
            raise
        except (InvalidRequest, OSError, LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise EngineStartError(
                f"{name} cannot be run with {self.one}, as the transformers backend does: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not difference <= _TOLERATED:
            raise EngineStartError(
                f"{name} answers {self.one} in a batch otherwise than alone: its logits differ by {difference:.2g} of "
                "their norm; the transformers backend does not serve such models, use another backend"
            )

    @torch.inference_mode()
    def _difference(self, token_ids: list[int], media: RowMedia) -> float:
        """Return the relative difference between a row's logits in a padded batch and in a plain forward pass."""
        device = self._loaded.device
        arguments = {name: tensor.to(device) for medium in media.media for name, tensor in medium.inputs.items()}
        ids = torch.tensor([token_ids], device=device)
        if "mm_token_type_ids" in inspect.signature(self._model.forward).parameters:
            arguments["mm_token_type_ids"] = (ids == media.media[0].token_id).int()
        alone = self._model(input_ids=ids, **arguments).logits[0].float()
        rows = [token_ids, [13, 17, 19, 23, 29, 31, 37] * (len(token_ids) // 7 + 1)]
        cache = self._loaded.empty_cache()
        beside = self._loaded.prefill(rows, [None, None], cache, 0, all_positions=True, media=[media, None])
        difference = beside.logits[0, -len(token_ids) :].float() - alone
        centred = (part - part.mean(-1, keepdim=True) for part in (difference, alone))
        return float(next(centred).norm() / next(centred).norm())

    async def read(self, media: Sequence[MediaInput]) -> list[ReadMedium]:
        """Fetch and prepare the media of one prompt; raises as :meth:`MediaReader.read` does."""
        return await self._media.read(media)

    async def of(self, request: GenerateRequest) -> RowMedia | None:
        """Return the media of a request, whose prompt holds all their placeholders; None if it has none.

        Raises:
            InvalidRequest: A medium cannot be read.
        """
        return await self._placed(request.prompt_token_ids, request.media) if request.media else None

    @abstractmethod
    async def _example(self) -> tuple[list[int], Sequence[MediaInput]]:
        """Return a prompt of one medium, and the medium."""

    @abstractmethod
    async def _placed(self, token_ids: list[int], media: Sequence[MediaInput]) -> RowMedia:
        """Return the media at their places among the token ids of a prompt."""


def places(
    token_ids: list[int], media: Sequence[tuple[int, OneMedium]], what: str
) -> Iterator[tuple[int, int, OneMedium]]:
    """Yield each medium with its placeholder's token id and the index of its first placeholder: the next of its kind.

    Args:
        token_ids: The prompt.
        media: Placeholder token id and medium, in order.
        what: One medium, for the error message.

    Raises:
        InvalidRequest: The prompt holds too few placeholders in a row.
    """
    begins = dict.fromkeys((token_id for token_id, _ in media), 0)
    for token_id, medium in media:
        begin = begins[token_id]
        start = token_ids.index(token_id, begin) if token_id in token_ids[begin:] else len(token_ids)
        begins[token_id] = start + medium.count
        if token_ids[start : begins[token_id]] != [token_id] * medium.count:
            raise InvalidRequest(
                f"the prompt repeats token id {token_id} less often than the {medium.count} times that {what} takes; "
                "give it as often",
                field="prompts",
            )
        yield token_id, start, medium


def key_of(medium: Prepared) -> int:
    """Return the number that stands for a medium's content in prefix-cache keys."""
    return -1 - int(medium.name, 16)
