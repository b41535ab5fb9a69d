"""Images that are mixed up, kept from older weights, or counted wrongly."""

from __future__ import annotations

import dataclasses
import itertools
import re
import tempfile
from collections.abc import Hashable, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from drivetrain.backend.base import GenerateRequest, GenerateResult, ReadMedium
from drivetrain.errors import InvalidRequest
from drivetrain.types.config import EngineConfig, MediaLimits
from drivetrain.types.outputs import Completion
from drivetrain.types.prompts import ImageInput, MediaInput
from drivetrain.types.weights import (
    DiskSource,
    PrepareUpdate,
    SharedMemorySource,
    WeightMessage,
    WeightReply,
    WeightUpdateRequest,
)
from drivetrain_conformance.assets.weight_sources import is_of_vision, tensors_of, write_checkpoint
from drivetrain_conformance.mutants.registry import mutant
from drivetrain_conformance.mutants.spoil import (
    CorrectBackend,
    KnowingMedia,
    MixingMedia,
    completions_mutant,
    config_mutant,
    own,
    request_mutant,
)
from drivetrain_weight_sync.transports.shared_memory import SharedMemoryReader

if TYPE_CHECKING:
    from PIL.Image import Image

_BELOW: Final = "nats below the most likely"

# The image that a request sees ---------------------------------------------------------------------------------------


@mutant("multimodal/images_stay_with_their_prompts", says="is answered otherwise in a batch than alone")
class sees_the_images_of_another_row(MixingMedia):
    """Each request sees the images of the first one in flight that has as many."""


@mutant("multimodal/a_cached_image_is_no_other", says=_BELOW)
class knows_images_by_their_ids(KnowingMedia):
    """A prompt whose ids were seen before is answered with the images that it had then."""


@mutant("multimodal/new_weights_see_an_image_anew", says=_BELOW)
class keeps_what_old_weights_saw(CorrectBackend):
    """The features of an image that old weights made are used after an update."""

    _seen: dict[Hashable, GenerateResult] = own(dict)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        if not request.media:
            return result
        seen = self._seen.setdefault((tuple(request.prompt_token_ids), request.media), result)
        return dataclasses.replace(seen, weight_versions=result.weight_versions)


class _LosesVision(CorrectBackend):
    """Takes updates of one kind from a folder that has the vision model's earlier weights."""

    kind: type[DiskSource | SharedMemorySource]
    _held: dict[str, torch.Tensor] = own(dict)
    _copies: list[tempfile.TemporaryDirectory[str]] = own(list)

    def _copy(self) -> tempfile.TemporaryDirectory[str]:
        """Return a new folder, and remove the one of the update before."""
        for earlier in self._copies:
            earlier.cleanup()
        self._copies[:] = [tempfile.TemporaryDirectory(prefix="drivetrain-mutant-")]
        return self._copies[0]

    async def close(self) -> None:
        await super().close()
        for copy in self._copies:
            copy.cleanup()

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        if not isinstance(message, PrepareUpdate):
            return await super().receive_weights(message)
        request, model = message.request, Path(self.config.model)
        if isinstance(request.source, DiskSource):
            brought = tensors_of(Path(request.source.path))
        else:
            reader = SharedMemoryReader()
            opened = reader.open(request, await self.weight_manifest())
            buckets = range(len(opened.plan.buckets))
            brought = {name: one.clone() for index in buckets for name, one in reader.tensors(index)}
            reader.close()
        held = self._held or tensors_of(model)
        of_vision = {name: one for name, one in held.items() if is_of_vision(name)}
        if of_vision and isinstance(request.source, self.kind):
            brought |= of_vision
            folder = write_checkpoint(Path(self._copy().name), model, brought)
            message = PrepareUpdate(WeightUpdateRequest(version=request.version, source=DiskSource(path=str(folder))))
        self._held.update(brought)
        return dataclasses.replace(await super().receive_weights(message), keeps_plan=False)


@mutant("multimodal/new_weights_see_an_image_anew", says=_BELOW)
class loses_the_vision_model_of_a_folder(_LosesVision):
    """An update from a folder leaves the vision model's weights as they were."""

    kind = DiskSource


@mutant("multimodal/new_weights_see_an_image_anew", says=_BELOW)
class loses_the_vision_model_in_memory(_LosesVision):
    """An update from shared memory leaves the vision model's weights as they were."""

    kind = SharedMemorySource


@mutant("weight_sync/tied_weights_are_pushed_once_and_used_twice", says=("vision_tower", "projector"))
class loses_the_vision_model_of_a_llava(_LosesVision):
    """A push from memory to a LLaVA leaves its vision model and its projector as they were."""

    kind = SharedMemorySource


