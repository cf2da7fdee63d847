"""Resolve the address of a cluster, and check that a server listens there. Standard library only."""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ray_fracbackend.cli.connect.token import token
from ray_fracbackend.timeouts import Deadline, bounded

_FORMAT = "an address is HOST:PORT, ray://HOST:PORT or auto"
# A head node that is slower than this cannot serve a driver either.
_ANSWER_S = 10.0


class ClusterError(ConnectionError):
    """There is no connection to a Ray cluster.

    Args:
        message: One line with address, cause and fix.
        reason: ``no_cluster``, ``authentication``, ``not_ray``, ``no_answer`` or ``version_mismatch``.

    Attributes:
        reason: The argument.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Target:
    """A cluster to connect to.

    Attributes:
        address: As for ``ray.init``.
        text: The address and its source, for messages.
        host_port: Its host and port, None if Ray finds the cluster itself.
        automatic: The user named no address: it is the cluster of this machine. Ray then sends a token by default.
    """

    address: str
    text: str
    host_port: tuple[str, int] | None = None
    automatic: bool = False

    @property
    def is_local(self) -> bool:
        """True if Ray is started for this command."""
        return self.address == "local"


def target_of(address: str | None) -> Target:
    """Resolve an address as ``ray.init`` does.

    Args:
        address: As for ``ray.init``; None for the running cluster that ``ray.init()`` would find, else a local one.

    Raises:
        ClusterError: It is not an address, or it comes from a file of another user, to whose cluster Ray would send a token.
    """
    named = os.environ.get("RAY_ADDRESS", "")
    if address in (None, "auto") and named not in ("", "auto"):
        return _parsed(named, f"RAY_ADDRESS={named}")
    if address not in (None, "auto"):
        return _parsed(address or "", address or "")
    file = _address_file()
    try:
        with file.open() as opened:
            found, owner = opened.read().strip(), os.fstat(opened.fileno()).st_uid
    except (OSError, UnicodeError):
        found, owner = "", 0
    if found:
        _check_owner(file, found, owner)
        host, _, port = found.rpartition(":")
        host_port = (host.strip("[]"), int(port)) if port.isdecimal() else None
        return Target("auto", f"{found} (from {file})", host_port, automatic=True)
    wanted = "auto" if address == "auto" or named == "auto" else "local"
    return Target(wanted, wanted, automatic=True)


def _parsed(address: str, text: str) -> Target:
    if address == "local":
        return Target(address, text)
    wrong = ClusterError(f"{text or repr(text)} is not the address of a Ray cluster: {_FORMAT}", "no_cluster")
    if address.startswith(("http://", "https://")):
        raise ClusterError(
            f"{text} is an HTTP address, such as that of Ray's dashboard or jobs API: {_FORMAT}; the cluster's own port is 6379 by default",
            "no_cluster",
        )
    found = re.fullmatch(r"(ray://)?(\[[^\[\]]+\]|[^\s/:\[\]]+):(\d{1,5})(/.*)?", address)
    if not found or not 0 < int(found[3]) < 65536 or (found[4] and not found[1]):
        if "://" in address and not address.startswith("ray://"):
            return Target(address, text)  # a connector of the user, which Ray imports by its scheme
        raise wrong
    return Target(address, text, (found[2].strip("[]"), int(found[3])))


def _address_file() -> Path:
    """Return the file in which ``ray start`` records its cluster."""
    folder = os.environ.get("RAY_TMPDIR") or (os.environ.get("TMPDIR") if sys.platform == "linux" else None)
    return Path(folder or (tempfile.gettempdir() if sys.platform == "win32" else "/tmp"), "ray", "ray_current_cluster")


def _check_owner(file: Path, address: str, owner: int) -> None:
    """Refuse a file of another user if Ray would send this user's token to the cluster in the file."""
    if sys.platform == "win32" or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or token() is None:
        return
    if owner not in (0, os.getuid()):
        raise ClusterError(
            f"{file} belongs to another user (uid {owner}), and Ray would send your token to {address}, its cluster; name the "
            f"cluster with --address {address}, or set RAY_AUTH_MODE=disabled",
            "authentication",
        )


def check_listening(target: Target, timeout_s: float) -> None:
    """Check that a server accepts connections at the target's address, if it has one.

    Args:
        target: The cluster.
        timeout_s: Time limit in seconds.

    Raises:
        ClusterError: Nothing listens there, the name does not resolve, or there is no answer in time.
    """
    if target.host_port is None:
        return
    deadline, what = Deadline(min(timeout_s, _ANSWER_S)), target.text
    try:
        # The lookup of a host name has no timeout.
        bounded(lambda: _connect(target.host_port, deadline), deadline.left_s)
    except TimeoutError:
        fix = "check the address, the firewall and the head node"
        raise ClusterError(f"{what}: no answer within {deadline.budget_s:.3g} s; {fix}", "no_answer") from None
    except socket.gaierror as error:
        cause, fix = f"the name does not resolve ({error.strerror})", "correct the address"
    except (OSError, UnicodeError, OverflowError) as error:
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        fix = "start one there with `ray start --head`, or correct the address"
    else:
        return
    # The file may name a cluster that has ended, while another one runs.
    if target.automatic:
        fix += "; if that file is out of date, delete it, or run `ray stop`, which ends all of Ray on this machine"
    raise ClusterError(f"no Ray cluster at {what}: {cause}; {fix}", "no_cluster")


def _connect(host_port: tuple[str, int] | None, deadline: Deadline) -> None:
    assert host_port is not None
    socket.create_connection(host_port, timeout=deadline.left_s).close()
