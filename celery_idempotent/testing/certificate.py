"""A certificate for 127.0.0.1, by an authority that nobody else trusts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from celery_idempotent.testing.process import ServerError

__all__ = ["Certificate"]


@dataclass(frozen=True)
class Certificate:
    """Where they lie, as PEM: the authority to trust, the server's certificate and its key."""

    authority: Path
    chain: Path
    key: Path

    @classmethod
    def make(cls, directory: Path) -> Certificate:
        """Write a new authority and what it signs into `directory`.

        Raises:
            ServerError: the package trustme is missing.
        """
        try:
            import trustme
        except ImportError:
            raise ServerError("A server with TLS needs trustme: pip install trustme") from None
        made = cls(directory / "authority.pem", directory / "server.pem", directory / "server.key")
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1", "localhost")
        authority.cert_pem.write_to_path(made.authority)
        issued.private_key_pem.write_to_path(made.key)
        for pem in issued.cert_chain_pems:
            pem.write_to_path(made.chain, append=True)
        return made
