"""Merge the errors of all ranks into one, in the class that Ray Train handles. Driver or controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from ray.exceptions import ActorUnavailableError, NodeDiedError, RayActorError, RayError
from ray.exceptions import OutOfMemoryError as RayOutOfMemoryError

from ray_fracbackend._ray import WorkerGroup, is_v1
from ray_fracbackend.decide.advice import advise
from ray_fracbackend.decide.error_texts import cause_of, is_lost_connection, without_allocator
from ray_fracbackend.decide.worker_info import WorkerAddress, named
from ray_fracbackend.errors import (
    BackendUnavailableError,
    FracBackendError,
    GroupFormationError,
    MissingDeviceError,
    OutOfMemoryError,
    RendezvousError,
    SharedDeviceError,
    StartTimeoutError,
    UnreachableMasterError,
    VerificationError,
    WorkerDiedError,
)

_NUM_NAMED = 4
# The most specific failure is raised: if NCCL refused a rank, its peers fail the verification.
_ORDER = (
    SharedDeviceError,
    MissingDeviceError,
    VerificationError,
    UnreachableMasterError,
    GroupFormationError,
    RendezvousError,
    FracBackendError,
)
# A rank that did not reach its peers, which does not say whose fault it is.
PEER_LOST = ("failed", "stalled")
# A refusal of NCCL is the cause of all other errors; within one class a rank that lost a peer knows least.
_ROOT_KINDS = ("refused", "invalid_usage")
_KIND_ORDER = (*_ROOT_KINDS, "wrong_answer", "own_failure", "stalled")
_UNUSABLE = (MissingDeviceError, BackendUnavailableError)
# If Ray's memory monitor kills a worker, Ray raises a separate error.
_DEATHS = (RayActorError, NodeDiedError, RayOutOfMemoryError)


class LostWorkerError(WorkerDiedError, RayActorError):  # type: ignore[misc]
    """WorkerDiedError for the V2 engine, where Ray Train restarts the workers if a start raises a RayActorError."""

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        RayActorError.__init__(self, error_msg=message)
        WorkerDiedError.__init__(self, message, ranks=ranks)


def merged(
    failures: Mapping[int, BaseException],
    silent: Sequence[int],
    addresses: Mapping[int, WorkerAddress],
    step: str,
    budget_s: float,
) -> FracBackendError:
    """Return the error of a step that failed on some ranks.

    Args:
        failures: The workers' own errors by rank.
        silent: Ranks that did not answer in time.
        addresses: Node and process of each rank.
        step: What the ranks were called for.
        budget_s: Time limit in seconds, as set by the user.
    """
    if died := death_error(failures, addresses, step):
        return died
    if oom_ranks := [rank for rank, error in failures.items() if _is_out_of_memory(error)]:
        cause = without_allocator(cause_of(failures[oom_ranks[0]]))  # its advice on the allocator is not about a start
        return OutOfMemoryError(
            f"{named(oom_ranks, addresses)} ran out of device memory during start-up ({step}): {cause}.",
            advice=advise("device full"),
            ranks=oom_ranks,
            step=step,
            cause=cause,
        )
    # A worker without a device ends, and then its peers fail too.
    if unusable := {rank: error for rank, error in failures.items() if isinstance(error, _UNUSABLE)}:
        failures, silent = unusable, ()
    failures = _by_precedence(failures)
    texts = [f"{named(silent, addresses)} did not answer ({step}, start_timeout_s={budget_s:g})"] if silent else []
    if not failures:
        return StartTimeoutError(f"{texts[0]}.", advice=advise("no answer"), ranks=silent, step=step)
    ranks_of: dict[str, list[int]] = {}
    for rank, error in failures.items():
        ranks_of.setdefault(_error_text(error), []).append(rank)
    texts += [f"{named(ranks, addresses)}: {text}" for text, ranks in list(ranks_of.items())[:_NUM_NAMED]]
    ours = [error for error in failures.values() if isinstance(error, FracBackendError)]
    first = ours[0] if ours else RendezvousError("")
    blamed = {rank for error in ours for rank in error.ranks}
    return type(first)(
        f"{'' if ours else f'{step} failed: '}{'; '.join(texts)}.",
        advice=advise("no answer") if silent else first.advice,  # what a rank advises that waited does not help
        ranks=silent or blamed or failures,
        kind=first.kind,
        step=first.step or step,  # a worker's check may not know for which step it runs
        cause=first.cause,
    )


def death_error(
    failures: Mapping[int, BaseException], addresses: Mapping[int, WorkerAddress], step: str
) -> WorkerDiedError | None:
    """Return the error of the ranks whose process ended during a step, None if none did; arguments as in `merged`."""
    dead = [rank for rank, error in failures.items() if isinstance(error, _DEATHS)]
    if not dead:
        return None
    cause = cause_of(failures[dead[0]])
    is_killed = any(isinstance(failures[rank], RayOutOfMemoryError) for rank in dead)
    ended = "cannot be reached" if isinstance(failures[dead[0]], ActorUnavailableError) else "died"
    return WorkerDiedError(
        f"{named(dead, addresses)} {ended} during start-up ({step}): {cause.rstrip('.')}.",
        advice=advise("killed for memory" if is_killed else "worker died"),
        ranks=dead,
        kind="killed_for_memory" if is_killed else "",
        step=step,
        cause=cause,
    )


def _by_precedence(failures: Mapping[int, BaseException]) -> dict[int, BaseException]:
    """Return the errors, the most specific first and then by rank, without those of ranks that only lost a peer.

    Such an error stays if it names a rank without an error of its own, and if all ranks lost a peer.
    """
    blames = {rank: {*error.ranks} - {rank} for rank, error in failures.items() if _lost_a_peer(error, rank)}
    own_errors = failures.keys() - blames.keys()
    kept = [rank for rank in failures if rank not in blames or not own_errors or not own_errors >= blames[rank]]
    return {rank: failures[rank] for rank in sorted(kept, key=lambda rank: (*_precedence(failures[rank]), rank))}


def _lost_a_peer(error: BaseException, rank: int) -> TypeGuard[FracBackendError]:
    """Return whether this rank waited for others, and names no failure of its own."""
    if isinstance(error, GroupFormationError):
        return is_lost_connection(error.cause)
    if isinstance(error, VerificationError):
        return rank not in error.ranks and error.kind in PEER_LOST
    return type(error) is RendezvousError and bool(error.ranks) and rank not in error.ranks


def _precedence(error: BaseException) -> tuple[bool, bool, int, int]:
    """Return a sort key, which is lowest for the most specific error."""
    if not isinstance(error, FracBackendError):
        return True, True, 0, 0
    by_class = next(place for place, error_class in enumerate(_ORDER) if isinstance(error, error_class))
    by_kind = _KIND_ORDER.index(error.kind) if error.kind in _KIND_ORDER else len(_KIND_ORDER)
    return False, error.kind not in _ROOT_KINDS, by_class, by_kind


def _is_out_of_memory(error: BaseException) -> bool:
    """Detect torch's error by its class name, without torch; Ray's error of that name is about host memory."""
    return type(error).__name__ == "OutOfMemoryError" and not isinstance(error, RayError)


def _error_text(error: BaseException) -> str:
    if isinstance(error, FracBackendError):
        return error.found
    text = f"{type(error).__name__}: {error}".strip()
    if "No module named 'ray_fracbackend" in text:  # Ray's RaySystemError has it too
        text += ". Install ray_fracbackend on every node, or ship its folder with runtime_env={'py_modules': [PATH]}"
    return text


def as_engine_error(error: BaseException, worker_group: WorkerGroup) -> BaseException:
    """Convert a dead worker's error into the class on which V2 restarts the workers; return others unchanged.

    As with TorchConfig, V2 does not restart them if Ray's memory monitor killed one. V1 loses an error of that class: its
    trial does not restart and raises None (BackendExecutor.start and _increment_failures, 2.40 to 2.60). Tune restarts the
    trial after any other error, according to FailureConfig.
    """
    if not isinstance(error, WorkerDiedError) or error.kind == "killed_for_memory" or is_v1(worker_group):
        return error
    lost = LostWorkerError(error.args[0])
    lost.__dict__.update(vars(error), advice=f"{error.advice} {advise('restarts')}")
    lost.__cause__ = error
    return lost
