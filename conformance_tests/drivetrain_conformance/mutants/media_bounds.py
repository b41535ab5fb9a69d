"""Videos beyond their bounds, and files whose bytes are not bounded on every way to the engine."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from typing import Final

from drivetrain.backend.base import ReadMedium
from drivetrain.errors import InvalidRequest
from drivetrain.media.fetch import fetch
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, MediaLimits
from drivetrain.types.prompts import MediaInput
from drivetrain_conformance.mutants.registry import mutant
from drivetrain_conformance.mutants.spoil import CorrectBackend, config_mutant

_NOTHING: Final = "expected InvalidRequest for prompts, but nothing was raised"
_NO_VIDEO: Final = "multimodal/what_is_no_video_is_refused"


@config_mutant(_NO_VIDEO, says=(_NOTHING, "does not name 'max_video_seconds'"), needs=Capability.VIDEO)
def drops_the_bound_on_the_seconds_of_a_video(config: EngineConfig) -> Mapping[str, object]:
    """Videos may be longer than the configuration says."""
    default = MediaLimits().max_video_seconds
    return {"media": config.media.model_copy(update={"max_video_seconds": default})}


@config_mutant(_NO_VIDEO, says=(_NOTHING, "does not name 'max_video_pixels'"), needs=Capability.VIDEO)
def drops_the_bound_on_the_pixels_of_a_video(config: EngineConfig) -> Mapping[str, object]:
    """The frames of a video may have more pixels than the configuration says."""
    default = MediaLimits().max_video_pixels
    return {"media": config.media.model_copy(update={"max_video_pixels": default})}


@mutant("multimodal/what_is_no_image_is_refused", says=_NOTHING)
class measures_each_file_alone(CorrectBackend):
    """The files of a prompt may have more bytes together than the configuration says."""

    async def read_media(self, media: tuple[MediaInput, ...]) -> list[ReadMedium]:
        read: list[ReadMedium] = []
        for one in media:
            read += await super().read_media((one,))
        return read


class _ReadingMore(CorrectBackend):
    """Reads some files at URLs that the correct backend refuses."""

    def accepted(self, sent: bytes) -> bytes:
        """Return the file to read in place of a server's body."""
        return sent

    async def read_media(self, media: tuple[MediaInput, ...]) -> list[ReadMedium]:
        try:
            return await super().read_media(media)
        except InvalidRequest:
            (one, *others) = media
            if others or not (one.url or "").startswith("http://127.0.0.1:") or ":1/" in (one.url or ""):
                raise
            data = self.accepted(await fetch(one.url or "", 1 << 30, allow_private_hosts=True))
            (read,) = await super().read_media((type(one)(data=data),))
            return [ReadMedium(read.token_id, read.count, data, read.follows)]


@mutant("multimodal/what_is_no_sound_is_refused", says=_NOTHING)
class takes_files_of_any_size_from_servers(_ReadingMore):
    """A file that a server sends may have more bytes than the configuration says."""

    def accepted(self, sent: bytes) -> bytes:
        return sent.rstrip(b"\0") + bytes(64)


@mutant("multimodal/what_is_no_image_is_refused", says=_NOTHING)
class unpacks_what_servers_send(_ReadingMore):
    """A file that a server compressed is unpacked without a bound on its unpacked size."""

    def accepted(self, sent: bytes) -> bytes:
        return gzip.decompress(sent).rstrip(b"\0") if sent.startswith(b"\x1f\x8b") else sent
