"""Errors of the backends ipc and staged. Runs in every rank; imports torch.distributed only for its error base class."""

from __future__ import annotations

import torch.distributed as dist

from ray_fracbackend.shown import printable


class IpcError(dist.DistBackendError):
    """Base of every error that the backends ipc and staged raise; also a ``torch.distributed.DistBackendError``."""

    def __init__(self, message: str) -> None:
        self.message = printable(message)  # it may contain the reason of another rank
        super().__init__(self.message)

    def __reduce__(self) -> tuple[type[IpcError], tuple[str]]:
        return type(self), (self.message,)


class IpcUnavailableError(IpcError):
    """Shared memory between the ranks of a host could not be set up.

    Example scenario: two containers that report the same boot id but cannot open each other's ``/proc/<pid>/fd``.
    """


class PeerLostError(IpcError):
    """A rank of the group died or left while others were still waiting for it.

    Example scenario: rank 1 is killed by the out-of-memory killer in the middle of an all_reduce.
    """


class CollectiveTimeoutError(IpcError):
    """A rank did not reach a collective, or a step of it, before the deadline.

    Example scenario: rank 2 skips an all_reduce in one branch of the training loop.
    """


class CollectiveMismatchError(IpcError):
    """Ranks called different collectives, or the same one with different arguments, at the same position.

    Example scenario: rank 0 reduces float32[8] while rank 1 reduces float32[9].
    """


class GroupPoisonedError(IpcError):
    """Another rank failed and marked the group as broken; the message contains that rank's reason.

    Example scenario: rank 3 timed out, so ranks 0 to 2 raise this with rank 3's message.
    """


class GroupClosedError(IpcError):
    """The process group was used after its ``shutdown()``, ``abort()`` or ``destroy_process_group()``, or in a forked child."""
