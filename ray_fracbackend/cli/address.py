"""Resolve the address of a Ray cluster. Standard library only."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ray_fracbackend.cli.program import CommandError


@dataclass(frozen=True)
class Target:
    """A cluster to connect to.

    Attributes:
        address: As for ``ray.init``; never None or ``auto``, with which Ray would look for a cluster once more.
        text: The address and its source, for messages.
        automatic: The user named no address: it is the cluster of this machine.
    """

    address: str
    text: str
    automatic: bool = False

    @property
    def is_local(self) -> bool:
        """True if Ray is started for this command."""
        return self.address == "local"


def target_of(address: str | None) -> Target:
    """Resolve an address: that of the user, else RAY_ADDRESS, else the cluster of ``ray start``, else, for None, a local Ray.

    Raises:
        CommandError: No cluster runs on this machine, or it is another user's.
    """
    named = os.environ.get("RAY_ADDRESS", "")
    if address not in (None, "auto"):
        return Target(address or "", repr(address) if address == "" else str(address))
    if named not in ("", "auto"):
        return Target(named, f"RAY_ADDRESS={named}")
    folder = os.environ.get("RAY_TMPDIR") or (os.environ.get("TMPDIR") if sys.platform == "linux" else None)
    file = Path(folder or (tempfile.gettempdir() if sys.platform == "win32" else "/tmp"), "ray", "ray_current_cluster")
    found, owner = "", 0
    try:
        # A link could lead to a file of root that somebody else writes, such as /proc/PID/comm; a FIFO would block.
        flags = os.O_RDONLY
        if sys.platform != "win32":
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(file, flags)) as opened:
            found, owner = opened.read(256).strip(), os.fstat(opened.fileno()).st_uid
    except (OSError, UnicodeError):
        pass
    if not found:
        if "auto" not in (address, named):
            return Target("local", "local", automatic=True)
        text = "no Ray cluster runs on this machine; start one with `ray start --head`, or name its address"
        raise CommandError("no_cluster", text)
    if sys.platform != "win32" and owner not in (0, os.getuid()):
        text = f"{file} belongs to another user (uid {owner}); use --address {found} to connect to that cluster"
        raise CommandError("other_user", text)
    return Target(found, f"{found} (from {file})", automatic=True)
