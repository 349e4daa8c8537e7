"""Which scheme is which store: the one table of the places that bytes are read from and written to.

The library behind a place is imported when the place is first used, and comes with an extra of
wdsprep where it is not needed for anything else.
"""

import importlib.util
import pkgutil
import re
from collections.abc import Callable
from typing import Any

from wdsprep.errors import UsageError
from wdsprep.text import install_extra

OPTIONAL = "obstore"
"""The library that comes with an extra."""
PLACES = {
    "s3": ("s3.s3_store:S3Store", "s3://BUCKET/PREFIX", ""),
    "gs": ("gcs_azure:ObjectStore", "gs://BUCKET/PREFIX", "gcs"),
    "az": ("gcs_azure:ObjectStore", "az://CONTAINER/PREFIX", "azure"),
    "hf": ("hub:HubStore", "hf://datasets/OWNER/NAME[@REVISION]", ""),
    "http": ("web:WebStore", "http://", ""),
    "https": ("web:WebStore", "https://", ""),
}
"""Where in this room the class of a place's store is, what its URLs look like, and the extra of
wdsprep that installs its library, if that is an optional one."""
KEYED = ("s3", "gs", "az", "hf")
"""The places that are asked with the credentials of who runs this."""
ANY_PLACE = "a local path, s3://, gs://, az:// or hf://datasets/"
"""The places that messages tell users to read from."""
WRITABLE_PLACE = "a local path, s3://, gs:// or az://"
"""The places that messages tell users to write to."""
SCHEMES = "|".join(("file", "pipe", *PLACES))


def place_scheme(url: str) -> str:
    """Return the scheme of a URL in lower case if `PLACES` has it, such as s3; else ""."""
    match = re.match(r"\s*([a-z0-9]+)://", url, re.IGNORECASE)
    scheme = match[1].lower() if match else ""
    return scheme if scheme in PLACES else ""


def store_class(scheme: str) -> Callable[[str], Any]:
    """Return the class of the store of a place. Raise UsageError if its library is missing."""
    store, form, extra = PLACES[scheme]
    if extra and not importlib.util.find_spec(OPTIONAL):
        raise UsageError(f"{form} needs {OPTIONAL}, which is not installed: {install_extra(extra)}")
    opener: Callable[[str], Any] = pkgutil.resolve_name(f"wdsprep.store.{store}")
    return opener


def is_keyed(url: str) -> bool:
    return place_scheme(url) in KEYED


def check_no_password(url: str) -> None:
    """Raise UsageError for a URL with a password in the name of its bucket or repository.

    Its library would take the password for a part of the name, and show it. The name of an access
    point (arn:) has colons too.
    """
    place = url.strip().partition("://")[2]
    if is_keyed(url) and ":" in place.partition("/")[0] and not place.startswith("arn:"):
        scheme = place_scheme(url)
        raise UsageError(
            f"{scheme}:// with a name and password, which such a URL cannot have: give "
            f"{PLACES[scheme][1]}, and keys as its own tools take them, in the environment or in "
            "their files"
        )


def root_and_name(url: str) -> tuple[str, str]:
    """Split a URL into the URL of its bucket or repository, and the name in that."""
    scheme, _, rest = url.strip().partition("://")
    parts = rest.split("/")
    depth = 3 if scheme.lower() == "hf" else 1
    return f"{scheme.lower()}://{'/'.join(parts[:depth])}", "/".join(parts[depth:])
