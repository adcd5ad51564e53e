"""The job's secret, which a process must know to join the job.

Any process that knows the secret counts as a rank of the job. A secret from the user excludes all
others that can reach the ports. Without a user's secret, the ranks share a random secret through
the bootstrap store. The random secret excludes processes that reach the ports but not the store.
Processes that read the store know the random secret. Neither secret protects the data that ranks
send later: `transport.security` protects this data.
"""

from __future__ import annotations

import logging
import secrets
import stat
from pathlib import Path

from unisono.config import Settings

SECRET_BYTES = 32

_log = logging.getLogger("unisono")


def job_secret(settings: Settings) -> bytes | None:
    """Returns the secret from the variable UNISONO_JOB_SECRET or else from the user's file; None if
    the user gave neither.

    White space around the secret is ignored, so a file may end in a line feed. Raises `ValueError`
    if the secret is empty or its file cannot be read.

    >>> job_secret(Settings(job_secret="a text that nobody guesses"))
    b'a text that nobody guesses'
    >>> job_secret(Settings()) is None
    True
    """
    if settings.job_secret is not None:
        return _checked(settings.job_secret.encode(), "UNISONO_JOB_SECRET")
    if settings.job_secret_file is not None:
        return _from_file(Path(settings.job_secret_file))
    return None


def random_secret() -> bytes:
    """Returns a secret for a job whose user gave none.

    >>> len(random_secret()), random_secret() == random_secret()
    (32, False)
    """
    return secrets.token_bytes(SECRET_BYTES)


def _from_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & stat.S_IROTH:
                _log.warning("every user of this host can read the job's secret in %s", path)
            content = file.read(1 << 16)
    except OSError as error:
        raise ValueError(
            f"UNISONO_JOB_SECRET_FILE: cannot read {path}: {error.strerror}"
        ) from error
    return _checked(content, f"the file {path} of UNISONO_JOB_SECRET_FILE")


def _checked(secret: bytes, where: str) -> bytes:
    stripped = secret.strip()
    if not stripped:
        raise ValueError(f"{where} is empty: it must hold a secret that is equal on all ranks")
    return stripped
