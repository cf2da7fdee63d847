"""Check within seconds whether this worker reaches rank 0's store. Runs on every rank but 0."""

from __future__ import annotations

import socket
import time

from ray_fracbackend.decide.addresses import bracketed
from ray_fracbackend.errors import UnreachableMasterError

# Time limit for one worker's attempts.
REACH_S = 5.0
_PAUSE_S = 0.3
_ADVICE = (
    "The store is open: let the firewalls of both nodes pass that port (FracTorchConfig(master_port=...) sets a fixed port or a "
    "range), or set master_addr to an address of rank 0's node that this node reaches; if it is set, correct it or leave it out."
)


def check_reachable(address: str, port: int, timeout_s: float = REACH_S) -> None:
    """Open and close one connection to rank 0's store, which is known to be open.

    Args:
        address: Rank 0's address, a literal IP.
        port: Port of rank 0's store.
        timeout_s: Time limit for all attempts together, in seconds.

    Raises:
        UnreachableMasterError: No attempt succeeded.
    """
    end = time.monotonic() + timeout_s
    cause: OSError = TimeoutError()
    while (left_s := end - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=left_s).close()
            return
        except TimeoutError:
            break  # the limit may interrupt the last attempt; earlier attempts have the cause
        except OSError as error:
            cause = error
        time.sleep(min(_PAUSE_S, max(0.0, end - time.monotonic())))
    why = "no answer: something drops the packets" if isinstance(cause, TimeoutError) else cause.strerror or str(cause)
    if isinstance(cause, ConnectionRefusedError):
        why = "refused: a firewall, or another machine has that address"
    text = f"cannot reach rank 0's store at {bracketed(address)}:{port} within {timeout_s:.3g} s ({why})."
    raise UnreachableMasterError(text, advice=_ADVICE)
