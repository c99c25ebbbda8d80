"""Certificates for tests, made by openssl."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str, *options: str) -> tuple[str, str]:
    """Files of a self-signed certificate for 127.0.0.1 and of its key."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", *(options or ["-nodes"])]
    subprocess.run(command, check=True, capture_output=True)
    return str(certificate), str(key)
