"""Protection of the data between hosts: none, or TLS by the secret or by certificates."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from unisono.config import Settings
from unisono.native import TlsContext

_NO_SECRET = b"certificates prove all that is proved here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Protection of the connections between hosts. `tls` is the value of UNISONO_TLS; all
    connections share `context`.
    """

    tls: str = "off"
    context: TlsContext | None = field(default=None, repr=False)

    def bootstrap_secret(self, secret: bytes | None) -> bytes | None:
        """Returns the secret for the bootstrap, before rank 0 has sent the job's secret.

        This is the user's secret, if the user gave one. Otherwise the result is None or, with
        certificates, a publicly known text, since certificates are a stronger proof than a secret.
        """
        return _NO_SECRET if secret is None and self.tls == "certificates" else secret


CLEAR = Security()
"""No TLS."""


def security_of(settings: Settings, secret: bytes | None) -> Security:
    """Returns the protection that the user chose; `secret` is the user's.

    Raises `ValueError` if a file cannot be read or the secret is missing, `UnsupportedError`
    without OpenSSL on this host, `UnisonoError` for files without certificates or keys.

    >>> security_of(Settings(), None).tls
    'off'
    """
    if settings.tls == "off":
        return CLEAR
    if settings.tls == "certificates":
        files = {
            "UNISONO_TLS_CERTIFICATE": settings.tls_certificate,
            "UNISONO_TLS_KEY": settings.tls_key,
            "UNISONO_TLS_CA": settings.tls_ca,
        }
        for variable, file in files.items():
            _require_readable(variable, file)
        return Security(tls=settings.tls, context=TlsContext(*files.values()))
    if secret is None:
        raise ValueError(
            "UNISONO_TLS=psk needs a secret that was not sent over the network: give all ranks "
            "UNISONO_JOB_SECRET or UNISONO_JOB_SECRET_FILE"
        )
    return Security(tls=settings.tls, context=TlsContext())


def _require_readable(variable: str, file: str) -> None:
    if not file:
        raise ValueError(f"UNISONO_TLS=certificates needs {variable}, the name of a PEM file")
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        raise ValueError(f"{variable}: cannot read {file}: {error.strerror}") from error
