"""Makes a TLS certificate for 127.0.0.1, signed by a new certificate authority."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.servers.program import ServerError


@dataclass(frozen=True)
class Certificate:
    """Paths of PEM files: the authority to trust, the server's certificate chain and its key."""

    authority: Path
    chain: Path
    key: Path

    @classmethod
    def make(cls, directory: Path) -> Certificate:
        """Writes a new authority, and a certificate signed by it, into `directory`.

        Raises:
            ServerError: the package trustme is not installed.
        """
        try:
            import trustme
        except ImportError:
            raise ServerError("A server with TLS needs trustme: pip install trustme") from None
        certificate = cls(
            directory / "authority.pem", directory / "server.pem", directory / "server.key"
        )
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1", "localhost")
        authority.cert_pem.write_to_path(certificate.authority)
        issued.private_key_pem.write_to_path(certificate.key)
        for pem in issued.cert_chain_pems:
            pem.write_to_path(certificate.chain, append=True)
        return certificate
