"""What a URL from a table means, and where it leads: one canonical form before anything is asked.

Tables hold what people and pages wrote: spaces, umlauts, fragments, backslashes. These are encoded
as browsers do. The rest is refused here: other schemes, user names and passwords (they would end in
logs of other people's servers), no host. Which address a host means is checked where a connection
is made, so it does not matter here how an address is written.

Which addresses lie on the public internet is decided here too: a table of URLs is written by
strangers, and the machine that fetches it often stands inside a network that trusts it. An address
that carries an IPv4 address inside, as IPv6 has them for translators, is as public as that one.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import AddressValueError, IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import unquote, urljoin

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError

PORTS = {"http": 80, "https": 443}
MAX_LENGTH = 16_384
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_PARTS = re.compile(r"[/\\]{2}(?P<place>[^/\\?#]*)(?P<path>[^?#]*)(?P<query>\?[^#]*)?")
_PLACE = re.compile(r"(?P<host>\[[^\]]*\]|[^:]*)(?::(?P<port>[0-9]{0,5}))?")
_HOST = re.compile(r"(?!.{254})(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}")
_UNSAFE = re.compile(r"[^!#$&-;=?-\[\]_a-z~](?:(?<!%)|(?![0-9A-Fa-f]{2}))")
"""Neither plain nor an escape. To look for what is plain at each character is twice as fast."""
_IGNORED = "".join(map(chr, range(0x21)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """An http or https URL. `path` has the query in it, and only printable ASCII."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def origin(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{name}{port}"

    @property
    def url(self) -> str:
        return self.origin + self.path


def parse(url: str) -> Target:
    """Parse a URL. Raise RejectedError if it is none, or cannot be fetched."""
    text = url.strip(_IGNORED).replace("\t", "").replace("\r", "").replace("\n", "")
    if len(text) > MAX_LENGTH:
        raise _bad_url(f"{len(text)} characters long")
    match = _SCHEME.match(text)
    scheme = match[1].lower() if match else ""
    if scheme not in PORTS:
        raise _bad_url(
            f"{scheme[:20]}: is not http, https, s3, gs, az or hf" if scheme else "no URL"
        )
    parts = _PARTS.match(text, len(scheme) + 1)
    if parts is None:
        raise _bad_url(f"no // after {scheme}:")
    host, port = _host_and_port(parts["place"])
    path = _without_dots(parts["path"].replace("\\", "/"))
    return Target(
        scheme=scheme,
        host=host,
        port=port or PORTS[scheme],
        path=_UNSAFE.sub(
            lambda unsafe: "".join(f"%{byte:02X}" for byte in unsafe[0].encode("utf-8", "replace")),
            path + (parts["query"] or ""),
        ),
    )


def follow(target: Target, location: str) -> Target:
    """Return the target of a redirect from a target to a location."""
    try:
        return parse(urljoin(target.url, location.strip(_IGNORED)))
    except ValueError as error:  # of urljoin, for half an IPv6 address
        raise _bad_url(f"redirect: {error}") from error
    except RejectedError as error:
        raise _bad_url(f"redirect: {error.detail}") from error


def _without_dots(path: str) -> str:
    """Resolve `.` and `..` in a path as libcurl does.

    The path that robots.txt is asked about must be the one that is requested.
    """
    if path and "/." not in path.lower().replace("%2e", "."):
        return path
    kept: list[str] = []
    parts = path.split("/")[1:] or [""]
    plain = [part.lower().replace("%2e", ".") for part in parts]
    for part, dots in zip(parts, plain, strict=True):
        if dots == "..":
            del kept[-1:]
        elif dots != ".":
            kept.append(part)
    if plain[-1] in (".", ".."):
        kept.append("")
    return "/" + "/".join(kept)


@lru_cache(maxsize=4_096)  # a table names the same few hosts over and over
def _host_and_port(place: str) -> tuple[str, int]:
    if "@" in place:
        raise _bad_url("a user name or password in it")
    match = _PLACE.fullmatch(place)
    port = int(match["port"] or 0) if match else 65_536
    if match is None or port > 65_535:
        raise _bad_url("not a port")
    host = match["host"]
    if host[:1] == "[":
        try:
            return str(IPv6Address(host[1:-1] if "%" not in host else "")), port
        except AddressValueError as error:
            raise _bad_url("not an IPv6 address") from error
    name = unquote(host)
    if not name.isascii():
        import idna

        try:
            name = idna.encode(name, uts46=True).decode()
        except UnicodeError as error:  # idna's own errors are of this kind
            raise _bad_url("not a host") from error
    name = name.lower().removesuffix(".")
    if not _HOST.fullmatch(name):
        raise _bad_url("not a host" if name else "no host")
    return name, port


def _bad_url(detail: str) -> RejectedError:
    return RejectedError(Code.BAD_URL, detail)


_GLOBAL_UNICAST = IPv6Network("2000::/3")
_DOCUMENTATION = IPv6Network("3fff::/20")  # unknown to older Pythons
_TAILS = (IPv6Network("::/96"), IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"))


def is_public(address: str) -> bool:
    """Return whether an address is on the public internet. It may end in a zone (`%eth0`)."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv4Address):
        return ip.is_global and not ip.is_multicast
    inside = ip.sixtofour
    if any(ip in network for network in _TAILS):  # mapped, compatible or NAT64
        inside = IPv4Address(int(ip) & 0xFFFFFFFF)
    if inside is not None:
        return is_public(str(inside))
    return ip in _GLOBAL_UNICAST and ip.is_global and ip not in _DOCUMENTATION
