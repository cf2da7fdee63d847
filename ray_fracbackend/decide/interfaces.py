"""Check the variables that name network interfaces, each in the syntax of its library.

==========================  ===============================================================================
``GLOO_SOCKET_IFNAME``      exact names, separated by commas (torch, ProcessGroupGloo)
``NCCL_SOCKET_IFNAME``      prefixes of names; ``=eth0`` for an exact name; ``^eth`` for all others (NCCL, env.rst)
==========================  ===============================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

IFNAME = "GLOO_SOCKET_IFNAME"
NCCL_IFNAME = "NCCL_SOCKET_IFNAME"


def gloo_doubt(value: str, known: Sequence[str]) -> str | None:
    """Return which part of ``GLOO_SOCKET_IFNAME`` is not an interface, in one clause; None if all parts are.

    Args:
        value: Value of the variable.
        known: Names of the node's interfaces.
    """
    missing = next((name for name in value.split(",") if name not in known), None)
    if missing is None:
        return None
    found = f"{missing!r} is none of this node's interfaces ({', '.join(known)})"
    if value[:1] in ("^", "=") or (missing and any(name.startswith(missing) for name in known)):
        meant = matched(value, known)
        instead = f", here {IFNAME}={meant[0]}" if meant else ""
        return f"{found}: that is the syntax of {NCCL_IFNAME}, and Gloo accepts only whole names{instead}"
    return found


def nccl_doubt(value: str, known: Sequence[str]) -> str | None:
    """Return why NCCL finds no interface by ``NCCL_SOCKET_IFNAME``, in one clause; None if it finds one.

    Args:
        value: Value of the variable.
        known: Names of the node's interfaces.
    """
    if not value or matched(value, known):
        return None
    return f"it matches none of this node's interfaces ({', '.join(known)})"


def matched(value: str, known: Sequence[str]) -> list[str]:
    """Return the interfaces that match a value in NCCL's syntax; loopback only if the value names it."""
    excludes = value.startswith("^")
    rest = value[1:] if excludes else value
    is_exact = rest.startswith("=")
    names = [name for name in (rest[1:] if is_exact else rest).split(",") if name]

    def is_named(interface: str) -> bool:
        return any(interface == name if is_exact else interface.startswith(name) for name in names)

    if excludes:
        return [interface for interface in known if not is_named(interface) and interface != "lo"]
    return [interface for interface in known if is_named(interface)]
