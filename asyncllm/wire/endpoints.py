"""Where the two sockets of an engine are: the caller writes it into the private folder, the engine reads it there."""

from __future__ import annotations

import msgspec

__all__ = ["ENDPOINTS_FILE", "Endpoints"]

ENDPOINTS_FILE = "endpoints"


class Endpoints(msgspec.Struct, array_like=True, frozen=True):
    """Addresses of the caller's sockets, with CURVE keys where they are TCP (ipc is guarded by the folder's mode)."""

    to_engine: str
    from_engine: str
    server_public_key: bytes | None = None
    public_key: bytes | None = None
    secret_key: bytes | None = None
