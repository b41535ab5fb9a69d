"""``create_engine``: makes an engine from a backend's name, a mapping, a file or a configuration object."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from drivetrain.attached.engine import AttachedEngine
from drivetrain.attached.remote import REMOTE, remote_engine
from drivetrain.backend.base import Backend, StopKind
from drivetrain.backend.registry import load_backend, require_engine
from drivetrain.backend.toolkit.engine_versions import warn_if_unseen
from drivetrain.backend.toolkit.hub_files import fetch_files, noting_missing_files
from drivetrain.checks.safe_repr import shown
from drivetrain.engine.config_checks import check_config, check_folders
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import InvalidConfig
from drivetrain.process.capability_probe import probe
from drivetrain.process.hosted_backend import HostedBackend
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation, read_yaml


def create_engine(
    backend: str | os.PathLike[str] | Mapping[str, object] | EngineConfig, **fields: object
) -> InferenceEngine:
    """Make an engine from a backend's name, a mapping, a YAML file or an :class:`EngineConfig`. Starts nothing.

    The network is not used. If a hub model is not in the local cache, ``start`` fetches its configuration first. Only
    then are capabilities known that depend on the model, and is a configuration refused that does not fit it.

    The backend ``"remote"`` is an engine that another process owns, such as ``drivetrain host``. Its fields are
    ``endpoint`` and ``key``, which ``drivetrain host`` prints. If ``key`` is missing, the environment variable
    ``DRIVETRAIN_KEY`` is read. For a ``tls://`` endpoint, ``ssl_fingerprint`` is the SHA-256 of the only certificate
    that is accepted, or ``ssl_ca_certs`` a PEM file of trusted authorities; without either, the system's are trusted.
    Any field of :class:`EngineConfig` beside them must be as in the engine's own
    configuration, except ``timeouts``, which hold for calls from this process.

    Args:
        backend: ``"transformers"``; ``{"backend": "transformers", "model": …}``; ``Path("engine.yaml")`` or a string
            that ends in ``.yaml`` or ``.yml``; or a configuration object.
        fields: Fields of :class:`EngineConfig`; they override those of a mapping, file or object.

    Raises:
        UnknownBackend: No plugin has that name; the message lists the known ones.
        BackendLoadError: The plugin's import failed; the message holds the import error.
        BackendUnavailable: The engine that the backend adapts is not installed; the message says how to install it.
        InvalidConfig: A field is wrong, or the backend refuses its value or has no equivalent for it.
        UnsupportedCapability: A field needs a capability that this engine does not have here.
        EngineStateError: No server listens at the ``endpoint`` of a remote engine.
        WireError: The ``key`` of a remote engine is wrong, or its owner has another version of drivetrain.
        TlsError: The certificate of a remote engine is refused, or only one of the two sides speaks TLS.
        DeadlineExceeded: The owner of a remote engine does not answer.
    """
    given = fields_of(backend, fields)
    if given.get("backend") == REMOTE:
        return remote_engine(given, AttachedEngine)
    config = EngineConfig.from_mapping(given)
    check_folders(config)
    if config.python is not None and config.isolation is Isolation.INLINE:
        raise InvalidConfig(
            f"python={config.python!r} names another environment, which needs isolation='process', not 'inline'",
            field="isolation",
        )
    if config.python is not None:
        return _engine(config, HostedBackend(config, config.backend), partial(_probed, config), Isolation.PROCESS)
    cls = load_backend(config.backend)
    require_engine(cls)
    isolation = config.isolation or cls.default_isolation
    if isolation is Isolation.INLINE and cls.endangers_its_process:
        raise InvalidConfig(
            f"isolation='inline': a failing {cls.name} engine would end this process; leave isolation out, or give "
            "'process'",
            field="isolation",
        )
    made: Backend = cls(config) if isolation is Isolation.INLINE else HostedBackend(config, config.backend)
    return _engine(config, made, partial(_described, config, cls), isolation)


@dataclass(frozen=True, slots=True)
class _Description:
    """A backend's description of itself with a configuration."""

    claimed: frozenset[Capability]
    native_stops: frozenset[StopKind]
    config_names: Mapping[str, str]
    validate: Callable[[], None]
    distribution: str
    seen_working: tuple[str, str] | None
    versions: dict[str, str]
    missing_files: frozenset[str] = frozenset()
    """Names of files of a hub model that the other environment looked for, and that are not in the hub's cache."""


