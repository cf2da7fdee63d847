"""Whether a node's name server answers at all: c10d's look-ups of names wait for it. Runs on the worker.

For its log alone c10d asks for the names of peers, when a store is connected to and when it accepts, and a store that
waits for an answer serves nobody. The resolver gives a silent server two attempts of 5 s each (resolv.conf(5)), on machines that
are fine otherwise, as behind a firewall. A worker's own resolver is left as it is: glibc reads its options once in a process,
and the train function's look-ups would have the shorter ones too.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

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
    """The variable that keeps look-ups short in a new process; what it says already stays."""
    return {_VARIABLE: f"{environment.get(_VARIABLE, '')} {_SHORT}".strip()}