@mutant("multimodal/a_further_turn_adds_an_image", says=_BELOW)
class sees_only_the_first_image(CorrectBackend):
    """Every image of a prompt is taken for the first of its size."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        first: dict[object, MediaInput] = {}
        media = tuple(first.setdefault(_size(medium), medium) for medium in request.media)
        return await super().generate(dataclasses.replace(request, media=media))


# Places of its parts -------------------------------------------------------------------------------------------------


@request_mutant("multimodal/an_image_is_seen_as_the_model_sees_it", says=_BELOW)
def swaps_rows_and_columns(request: GenerateRequest) -> GenerateRequest:
    """Places in an image are counted down its columns, so that rows and columns are swapped."""
    return dataclasses.replace(request, media=tuple(map(_transposed, request.media)))


@mutant("multimodal/an_image_is_seen_as_the_model_sees_it", says=("less often", "places", "tokens"))
class counts_a_place_too_few(CorrectBackend):
    """An image's placeholder is repeated once less than the model expects."""

    async def read_media(self, media: tuple[MediaInput, ...]) -> list[ReadMedium]:
        read = await super().read_media(media)
        return [dataclasses.replace(medium, count=medium.count - 1) for medium in read]


@completions_mutant("multimodal/a_prompt_comes_back_as_it_was_seen", says="comes back as it was written")
def returns_prompts_as_they_were_written(completions: list[Completion]) -> list[Completion]:
    """A completion's prompt has one placeholder per image, not the repeated ones that the model saw."""
    return [
        dataclasses.replace(one, prompt_token_ids=[token for token, _ in itertools.groupby(one.prompt_token_ids)])
        for one in completions
    ]


def _size(image: MediaInput) -> object:
    return _opened(image).size if isinstance(image, ImageInput) else image


def _transposed(image: MediaInput) -> MediaInput:
    from PIL.Image import Transpose

    return (
        ImageInput.from_pil(_opened(image).transpose(Transpose.TRANSPOSE)) if isinstance(image, ImageInput) else image
    )


def _opened(image: ImageInput) -> Image:
    from PIL import Image

    assert image.data is not None
    return Image.open(BytesIO(image.data))


@config_mutant("multimodal/what_is_no_image_is_refused", says="expected InvalidRequest for prompts, but nothing was")
def drops_the_bound_on_bytes(config: EngineConfig) -> Mapping[str, object]:
    """Files of media may be larger than the configuration says."""
    return {"media": config.media.model_copy(update={"max_bytes": MediaLimits().max_bytes})}


@config_mutant("multimodal/what_is_no_image_is_refused", says="expected InvalidRequest for prompts, but nothing was")
def drops_the_bound_on_pixels(config: EngineConfig) -> Mapping[str, object]:
    """Images may be larger than the configuration says."""
    return {"media": config.media.model_copy(update={"max_pixels": MediaLimits().max_pixels})}


@config_mutant("multimodal/private_hosts_may_be_forbidden", says="an image was fetched from 127.0.0.1")
def fetches_from_private_hosts(config: EngineConfig) -> Mapping[str, object]:
    """Media are fetched from loopback and private addresses although the configuration forbids it."""
    return {"media": config.media.model_copy(update={"allow_private_hosts": True})}


class _Replacing(CorrectBackend):
    """Reads another image in place of some."""

    def replaced(self, image: ImageInput) -> ImageInput:
        """Return the image to read."""
        return image

    async def read_media(self, media: tuple[MediaInput, ...]) -> list[ReadMedium]:
        seen = tuple(self.replaced(one) if isinstance(one, ImageInput) else one for one in media)
        read = await super().read_media(seen)
        return [
            dataclasses.replace(medium, data=medium.data if one is given else one.data)
            for medium, one, given in zip(read, seen, media, strict=True)
        ]


@mutant("multimodal/what_is_no_image_is_refused", says="expected InvalidRequest for prompts, but nothing was raised")
class draws_postscript(_Replacing):
    """An image in a format whose reader runs programs is accepted and drawn."""

    def replaced(self, image: ImageInput) -> ImageInput:
        return _blank() if (image.data or b"").startswith(b"%!PS") else image


@mutant("multimodal/what_is_no_image_is_refused", says="expected InvalidRequest for prompts, but nothing was raised")
class fills_up_half_an_image(_Replacing):
    """A truncated PNG is accepted, and its missing part is white."""

    def replaced(self, image: ImageInput) -> ImageInput:
        data = image.data or b""
        return _blank() if data.startswith(b"\x89PNG") and b"IDAT" in data and b"IEND" not in data else image


@mutant("multimodal/what_is_no_image_is_refused", says="expected InvalidRequest for prompts, but nothing was raised")
class follows_redirects_to_files(CorrectBackend):
    """A server may redirect to a file of the engine's machine."""

    async def read_media(self, media: tuple[MediaInput, ...]) -> list[ReadMedium]:
        try:
            return await super().read_media(media)
        except InvalidRequest as error:
            found = re.search(r"it redirects to 'file://([^']+)'", str(error))
            if found is None:
                raise
            data = Path(found[1]).read_bytes()  # noqa: ASYNC240 - it is small
            (read,) = await super().read_media((ImageInput(data=data),))
            return [dataclasses.replace(read, data=data)]


def _blank() -> ImageInput:
    from PIL import Image

    return ImageInput.from_pil(Image.new("RGB", (64, 64), "white"))
