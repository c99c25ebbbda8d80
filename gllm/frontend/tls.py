"""TLS context of the server from the configured PEM files."""

import ssl

from gllm.config.server import ServerConfig


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS context, or None without a certificate. Raise ValueError naming the flag."""
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    files = f"--ssl-certfile {config.ssl_certfile}, --ssl-keyfile {config.ssl_keyfile}"
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_refuse)
    except OSError as error:
        raise ValueError(f"{files} cannot be used: {_reason(error)}") from error
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(cafile=config.ssl_ca_certs)
        except OSError as error:
            flag = f"--ssl-ca-certs {config.ssl_ca_certs}"
            raise ValueError(f"{flag} cannot be used: {_reason(error)}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _refuse() -> str:
    """Refuse an encrypted key, for which OpenSSL would ask for a password on the terminal."""
    raise ValueError("--ssl-keyfile is encrypted: decrypt it, the server cannot ask for a password")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "").lower().replace("_", " ")
        return f"{reason or 'it is not in PEM format'}"
    return error.strerror or str(error)