def _probed(config: EngineConfig) -> _Description:
    probed = probe(config)
    return _Description(
        probed.capabilities,
        probed.native_stops,
        probed.config_names,
        probed.require_valid,
        probed.engine_distribution,
        probed.seen_working,
        {
            "python": probed.python_version,
            "drivetrain": probed.drivetrain_version,
            probed.engine_distribution: probed.engine_version,
        },
        probed.missing_files,
    )


def _described(config: EngineConfig, cls: type[Backend]) -> _Description:
    return _Description(
        cls.capabilities(config),
        cls.native_stops,
        cls.config_names,
        partial(cls.validate, config),
        cls.engine_distribution,
        cls.seen_working,
        versions_of(cls),
    )


def _engine(
    config: EngineConfig, backend: Backend, describe: Callable[[], _Description], isolation: Isolation
) -> InferenceEngine:
    with noting_missing_files() as missing:
        described = describe()
        distribution, versions = described.distribution, described.versions
        warn_if_unseen(distribution, versions[distribution], described.seen_working)
        capabilities = _checked(config, described, isolation)
    engine = InferenceEngine(config, backend, capabilities=capabilities, isolation=isolation, versions=versions)
    missing |= described.missing_files
    if missing:

        def capabilities_by_files() -> frozenset[Capability]:
            fetched, found = set[str](), capabilities
            while not missing <= fetched:  # a file may name another one
                fetch_files(config, missing)
                fetched |= missing
                with noting_missing_files() as still_missing:
                    again = describe()
                    found = _checked(config, again, isolation)
                missing.update(still_missing, again.missing_files)
            return found

        engine.capabilities_by_files = capabilities_by_files
    return engine


def _checked(config: EngineConfig, described: _Description, isolation: Isolation) -> frozenset[Capability]:
    """Return the engine's capabilities; raise if the configuration needs others, or its backend refuses it."""
    capabilities = described.claimed | _added_by_the_engine_page(described.claimed, described.native_stops)
    # CUDA IPC cannot map a process's own GPU memory, and in-process tensors cannot be reached from another process.
    elsewhere = Capability.WEIGHTS_CUDA_IPC if isolation is Isolation.INLINE else Capability.WEIGHTS_IN_PROCESS
    capabilities -= {elsewhere}
    check_config(config, described.config_names, capabilities)
    described.validate()
    return capabilities


def _added_by_the_engine_page(
    claimed: frozenset[Capability], native_stops: frozenset[StopKind]
) -> frozenset[Capability]:
    added = {Capability.PAUSE_WAIT}
    if Capability.ABORT in claimed:
        added.add(Capability.PAUSE_ABORT)
    if Capability.PREFIX_CACHE in claimed:
        added.add(Capability.SESSIONS)
    can_watch_text = {Capability.STREAMING, Capability.ABORT} <= claimed
    if can_watch_text or StopKind.STRING in native_stops:
        added.add(Capability.STOP_STRINGS)
    if can_watch_text or StopKind.REGEX in native_stops:
        added.add(Capability.STOP_REGEX)
    return frozenset(added)


def versions_of(cls: type[Backend]) -> dict[str, str]:
    """Return the versions of Python, drivetrain and the engine that ``cls`` adapts, by distribution."""
    versions = {"python": platform.python_version()}
    for distribution in ("drivetrain", cls.engine_distribution):
        try:
            versions[distribution] = version(distribution)
        except PackageNotFoundError:
            versions[distribution] = "not installed"
    return versions


def fields_of(
    backend: str | os.PathLike[str] | Mapping[str, object] | EngineConfig, fields: Mapping[str, object]
) -> dict[str, object]:
    """Return the fields of a configuration that :func:`create_engine` would be given in this way."""
    if isinstance(backend, EngineConfig):
        base: dict[str, object] = backend.model_dump(exclude_unset=True, warnings=False)
        # Its model_copy(update=…) takes any name, and a dump leaves unknown ones out.
        base |= {name: value for name, value in vars(backend).items() if name not in EngineConfig.model_fields}
    elif isinstance(backend, Mapping):
        base = dict(backend)
    elif not isinstance(backend, str | os.PathLike) or not isinstance(os.fspath(backend), str):
        raise InvalidConfig(
            f"backend={shown(backend)}: expected a backend's name, a mapping of fields, the path of a YAML file, or an "
            "EngineConfig",
            field="backend",
        )
    elif isinstance(backend, os.PathLike) or backend.endswith((".yaml", ".yml")):
        base = read_yaml(Path(backend))
    else:
        base = {"backend": backend}
    return {**base, **fields}
