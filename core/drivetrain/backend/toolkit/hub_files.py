"""Small files of a model of the Hugging Face hub: read from the local cache, and fetched when the engine starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Final

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import EngineStartError, InvalidConfig
from drivetrain.types.config import EngineConfig

_missing: Final[ContextVar[set[str] | None]] = ContextVar("missing files of hub models", default=None)


@contextmanager
def noting_missing_files() -> Iterator[set[str]]:
    """Collect the names of files that :func:`cached_file` did not find within, in the same thread."""
    missing: set[str] = set()
    token = _missing.set(missing)
    try:
        yield missing
    finally:
        _missing.reset(token)


def cached_file(config: EngineConfig, name: str) -> Path | None:
    """Return a file of a hub model from the hub's cache; None if the cache does not have it. Uses no network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(config.model, name, revision=config.revision)
    except HFValidationError:
        found = None  # the fetch raises the error about the name
    if isinstance(found, str):
        return Path(found)
    missing = _missing.get()
    if found is None and missing is not None:  # otherwise the cache knows that the hub does not have it either
        missing.add(name)
    return None


def fetch_files(config: EngineConfig, names: Iterable[str]) -> None:
    """Fetch the existing ones among these files of a hub model into the hub's cache. Blocks.

    If the hub cannot be reached, the files in the cache are used.

    Raises:
        InvalidConfig: The hub has no such model or revision, or does not show it to this user; or the hub is switched
            off (``HF_HUB_OFFLINE``) and the cache does not have the model.
        EngineStartError: The hub cannot be reached, and the cache does not have the model.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    named = f"model={shown(config.model)}"
    try:
        snapshot_download(config.model, revision=config.revision, allow_patterns=sorted(names))
    except RevisionNotFoundError as error:
        raise InvalidConfig(
            f"revision={shown(config.revision)}: the hub has no such revision of {named}: {error}", field="revision"
        ) from error
    except (RepositoryNotFoundError, GatedRepoError, HFValidationError) as error:
        raise InvalidConfig(
            f"{named}: there is no such folder, and the hub does not give a model of that name: {error}", field="model"
        ) from error
    except Exception as error:  # errors of the library, and of its HTTP client
        if constants.HF_HUB_OFFLINE:
            raise InvalidConfig(
                f"{named}: there is no such folder, and the hub's cache does not have the model; download it before "
                f"HF_HUB_OFFLINE is set: {error}",
                field="model",
            ) from error
        raise EngineStartError(
            f"{named}: there is no such folder, and the hub did not send the model's configuration: {error}"
        ) from error
