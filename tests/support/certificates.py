"""Certificates for tests, made with the openssl command as docs/security.md has it."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


def openssl(*arguments: str | Path, cwd: Path | None = None) -> None:
    """Run the openssl command."""
    done = subprocess.run(["openssl", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """One that signs certificates; all its files are in `folder`."""

    def __init__(self, folder: Path, name: str = "test authority") -> None:
        folder.mkdir(parents=True)
        self._folder, self._count = folder, 0
        self.own = Pair(folder / "ca.pem", folder / "ca.key")
        openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30", "-subj",
            f"/CN={name}", "-keyout", self.own.key, "-out", self.own.certificate,
            "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        )  # fmt: skip
        (folder / "index.txt").touch()
        (folder / "ca.cnf").write_text(
            "[ca]\ndefault_ca = here\n[here]\ndatabase = index.txt\ndefault_md = sha256\ndefault_crl_days = 30\n"
            "rand_serial = yes\nnew_certs_dir = .\npolicy = any\nunique_subject = no\ncopy_extensions = copy\n"
            "[any]\ncommonName = optional\n",
            encoding="ascii",
        )

    def issue(self, name: str, also: str = "", begins: str = "20200101000000Z", ends: str = "20900101000000Z") -> Pair:
        """A certificate with that common name, and `also` as its other names: `DNS:...,URI:...,IP:...`."""
        self._count += 1
        stem = f"{self._count}"
        key, request, certificate = (self._folder / f"{stem}{end}" for end in (".key", ".csr", ".pem"))
        more = ("-addext", f"subjectAltName={also}") if also else ()
        openssl(
            "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
            "-keyout", key, "-out", request, *more,
        )  # fmt: skip
        openssl(
            "ca", "-batch", "-notext", "-config", "ca.cnf", "-cert", "ca.pem", "-keyfile", "ca.key", "-startdate",
            begins, "-enddate", ends, "-in", request, "-out", certificate, cwd=self._folder,
        )  # fmt: skip
        return Pair(certificate, key)

    def server(self, **more: str) -> Pair:
        """One for an agent on this machine."""
        return self.issue("agent", "DNS:localhost,IP:127.0.0.1", **more)

    def revoke(self, pair: Pair) -> Path:
        """Take it back: the list of all that are."""
        return self._listed("-revoke", pair.certificate)

    def revoked(self) -> Path:
        """The list of those that were taken back."""
        return self._listed()

    def _listed(self, *revoke: str | Path) -> Path:
        signs = ("-config", "ca.cnf", "-cert", "ca.pem", "-keyfile", "ca.key")
        if revoke:
            openssl("ca", *signs, *revoke, cwd=self._folder)
        openssl("ca", *signs, "-gencrl", "-out", "crl.pem", cwd=self._folder)
        return self._folder / "crl.pem"

    def trusting(self, shown: Pair | None = None) -> ssl.SSLContext:
        """A client's context that trusts this authority, and shows a certificate."""
        context = ssl.create_default_context(cafile=str(self.own.certificate))
        if shown is not None:
            context.load_cert_chain(shown.certificate, shown.key)
        return context
