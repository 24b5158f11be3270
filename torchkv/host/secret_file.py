"""The secret that jobs launched apart share: `shared_secret`. It keeps out who cannot read a file of this user."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from hashlib import blake2b
from pathlib import Path

from torchkv.errors import AuthError, TransportUnavailable
from torchkv.options import secret_file_from_env

__all__ = ["shared_secret"]

MIN_NBYTES = 16
MAX_NBYTES = 4096


def shared_secret() -> bytes:
    """A key of 32 bytes, from the file that ``TORCHKV_SECRET_FILE`` names.

    Without that variable, from a file of this user, which is made if it is missing: jobs of one user on one host then
    share a secret, and nobody else has it. Raises ``AuthError`` for a file that others may read, or with too little in
    it; ``TransportUnavailable`` if there is none, and none can be made.
    """
    named = secret_file_from_env()
    path = Path(named) if named is not None else _own_file()
    try:
        if named is None and not path.exists():
            _make(path)
        return _key(path)
    except OSError as error:
        raise TransportUnavailable(
            f"no secret in {path}: {error}; set TORCHKV_SECRET_FILE to a file with mode 0600 that all jobs can read"
        ) from error


def _own_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "torchkv" / "secret"


def _make(path: Path) -> None:
    """Writes a new secret to ``path``, unless another process is faster. It is never there half written."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent)  # with mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(32).encode())
        os.link(name, path)
    except FileExistsError:
        return  # another process was faster
    finally:
        os.unlink(name)


def _key(path: Path) -> bytes:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        data = file.read(MAX_NBYTES + 1).strip()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode) or mode & 0o077 or status.st_uid not in {os.geteuid(), 0}:
        raise AuthError(
            f"secret file {path} (mode {mode:04o}, owner {status.st_uid}) can be read by others; give it to user "
            f"{os.geteuid()} with mode 0600, and put a new secret into it"
        )
    if not MIN_NBYTES <= len(data) <= MAX_NBYTES:
        raise AuthError(
            f"secret file {path} holds {len(data)} bytes, expected {MIN_NBYTES} to {MAX_NBYTES}; "
            f"for example: python -c 'import secrets; print(secrets.token_hex(32))' > {path}"
        )
    return blake2b(data, digest_size=32, person=b"torchkv-secret").digest()
