"""Which scheme is which store: the one table of the places that bytes are read from and written to.

The library behind a place is imported when the place is first used, and comes with an extra of
wdsprep where it is not needed for anything else.
"""

import importlib.util
import pkgutil
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from wdsprep.errors import UsageError
from wdsprep.text import install_extra


class StorePlace(NamedTuple):
    """A kind of place that can be a store, such as a bucket of S3.

    `store` says where the class of the store is, and `form` what its URLs look like. `extra` is the
    extra of wdsprep that installs its library, if that is an optional one.
    """

    store: str
    form: str
    extra: str = ""

    def opener(self) -> Callable[[str], Any]:
        """Return the class of the store. Raise UsageError if its library is not installed."""
        if self.extra and not importlib.util.find_spec(OPTIONAL):
            raise UsageError(
                f"{self.form} needs {OPTIONAL}, which is not installed: {install_extra(self.extra)}"
            )
        opener: Callable[[str], Any] = pkgutil.resolve_name(self.store)
        return opener


OPTIONAL = "obstore"
"""The library that comes with an extra."""
_WEB = StorePlace("wdsprep.store.web:WebStore", "https://")
PLACES = {
    "s3": StorePlace("wdsprep.store.s3.s3_store:S3Store", "s3://BUCKET/PREFIX"),
    "gs": StorePlace("wdsprep.store.gcs_azure:ObjectStore", "gs://BUCKET/PREFIX", "gcs"),
    "az": StorePlace("wdsprep.store.gcs_azure:ObjectStore", "az://CONTAINER/PREFIX", "azure"),
    "hf": StorePlace("wdsprep.store.hub:HubStore", "hf://datasets/OWNER/NAME[@REVISION]"),
    "http": _WEB,
    "https": _WEB,
}
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
            f"{PLACES[scheme].form}, and keys as its own tools take them, in the environment or in "
            "their files"
        )


def root_and_name(url: str) -> tuple[str, str]:
    """Split a URL into the URL of its bucket or repository, and the name in that."""
    scheme, _, rest = url.strip().partition("://")
    parts = rest.split("/")
    depth = 3 if scheme.lower() == "hf" else 1
    return f"{scheme.lower()}://{'/'.join(parts[:depth])}", "/".join(parts[depth:])
