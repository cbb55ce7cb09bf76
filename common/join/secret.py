"""A job's secret: what keeps processes out of the handshake that do not know it."""

import hmac
import json


def seal(secret: bytes, *parts: str) -> str:
    """A code over `parts` that only those who know `secret` can make: HMAC with SHA-256, in hexadecimal (RFC 2104)."""
    return hmac.new(secret, json.dumps(parts).encode(), "sha256").hexdigest()


def is_sealed(secret: bytes, code: str, *parts: str) -> bool:
    """Whether `code` is the seal of `parts`."""
    return hmac.compare_digest(code.encode(), seal(secret, *parts).encode())
