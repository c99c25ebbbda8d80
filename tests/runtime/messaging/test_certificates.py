"""Certificates of data connections: valid whatever the clock says, one per process, off disks."""

import os

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from gllm.runtime.messaging.security import create_certificate


def test_certificate_has_a_subject_of_its_own_and_is_valid_for_any_clock() -> None:
    first, second = create_certificate(), create_certificate()
    parsed = [x509.load_der_x509_certificate(each.certificate) for each in (first, second)]
    assert parsed[0].subject != parsed[1].subject
    assert parsed[0].not_valid_before_utc.year == 2000
    assert parsed[0].not_valid_after_utc.year == 9999
    first.close()
    second.close()


def test_file_has_the_key_of_the_certificate_and_no_path() -> None:
    created = create_certificate()
    pem = os.pread(created.descriptor, 2**16, 0)
    key = serialization.load_pem_private_key(pem, None)
    parsed = x509.load_pem_x509_certificate(pem)
    assert parsed.public_key() == key.public_key()
    assert parsed.public_bytes(serialization.Encoding.DER) == created.certificate
    assert os.readlink(f"/proc/self/fd/{created.descriptor}").startswith("/memfd:")
    created.close()
