"""Certificate of a machine's data connections, made anew by each process that owns a data mover.

Nobody handles certificates: they travel within the encrypted session of the head and its agents,
and each end of a data connection accepts exactly the certificate of the machine that it expects.
"""

import os
from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True)
class NodeCertificate:
    """Self-signed certificate and its key."""

    certificate: bytes
    """The certificate in DER, which other machines get."""
    descriptor: int
    """Anonymous file with the key and the certificate in PEM; it is never on a disk."""

    def close(self) -> None:
        """Close the file in this process."""
        os.close(self.descriptor)


def create_certificate() -> NodeCertificate:
    """Create a certificate with a new P-256 key.

    Its subject is random: OpenSSL verifies several trusted certificates of one subject by their
    order. It is valid from 2000 to 9999, so that clocks need not be right.
    """
    # Only engines on several machines need it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.NameAttribute(x509.NameOID.COMMON_NAME, f"gllm-{os.urandom(16).hex()}")
    subject = x509.Name([name])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    descriptor = os.memfd_create("gllm-certificate")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(private + certificate.public_bytes(serialization.Encoding.PEM))
    except BaseException:
        os.close(descriptor)
        raise
    return NodeCertificate(certificate.public_bytes(serialization.Encoding.DER), descriptor)
