"""Whom we believe about certificates: `SSL_CERT_FILE`, as curl and Python's own programs do, else
the machine's bundle, else Mozilla's as the certifi package has it."""

import ssl

from wdsprep.errors import UsageError


def bundle() -> str:
    paths = ssl.get_default_verify_paths()
    if paths.cafile:
        return paths.cafile
    import os

    if named := os.environ.get(paths.openssl_cafile_env):
        raise UsageError(f"{paths.openssl_cafile_env}={named}: no such file of certificates")
    import certifi

    return certifi.where()
