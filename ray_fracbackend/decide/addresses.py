"""Literal IP addresses: parse, normalize and classify them, and find the interface of an address.

An IPv6 address may have a scope and several spellings: ``fe80::1%eth0`` is link-local, and ``0:0:0:0:0:0:0:1`` and
``::ffff:127.0.0.1`` are loopback. A host name is not an address: it is parsed to None and is neither loopback nor
link-local, except that ``localhost`` is loopback.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence


def parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Read a literal address without its scope; None for a name."""
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None


def normal(address: str) -> str:
    """Normalize an address without its scope, so that two spellings of one address are equal."""
    bare = address.partition("%")[0]
    return str(parsed(bare) or bare) if ":" in bare else bare


def is_loopback(address: str) -> bool:
    """Return True for 127.0.0.0/8 and ::1, in any spelling, and ``localhost``."""
    if address == "localhost":
        return True
    found = parsed(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found or ipaddress.IPv4Address(0)).is_loopback


def is_link_local(address: str) -> bool:
    """Return True for fe80::/10 and 169.254.0.0/16, which are valid on one link only."""
    found = parsed(address)
    return found is not None and found.is_link_local


def bracketed(address: str) -> str:
    """Format a literal IP for use before a port: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def owner_of(interfaces: Mapping[str, Sequence[str]], address: str) -> str | None:
    """Return the name of the interface with this address, None if there is none.

    Args:
        interfaces: Normalized addresses of every interface, by name.
        address: The address, in any spelling.
    """
    wanted = normal(address)
    return next((name for name, addresses in interfaces.items() if wanted in addresses), None)
