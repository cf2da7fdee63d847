"""Network of the worker's node: interfaces, Gloo devices, host name lookups. Runs on the worker; opens no connection.

torch and psutil are imported only by the functions that need them, because the doctor uses the other functions even if
torch cannot be imported. Names of interfaces come from psutil. On Windows psutil returns the friendly names that Gloo
compares; the socket module returns other names.
"""

from __future__ import annotations

import os
import socket
import sys

from ray_fracbackend.decide.addresses import is_link_local, is_loopback, normal, owner_of, parsed
from ray_fracbackend.decide.advice import advise
from ray_fracbackend.decide.error_texts import cause_of, has_no_port, has_no_transport
from ray_fracbackend.decide.interfaces import IFNAME, loopback_of
from ray_fracbackend.decide.worker_info import NetworkInfo
from ray_fracbackend.errors import RendezvousError
from ray_fracbackend.shown import decoded
from ray_fracbackend.timeouts import bounded

# Time limit of one host name lookup. Without it a resolver that gets no answer could wait longer than a start may take.
RESOLVE_S = 5.0


def network_info(boot_id: str, master_addr: str | None = None, store_port: int | None = None) -> NetworkInfo:
    """Collect interfaces, addresses and Gloo support of the calling worker's node.

    Args:
        boot_id: The kernel's boot id, empty where there is none.
        master_addr: The configured address or name of rank 0's node.
        store_port: Port of the store that this worker holds open, None on ranks other than 0.
    """
    addresses, missing = _master_addrs(master_addr)
    gloo, known = gloo_missing(), interfaces()
    return NetworkInfo(
        network_id=network_id(boot_id),
        interfaces=known,
        gloo_missing=gloo,
        loopback_works=sys.platform != "win32" or gloo is not None or _loopback_works(loopback_of(known)),
        store_port=store_port,
        master_addrs=addresses,
        master_addr_missing=missing,
    )


def interfaces() -> dict[str, tuple[str, ...]]:
    """Return the addresses of the interfaces that are up, by name; skip those with only link-local addresses."""
    import psutil

    try:
        up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
        addresses = psutil.net_if_addrs()
    except (psutil.Error, OSError):  # for example in a sandbox without netlink; the address from Ray may be enough
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for name, entries in addresses.items():
        inet = tuple(normal(entry.address) for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6))
        # An alias such as eth0:1 has no state of its own.
        if name.partition(":")[0] in up and not all(is_link_local(address) for address in inet):
            found[name] = inet
    return found


def network_id(boot_id: str) -> str:
    """Return an id of the network stack, from boot id and network namespace; empty if unknown."""
    try:
        return f"{boot_id}/{os.stat('/proc/self/ns/net').st_ino}" if boot_id else ""
    except OSError:
        return ""


def gloo_missing() -> str | None:
    """Return why this torch cannot create a Gloo device on any address, None if it can.

    Linux builds always have a transport. There a device is created only if the user selects a transport, because
    closing a device takes as long as the rest of the probe.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_gloo_available():
        return "torch was built without Gloo; install a build with Gloo"
    if sys.platform == "linux" and "GLOO_DEVICE_TRANSPORT" not in os.environ:
        return None
    try:
        # A literal address, because a host name would need a name server.
        with decoded():
            dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    except RuntimeError as error:
        if has_no_transport(error):
            return no_transport_text(torch.__version__)
    return None


def no_transport_text(torch_version: str) -> str:
    """Explain ``unsupported gloo device``: the wheel has no transport, or not the one that the user selected."""
    if transport := os.environ.get("GLOO_DEVICE_TRANSPORT"):
        return f"torch {torch_version} has no Gloo transport {transport!r}; unset GLOO_DEVICE_TRANSPORT"
    return (
        f"torch {torch_version} on {sys.platform} has no Gloo transport (unsupported gloo device). The Windows wheels of torch "
        "2.8.0 to 2.10.0 were built without one; install torch 2.7.1 or older, or 2.11.0 or newer"
    )


def check_gloo_device(interface: str | None) -> None:
    """Create and close the device that Gloo will use, so that an error is raised before any rank waits.

    Args:
        interface: Value of ``GLOO_SOCKET_IFNAME``, None if it is not set.

    Raises:
        RendezvousError: Gloo cannot use it.
    """
    import torch
    import torch.distributed as dist

    try:
        with decoded():
            if interface is not None:
                for name in interface.split(","):
                    dist.ProcessGroupGloo.create_device(interface=name)
                return
            if sys.platform == "win32":  # for a name that does not resolve, Gloo reads an uninitialized pointer
                resolve(socket.gethostname())
            dist.ProcessGroupGloo.create_default_device()
    except (RuntimeError, OSError, UnicodeError) as error:
        cause = no_transport_text(torch.__version__) if has_no_transport(error) else cause_of(error)
        setting = f"{IFNAME}={interface}" if interface is not None else f"{IFNAME} not set"
        raise RendezvousError(
            f"Gloo cannot use a network device here ({setting}): {cause}.",
            advice=advise("Gloo has no port") if has_no_port(error) else f"This node has {', '.join(interfaces())}.",
        ) from error


def route_interface(address: str) -> str | None:
    """Return the interface of this node's route to an address, None if there is no route. Sends nothing."""
    return owner_of(interfaces(), route_address(address) or "")


def route_address(address: str) -> str | None:
    """Return this node's own address on its route to another address, None if there is no route. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return normal(probe.getsockname()[0])
    except OSError:
        return None


def resolve(name: str, timeout_s: float = RESOLVE_S) -> tuple[str, ...]:
    """Resolve a host name; IPv4 addresses come first.

    Raises:
        OSError: The name does not resolve, or not within ``timeout_s`` seconds.
    """
    entries = bounded(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), timeout_s)
    addresses = dict.fromkeys(str(entry[4][0]) for entry in entries)
    return tuple(sorted(addresses, key=lambda address: ":" in address))


def node_address(node_ip: str) -> str:
    """Return Ray's address of this node as a literal IP: Ray may know the node by a host name.

    Args:
        node_ip: Ray's address, or the name with which ``ray start`` registered the node.

    Returns:
        The name's address on an interface of this node, else its first one that is not loopback; the name if it has none.
    """
    if parsed(node_ip) is not None:
        return node_ip
    try:
        addresses = [address for address in resolve(node_ip) if not is_loopback(address)]
    except (OSError, UnicodeError):
        return node_ip
    known = interfaces()
    return next((address for address in addresses if owner_of(known, address)), (*addresses, node_ip)[0])


def _master_addrs(value: str | None) -> tuple[tuple[str, ...], str | None]:
    if value is None or parsed(value) is not None:
        return (), None
    try:
        return resolve(value), None
    except (OSError, UnicodeError) as error:
        return (), str(error)


def _loopback_works(name: str | None) -> bool:
    """Return whether Gloo can use the loopback adapter of Windows; it gets no name with letters outside of ASCII."""
    if name is None or not name.isascii():
        return False
    try:
        check_gloo_device(name)
    except RendezvousError:
        return False
    return True
