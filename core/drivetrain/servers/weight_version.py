"""Query of a server's weight version."""

from __future__ import annotations

import asyncio
import json
from http.client import HTTPException
from typing import Final
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.errors import DeadlineExceeded, EngineError, InvalidRequest

PATHS: Final = ("/weight_version", "/get_weight_version")
"""Paths that report the version, newest first; each returns JSON with a ``weight_version``."""


async def remote_weight_version(endpoint: str, timeout: float) -> str:
    """Return the weight version that the server at ``endpoint`` (``http://host:port``) serves.

    Raises:
        InvalidRequest: The endpoint is not an http(s) URL.
        EngineError: The server cannot be reached, or does not report a version.
        DeadlineExceeded: No answer within ``timeout`` seconds.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidRequest(f"endpoint={endpoint!r}: expected http://host:port", field="endpoint")
    async with deadline(timeout, f"the weight version of {endpoint}"):
        return await asyncio.to_thread(_ask, endpoint.rstrip("/"), timeout)


def _ask(endpoint: str, timeout: float) -> str:
    refusals: list[str] = []
    for path in PATHS:
        try:
            with urlopen(endpoint + path, timeout=timeout) as answer:
                version = json.load(answer).get("weight_version")
        except HTTPError as error:
            refusals.append(f"{path}: HTTP {error.code}")
        except (URLError, OSError) as error:
            if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
                raise DeadlineExceeded(f"{endpoint} did not answer within {timeout:g} s") from error
            raise EngineError(f"{endpoint} cannot be reached: {error}; is the server up?") from error
        except (ValueError, AttributeError, HTTPException) as error:
            refusals.append(f"{path}: not the JSON expected ({error})")
        else:
            if isinstance(version, str):
                return version
            refusals.append(f"{path}: weight_version is {version!r}")
    raise EngineError(f"{endpoint} does not say its weight version ({'; '.join(refusals)})")
