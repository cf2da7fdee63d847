"""Errors of this package; failure/merge.py adds LostWorkerError, also an error of Ray. Standard library only.

Each message states the problem, the rule that it breaks, and what to do next. Code that handles an error reads and sets its
attributes and never parses its message. Each error can be pickled, because it usually crosses a process boundary.

=================  ==============================================================================================
``kind``           of a failed start
=================  ==============================================================================================
``refused``        NCCL refused ranks as if they shared a GPU; ``cause`` is NCCL's message
``invalid_usage``  NCCL refused a call and did not name a reason
``wrong_answer``   a collective computed a wrong result
``stalled``        a call did not return in time
``own_failure``    NCCL or CUDA failed on the rank itself
``failed``         a call failed for another reason, such as a lost peer
``killed_for_memory``  Ray's memory monitor killed a worker: V2 does not restart the run, as with TorchConfig
=================  ==============================================================================================

For all other errors the kind is the ``reason``.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable

from ray_fracbackend.shown import printable


class FracBackendError(RuntimeError):
    """Base of all errors of ray_fracbackend.

    Args:
        message: The problem and the rule that it breaks; also the next step if ``advice`` is empty.
        advice: The next step, as a sentence that follows the message.
        ranks: Global ranks at fault, empty if no single rank is at fault.
        kind: Kind of the failure, by default the reason.
        step: Step of the start that failed, such as ``barrier``; empty if there is none.
        cause: Error message of a library in one line; empty if there is none.

    Attributes:
        reason: Short, stable, machine-readable name of the error class.
        kind: The argument; more specific than the reason.
        found: The message without the advice and without a full stop.
        advice: The argument.
        ranks: The argument, sorted.
        step: The argument.
        cause: The argument.
        faults: Result of the search for the fault, empty if there was none.
        warnings: Warnings that came before the error, one line each.
        report: Path of the report of the failed start, None if there is none.
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
        super().__init__(message)
        self.found: str = message.rstrip(".")
        self.advice = advice
        self.ranks: tuple[int, ...] = tuple(sorted(ranks))
        self.kind: str = kind or self.reason
        self.step = step
        self.cause = cause
        self.faults: str = ""
        self.warnings: tuple[str, ...] = ()
        self.report: str | None = None

    def __str__(self) -> str:
        faults = f"Search for the fault: {self.faults}." if self.faults else ""
        lines = [" ".join(filter(None, (str(self.args[0]), self.advice, faults)))]
        lines += [f"warning before this error: {warning}" for warning in self.warnings]
        lines += [f"report of this start: {self.report}"] if self.report else []
        return str(printable("\n".join(lines)))

    def __reduce__(self) -> tuple[object, ...]:
        # Do not call the constructor: Ray raises a subclass with its own constructor, and up to 2.40 it does not reduce
        # it itself.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class SharedDeviceError(FracBackendError):
    """Ranks share a CUDA device, and the configuration forbids this or leaves no backend that works.

    Example scenario: ``on_shared_device="error"`` and Ray packed two half-GPU workers onto one device.
    """

    reason = "shared_device"


class MissingDeviceError(FracBackendError):
    """Ray assigned GPUs to a worker that its torch cannot use.

    Example scenario: ``ray.init(num_gpus=1)`` on a machine without a GPU, or a CPU-only build of torch.
    """

    reason = "missing_device"


class InsufficientResourcesError(FracBackendError):
    """Ray did not place the workers of a plan in time.

    Example scenario: ``ray-fracbackend plan --gpus-per-worker 0.5`` on a cluster without GPUs, or on a busy cluster.
    """

    reason = "insufficient_resources"


class IncompatibleWorkersError(FracBackendError):
    """The workers cannot form one process group.

    Example scenario: two nodes with different NCCL versions, or Windows and Linux workers in one job.
    """

    reason = "incompatible_workers"


class BackendUnavailableError(FracBackendError):
    """The requested backend cannot run on these workers.

    Example scenario: ``on_shared_device="nccl"`` with an NCCL older than 2.30.
    """

    reason = "backend_unavailable"


class RendezvousError(FracBackendError):
    """The workers could not form a process group.

    Example scenario: a firewall between two nodes, or a worker that never answers.
    """

    reason = "rendezvous"


class UnreachableMasterError(RendezvousError):
    """A worker's node cannot connect to rank 0's store, although the store is open.

    Example scenario: a firewall between two nodes, or an address of rank 0 that exists only in its own network.
    """

    reason = "unreachable_master"


class GroupFormationError(RendezvousError):
    """The rendezvous succeeded, but some ranks could not connect to each other.

    Example scenario: a firewall that allows the store's port but not the random ports of Gloo.
    """

    reason = "group_formation"


class PortInUseError(RendezvousError):
    """No port for rank 0's store is free: the configured port, or every port of the range, is in use.

    Example scenario: ``master_port=29500`` and a second job on rank 0's node.
    """

    reason = "port_in_use"


class WorkerDiedError(RendezvousError):
    """A worker process died during the start.

    Example scenario: the kernel's out-of-memory killer, or a preempted node.
    """

    reason = "worker_died"


class StartTimeoutError(RendezvousError):
    """The start did not finish within ``start_timeout_s``; the message names the ranks that did not answer."""

    reason = "start_timeout"


class OutOfMemoryError(FracBackendError):
    """A worker's device has too little free memory for the start; the cause is torch's own OutOfMemoryError.

    Example scenario: other processes, or too many workers, use the memory of the GPU.
    """

    reason = "out_of_memory"


class VerificationError(FracBackendError):
    """A collective of the new process group failed, stalled or computed a wrong result."""

    reason = "verification"
