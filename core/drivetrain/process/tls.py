"""TLS between an engine's owner and its holders: contexts, pinned certificates, and errors that say what to do."""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
from pathlib import Path
from typing import Final

from drivetrain.errors import InvalidConfig, TlsError

_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_EXPIRED: Final = 10
_NOT_YET_VALID: Final = 9
_WRONG_NAME: Final = frozenset({62, 64})
"""Verify codes of OpenSSL: the certificate is for another host name, or for another IP address."""


def server_context(certfile: str, keyfile: str | None) -> tuple[ssl.SSLContext, str]:
    """Return the context of an owner that listens with TLS, and the fingerprint of its certificate.

    Args:
        certfile: PEM file with the certificate, followed by intermediate certificates if there are any.
        keyfile: PEM file with its private key; None: it is in ``certfile``, too.

    Raises:
        InvalidConfig: A file cannot be read, holds no certificate or key, or the two do not belong together.
    """
    text = _text(certfile, "ssl_certfile")
    field = "ssl_certfile" if keyfile is None else "ssl_keyfile"
    _text(keyfile or certfile, field)
    found = _CERTIFICATE.search(text)
    if found is None:
        raise InvalidConfig(f"ssl_certfile={certfile!r} holds no certificate in PEM format", field="ssl_certfile")

    def refuse() -> str:
        raise InvalidConfig(f"{field}={keyfile or certfile!r} is encrypted; give a key without a password", field=field)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        context.load_cert_chain(certfile, keyfile, password=refuse)
        der = ssl.PEM_cert_to_DER_cert(found[0])
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidConfig):
            raise
        raise InvalidConfig(
            f"cannot use the certificate of ssl_certfile={certfile!r} with the private key of {keyfile or certfile!r}: "
            f"{error}; expected a certificate and its own key in PEM format",
            field=field,
        ) from error
    return context, fingerprint_of(der)


def _text(file: str, field: str) -> str:
    try:
        return Path(file).read_text(encoding="ascii", errors="replace")
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot read {field}={file!r}: {error}", field=field) from error


def client_context(ca_certs: str | None, fingerprint: str | None) -> ssl.SSLContext:
    """Return the context of a holder.

    Args:
        ca_certs: PEM file with the certificates of trusted authorities; None: those of the system.
        fingerprint: SHA-256 of the only certificate that is accepted. If it is given, nothing else is verified.

    Raises:
        InvalidConfig: The file cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=ca_certs)
    except (OSError, ValueError) as error:
        raise InvalidConfig(
            f"cannot read the certificates of ssl_ca_certs={ca_certs!r}: {error}", field="ssl_ca_certs"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if fingerprint is not None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def fingerprint_of(der: bytes) -> str:
    """Return the SHA-256 of a certificate in DER format, as hexadecimal digits."""
    return hashlib.sha256(der).hexdigest()


def check_fingerprint(expected: str | None, der: bytes | None, address: str) -> None:
    """Compare the other side's certificate, in DER format, with a pinned fingerprint; None: accept any.

    Raises:
        TlsError: It is another certificate.
    """
    if expected is None:
        return
    found = fingerprint_of(der or b"")
    if not hmac.compare_digest(found, expected):
        raise TlsError(
            f"the engine at {address} has another certificate than the pinned one: its SHA-256 is {found}, expected "
            f"{expected}; if its owner has renewed the certificate, take the new handle or ssl_fingerprint"
        )


def tls_error(error: ssl.SSLError, address: str) -> TlsError:
    """Return the error of a handshake that failed, with what to do."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
            plain = address.replace("tls://", "tcp://", 1)
            return TlsError(
                f"the engine at {address} does not speak TLS; use {plain}, or start its owner with ssl_certfile"
            )
        return TlsError(f"the TLS handshake with the engine at {address} failed: {error}")
    said = error.verify_message
    if error.verify_code in (_EXPIRED, _NOT_YET_VALID):
        what = f"is out of date ({said}); renew it, and check both machines' clocks"
    elif error.verify_code in _WRONG_NAME:
        what = f"is for another host ({said}); use the name that it is for, or pin it with ssl_fingerprint"
    else:
        what = f"is not trusted ({said}); give its authority's certificate as ssl_ca_certs, or pin it with "
        what += "ssl_fingerprint"
    return TlsError(f"the certificate of the engine at {address} {what}")
