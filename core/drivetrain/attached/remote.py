"""``create_engine("remote", endpoint=…, key=…)``: an engine that another process owns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

from drivetrain.attached.backend import AttachedBackend
from drivetrain.attached.connection import fetch_facts
from drivetrain.attached.engine import PATIENCE_S, AttachedEngine
from drivetrain.checks.safe_repr import shown
from drivetrain.engine.shared_state import EngineFacts
from drivetrain.errors import InvalidConfig, InvalidRequest
from drivetrain.types.config import EngineConfig, Timeouts
from drivetrain.types.handle import EngineHandle

REMOTE: Final = "remote"
"""Name of the backend."""
KEY_VARIABLE: Final = "DRIVETRAIN_KEY"
"""Environment variable with the key of an engine, for owner and holders."""
_OWN: Final = frozenset({"backend", "endpoint", "key", "ssl_fingerprint", "ssl_ca_certs"})
_OF_THE_OWNER: Final = frozenset({"isolation", "python"})
"""Fields that say where an engine runs. The owner has decided that."""
_FOLDERS: Final = frozenset({"model", "tokenizer"})


_E = TypeVar("_E", bound=AttachedEngine)


def remote_engine(fields: Mapping[str, object], page: type[_E]) -> _E:
    """Make an engine for the one at ``endpoint``, to be started; asks its owner for its facts.

    Args:
        fields: ``endpoint``, ``key``, ``ssl_fingerprint``, ``ssl_ca_certs``, and fields of :class:`EngineConfig` that
            are compared with the engine's own.
        page: The page's class.

    Raises:
        InvalidConfig: A field is wrong, or differs from the engine's configuration.
        EngineStateError: No server listens at the address.
        WireError: The key is wrong, or the owner has another version of drivetrain.
        TlsError: The certificate is refused, or only one of the two sides speaks TLS.
        DeadlineExceeded: The owner does not answer.
    """
    handle = _handle(fields)
    facts = fetch_facts(handle, PATIENCE_S)
    given = {name: value for name, value in fields.items() if name not in _OWN}
    for name in _OF_THE_OWNER & given.keys():
        if given[name] is not None:
            raise InvalidConfig(
                f"{name}={shown(given[name])}: the engine at {handle.address} runs already; leave {name} out, or give "
                "it to the process that starts the engine",
                field=name,
            )
        del given[name]
    own = facts.config
    asked = EngineConfig.from_mapping({"backend": own.backend, "model": own.model, **given})
    for name in asked.model_fields_set - {"timeouts"}:
        _compare(name, getattr(asked, name), facts, handle)
    timeouts = asked.timeouts if "timeouts" in given else own.timeouts
    return page(facts, AttachedBackend(handle, facts, PATIENCE_S), _with_heartbeat_of(own, timeouts))


def _handle(fields: Mapping[str, object]) -> EngineHandle:
    endpoint = fields.get("endpoint")
    key = fields.get("key")
    key = os.environ.get(KEY_VARIABLE) if key is None else key
    if endpoint is None:
        raise InvalidConfig(
            "endpoint: a remote engine needs the address that its owner printed: tcp://host:port, tls://host:port or "
            "unix:/path",
            field="endpoint",
        )
    if key is None:
        raise InvalidConfig(
            f"key: a remote engine needs the key that its owner printed; give it, or set {KEY_VARIABLE}", field="key"
        )
    try:
        trust = {name: fields.get(name) for name in ("ssl_fingerprint", "ssl_ca_certs")}
        return EngineHandle(endpoint, key, **trust)  # type: ignore[arg-type]  # EngineHandle checks them
    except InvalidRequest as error:
        field = "endpoint" if error.field == "address" else error.field
        raise InvalidConfig(str(error).replace("address=", "endpoint=", 1), field=field) from None


def _compare(name: str, given: object, facts: EngineFacts, handle: EngineHandle) -> None:
    own = getattr(facts.config, name)
    chosen = {"dtype": facts.model.dtype, "context_length": facts.model.context_length}
    if given in (own, chosen.get(name, own)) or (name in _FOLDERS and _same_folder(given, own)):
        return
    hidden = name in EngineConfig.hidden_fields
    differs = "" if hidden else f"={shown(given)}, and the engine at {handle.address} was started with {shown(own)}"
    raise InvalidConfig(
        f"{name}{differs or ' differs from that of the engine'}; leave it out, or start the engine with it", field=name
    )


def _same_folder(given: object, own: object) -> bool:
    return isinstance(given, str) and isinstance(own, str) and Path(given).absolute() == Path(own).absolute()


def _with_heartbeat_of(own: EngineConfig, timeouts: Timeouts) -> EngineConfig:
    """Return the engine's configuration with this side's deadlines; both ends must agree on the heartbeat."""
    agreed = timeouts.model_copy(update={"heartbeat": own.timeouts.heartbeat})
    return own.model_copy(update={"timeouts": agreed})
