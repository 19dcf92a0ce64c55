"""Why a server cannot be reached, in words."""

from __future__ import annotations

import os
import socket
from ssl import SSLCertVerificationError, SSLError


def why_unreachable(error: BaseException) -> str:
    """Return why a connection failed or broke, in plain words; the error's class name if it has no message.

    >>> why_unreachable(ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 9)"))
    'Connection refused'
    >>> why_unreachable(TimeoutError())
    'no answer in time'
    """
    # aiohttp, with which the load generator asks, wraps its causes
    cause = getattr(error, "certificate_error", None) or getattr(error, "os_error", error)
    if isinstance(cause, SSLCertVerificationError):
        return f"{cause}; SSL_CERT_FILE=ca.pem names other authorities"
    if isinstance(cause, SSLError):
        hint = "; does it speak plain http://?" if cause.reason == "WRONG_VERSION_NUMBER" else ""
        return f"TLS: {(cause.reason or str(cause)).replace('_', ' ').lower()}{hint}"
    if isinstance(cause, socket.gaierror):
        return cause.strerror or str(cause)
    if isinstance(cause, OSError) and cause.errno is not None:
        return os.strerror(cause.errno)
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    return str(cause) or type(cause).__name__
