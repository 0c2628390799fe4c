"""HTTPS: the operator's certificate files, checked before anything is loaded.

Owns `Tls`. Knows nothing of routes or sockets.
"""

from __future__ import annotations

import dataclasses
import ssl
from pathlib import Path
from typing import Any

from pegainfer_core.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM format."""

    certfile: Path
    keyfile: Path | None = None
    """None: the key is in `certfile`."""
    ca_certs: Path | None = None
    """If given, clients must show a certificate that one of these signed; probes too."""

    def check(self) -> None:
        """Raise ConfigError, naming the flag, if the files cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # without a password function OpenSSL would ask on the terminal
            context.load_cert_chain(self.certfile, self.keyfile, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ssl-certfile {self.certfile}, --ssl-keyfile {self.keyfile}: {error}") from error
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"--ssl-ca-certs {self.ca_certs}: {error}") from error

    def uvicorn_settings(self) -> dict[str, Any]:
        """Keyword arguments of `uvicorn.Config`."""
        settings: dict[str, Any] = {"ssl_certfile": self.certfile, "ssl_keyfile": self.keyfile}
        if self.ca_certs is not None:
            settings |= {"ssl_ca_certs": str(self.ca_certs), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return settings
