"""c10d's look-ups of names, kept short where the name server is silent. Runs on the worker.

For its log alone c10d asks for the name of every peer, when a store is connected to and when it accepts, and a store that
waits for an answer serves nobody. The resolver gives a silent server two attempts of 5 s each (resolv.conf(5)): more than a
start has for a few ranks, on machines that are fine otherwise, as behind a firewall.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

ANSWER_S = 1.0
_VARIABLE = "RES_OPTIONS"
_SHORT = "timeout:1"


def name_server_silent(address: str, timeout_s: float = ANSWER_S) -> bool:
    """Whether a look-up like c10d's gets no answer of any kind in time. False where it could not be helped: off Linux.

    Asked in a process of its own: glibc reads its options once in a process, at the first look-up.

    Args:
        address: This node's own address, a literal IP.
        timeout_s: Bound in seconds.
    """
    if sys.platform != "linux":
        return False
    # c10d's sockets are IPv6 and see IPv4 peers by mapped addresses, which no hosts file lists.
    peer = address if ":" in address else f"::ffff:{address}"
    try:
        subprocess.run(["getent", "hosts", peer], timeout=timeout_s, stdout=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        return True
    except OSError:
        pass
    return False


def short(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that keeps look-ups short in a process without any before; what it says already stays."""
    return {_VARIABLE: f"{environment.get(_VARIABLE, '')} {_SHORT}".strip()}


@contextmanager
def kept_short(needed: bool) -> Iterator[None]:
    """Lets the process's first look-up in it settle for attempts of 1 s each; the variable itself is put back.

    Args:
        needed: Nothing is changed where it is False.
    """
    if not needed:
        yield
        return
    before = os.environ.get(_VARIABLE)
    os.environ.update(short(os.environ))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = before
