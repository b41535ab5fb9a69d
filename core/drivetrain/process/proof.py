"""Proof that both ends of a connection know a key, without sending it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

NONCE_BYTES: Final = 32
KEY_BYTES: Final = 32
LONGEST_KEY: Final = 1024
"""Maximum characters of a key."""


def new_key() -> str:
    """Make a random key, as hexadecimal digits."""
    return secrets.token_hex(KEY_BYTES)


def new_nonce() -> bytes:
    """Make the random bytes that the other end has to sign."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(key: str, role: str, *nonces: bytes) -> bytes:
    """Return the HMAC-SHA-256 by ``key`` of a role and both ends' nonces; the role keeps proofs from being echoed."""
    return hmac.new(key.encode(), b"\0".join([role.encode(), *nonces]), hashlib.sha256).digest()


def proves(given: bytes, key: str, role: str, *nonces: bytes) -> bool:
    """Return whether a proof is right, in a time that does not depend on where it differs."""
    return hmac.compare_digest(given, proof(key, role, *nonces))
