"""Which addresses lie on the public internet.

A table of URLs is written by strangers, and the machine that fetches it often stands inside a
network that trusts it. An address that carries an IPv4 address inside, as IPv6 has them for
translators, is as public as that one.
"""

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

_GLOBAL_UNICAST = IPv6Network("2000::/3")
_DOCUMENTATION = IPv6Network("3fff::/20")  # unknown to older Pythons
_TAILS = (IPv6Network("::/96"), IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"))


def is_public(address: str) -> bool:
    """For an address as sockets have it, perhaps with a zone."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv4Address):
        return ip.is_global and not ip.is_multicast
    inside = _inside(ip)
    if inside is not None:
        return is_public(str(inside))
    return ip in _GLOBAL_UNICAST and ip.is_global and ip not in _DOCUMENTATION


def _inside(ip: IPv6Address) -> IPv4Address | None:
    """The IPv4 address of a mapped, compatible, NAT64 or 6to4 one."""
    if any(ip in network for network in _TAILS):
        return IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.sixtofour
