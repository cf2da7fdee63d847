"""The errors of this package; failure/merge.py adds the one that is also an error of Ray. Standard library only.

Each message says what was found, which rule it breaks, and what to do next. Whoever handles an error reads its attributes and
never its text. Each can be pickled, because it usually crosses a process boundary.

=================  ==============================================================================================
``kind``           of a failure in a start
=================  ==============================================================================================
``refused``        NCCL refused ranks that it takes to share a GPU; ``cause`` is its sentence
``invalid_usage``  NCCL refused a call and gave no reason
``wrong_answer``   a collective computed a wrong answer
``stalled``        a call did not return in time
``own_failure``    NCCL or CUDA failed on the rank itself
``failed``         a call failed for another reason, such as a peer that is gone
=================  ==============================================================================================

An error that is none of these has its ``reason`` as its kind.
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Iterable
from typing import TypeVar

_Self = TypeVar("_Self", bound="FracBackendError")


class FracBackendError(RuntimeError):
    """Base of all errors of ray_fracbackend.

    Args:
        message: What was found and the rule that it breaks; the next step too, unless it is the advice.
        advice: The next step, a sentence that follows the message.
        ranks: Global ranks at fault, empty where no single rank is.
        kind: Kind of the failure, by default the reason.
        step: The step of the start in which it came, such as ``barrier``; empty where there is none.
        cause: What a library said, in one line; empty where none did.

    Attributes:
        reason: Short, stable, machine-readable name of the class of failures.
        kind: As given; finer than the reason.
        found: The message without the advice and without a full stop.
        ranks: As given, sorted.
        step: As given.
        cause: As given.
    """

    reason = "error"

    def __init__(
        self,
        message: str,
        *,
        advice: str = "",
        ranks: Iterable[int] = (),
        kind: str = "",
        step: str = "",
        cause: str = "",
    ) -> None:
        super().__init__(f"{message} {advice}" if advice else message)
        self.found = message.rstrip(".")
        self.ranks: tuple[int, ...] = tuple(sorted(ranks))
        self.kind = kind or self.reason
        self.step = step
        self.cause = cause

    def restated(self: _Self, message: str, *, found: str | None = None, ranks: Iterable[int] | None = None) -> _Self:
        """Return the same failure in other words: class, kind, step and cause stay.

        Args:
            message: The whole new text.
            found: The new `found`, None to keep it.
            ranks: The new ranks at fault, None to keep them.
        """
        other = copy.copy(self)
        other.args = (message,)
        other.found = self.found if found is None else found
        other.ranks = self.ranks if ranks is None else tuple(sorted(ranks))
        return other

    def to_probe_result(self) -> dict[str, object]:
        """Return plain values with the fields of a health probe's result, as Ray's enhancement proposal 71 has them.

        Returns:
            ``passed`` False, ``events`` with the reason and with ``rank N`` for each rank at fault, ``detail`` with the message and
            what a search for the fault found; no ``metrics`` and no ``devices``.
        """
        events = [self.reason, *(f"rank {rank}" for rank in self.ranks)]
        return {"metrics": {}, "devices": {}, "events": events, "passed": False, "detail": str(self)}

    def __reduce__(self) -> tuple[object, ...]:
        # Without the constructor: Ray raises a subclass with one of its own, which up to 2.40 it does not reduce itself.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class SharedDeviceError(FracBackendError):
    """Ranks share a CUDA device and the configuration forbids it or leaves no backend that can work.

    Example scenario: ``on_shared_device="error"`` and Ray packed two half-GPU workers onto one device.
    """

    reason = "shared_device"


class MissingDeviceError(FracBackendError):
    """Ray gave a worker GPUs that its torch cannot use.

    Example scenario: ``ray.init(num_gpus=1)`` on a machine without a GPU, or a CPU-only build of torch.
    """

    reason = "missing_device"


class InsufficientResourcesError(FracBackendError):
    """Ray did not place the workers of a plan in time.

    Example scenario: ``ray-fracbackend plan --gpus-per-worker 0.5`` on a cluster without GPUs, or one that is busy.
    """

    reason = "insufficient_resources"


class IncompatibleWorkersError(FracBackendError):
    """The workers cannot form one process group.

    Example scenario: two nodes with different NCCL versions, or Windows and Linux workers in one job.
    """

    reason = "incompatible_workers"


class BackendUnavailableError(FracBackendError):
    """The backend that was asked for cannot run here.

    Example scenario: ``on_shared_device="nccl"`` with an NCCL older than 2.30.
    """

    reason = "backend_unavailable"


class RendezvousError(FracBackendError):
    """The workers could not form a process group.

    Example scenario: a firewall between two nodes, or a worker that never answers.
    """

    reason = "rendezvous"


class UnreachableMasterError(RendezvousError):
    """A worker's node cannot open a connection to rank 0's store, although rank 0 holds it open.

    Example scenario: a firewall between two nodes, or an address of rank 0 that exists in its own network only.
    """

    reason = "unreachable_master"


class GroupFormationError(RendezvousError):
    """The rendezvous succeeded, and then some ranks could not connect to each other.

    Example scenario: a firewall that passes the store's port and not the random ports of Gloo.
    """

    reason = "group_formation"


class PortInUseError(RendezvousError):
    """No port for rank 0's store: the configured port, or every port of the configured range, is taken.

    Example scenario: ``master_port=29500`` and a second job on rank 0's node.
    """

    reason = "port_in_use"


class WorkerDiedError(RendezvousError):
    """A worker process died during start-up.

    Example scenario: the kernel's out-of-memory killer, or a preempted node.
    """

    reason = "worker_died"


class StartTimeoutError(RendezvousError):
    """Start-up did not finish within ``start_timeout_s``; the message names the ranks that did not answer."""

    reason = "start_timeout"


class OutOfMemoryError(FracBackendError):
    """A worker's device has too little free memory for the start; the cause is torch's own OutOfMemoryError.

    Example scenario: a GPU that other processes, or more workers than fit, have filled.
    """

    reason = "out_of_memory"


class VerificationError(FracBackendError):
    """A collective of the new process group failed, stalled or computed a wrong answer."""

    reason = "verification"
