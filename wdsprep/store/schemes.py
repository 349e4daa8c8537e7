"""Which scheme is which store: the one table of the places that bytes are read from and written to.

The library behind a place is imported when the place is first used, and comes with an extra of
wdsprep where it is not needed for anything else.
"""

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wdsprep.errors import UsageError
from wdsprep.text import install_extra


@dataclass(frozen=True, kw_only=True, slots=True)
class StorePlace:
    """A kind of place that can be a store, such as a bucket of S3.

    `form` shows what its URLs look like. `needs` is the module of its library, and `extra` the
    extra of wdsprep that installs it, if it is optional.
    """

    module: str
    store: str
    form: str
    needs: str = ""
    extra: str = ""

    def opener(self) -> Callable[[str], Any]:
        """Return the class of the store. Raise UsageError if its library is not installed."""
        if self.needs and not importlib.util.find_spec(self.needs):
            raise UsageError(
                f"{self.form} needs {self.needs}, which is not installed: "
                f"{install_extra(self.extra)}"
            )
        opener: Callable[[str], Any] = getattr(importlib.import_module(self.module), self.store)
        return opener


_WEB = StorePlace(module="wdsprep.store.web", store="WebStore", form="https://")
PLACES = {
    "s3": StorePlace(
        module="wdsprep.store.s3.s3_store", store="S3Store", form="s3://BUCKET/PREFIX"
    ),
    "gs": StorePlace(
        module="wdsprep.store.gcs_azure",
        store="ObjectStore",
        form="gs://BUCKET/PREFIX",
        needs="obstore",
        extra="gcs",
    ),
    "az": StorePlace(
        module="wdsprep.store.gcs_azure",
        store="ObjectStore",
        form="az://CONTAINER/PREFIX",
        needs="obstore",
        extra="azure",
    ),
    "hf": StorePlace(
        module="wdsprep.store.hub",
        store="HubStore",
        form="hf://datasets/OWNER/NAME[@REVISION]",
    ),
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
    """Return the scheme of a URL in lower case if it is one of the places; else an empty text."""
    found = re.match(r"\s*([a-z0-9]+)://", url, re.IGNORECASE)
    scheme = found[1].lower() if found else ""
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
