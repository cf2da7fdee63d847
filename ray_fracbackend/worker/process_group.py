"""Start of one worker: environment, device, process group, verification. Runs on the worker."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    DebugLevel,
    PrefixStore,
    distributed_c10d,
    get_debug_level,
)

from ray_fracbackend import _ray
from ray_fracbackend.decide.nccl import cause_of, refusal_in, refused_ranks
from ray_fracbackend.decide.plan import WorkerPlan
from ray_fracbackend.decide.rendezvous import IFNAME
from ray_fracbackend.errors import (
    FracBackendError,
    GroupFormationError,
    RendezvousError,
    SharedDeviceError,
    VerificationError,
)
from ray_fracbackend.timeouts import bounded
from ray_fracbackend.tracebacks import release_frames
from ray_fracbackend.verify import VerificationResult, backends_by_device, other_devices, verify_process_group
from ray_fracbackend.worker import environment, memory_cap, store
from ray_fracbackend.worker.network import check_gloo_device, route_interface
from ray_fracbackend.worker.state import publish_report

# Time past the deadline for c10d and Gloo to raise their own timeout; the driver waits longer for the result.
_SILENCE_S = 1.0
# For a failed group to be aborted.
_ABORT_S = 5.0


def start_worker(plan: WorkerPlan) -> VerificationResult | None:
    """Initialize this worker's process group. On failure the group is destroyed and os.environ restored.

    Args:
        plan: The worker's plan.

    Returns:
        The verification figures, None where verification was not asked for.

    Raises:
        RendezvousError: The group did not form within ``budget_s``.
        VerificationError: The group formed and does not work, or does not use the device memory that it was chosen for.
    """
    deadline = time.monotonic() + plan.budget_s
    before = environment.snapshot()
    try:
        stop_worker()  # what a failed attempt in this process may have left
        environment.clear()
        with environment.during(plan.rendezvous.start_env):
            _prepare(plan)
            _check_network(plan, deadline)
            _init_process_group(plan, deadline)
            result = _verify(plan, deadline) if plan.verify else None
            _set_group_timeout(plan)
        publish_report(plan.report, result)
        return result
    except BaseException as error:
        release_frames(error)  # a group that is still referenced keeps its peers waiting
        stop_worker(failed=True)
        memory_cap.set_cap(None)
        environment.restore(before)
        raise
    finally:
        store.release_store()


def start_worker_of_many(plan: WorkerPlan) -> VerificationResult | None:
    """Run ``start_worker`` and return the result, equal on all ranks, from rank 0 alone.

    It has a time for each rank, so from N ranks it would be N * N.
    """
    result = start_worker(plan)
    return result if plan.rank == 0 else None


def _verify(plan: WorkerPlan, deadline: float) -> VerificationResult:
    """Verify the device that the worker trains on; a pair such as ``cpu:gloo,cuda:nccl`` is verified in both halves."""
    for device in other_devices(plan.device):
        verify_process_group(device=device, timeout_s=_left_s(deadline))
    result = verify_process_group(device=plan.device, timeout_s=_left_s(deadline))
    _check_memory(plan)
    return result


def _check_memory(plan: WorkerPlan) -> None:
    """Raise for an ipc group whose ranks cannot map each other's device memory: it would work over Gloo, against the plan."""
    if not plan.backends.has_ipc or plan.device == "cpu":
        return
    group: Any = distributed_c10d._get_default_group()
    reason = group.gloo_reason
    if reason is not None:
        raise VerificationError(
            f"the ipc backend cannot use the memory of {plan.device}: {reason}. Fix this, or use "
            "on_shared_device='gloo'."
        )


def stop_worker(*, failed: bool = False) -> None:
    """Destroy the default process group in any state; peers that wait in it get an error at once.

    Args:
        failed: A collective may still be running. Destroying an NCCL group would wait for it, so all but Gloo is aborted
            instead.
    """
    if not dist.is_initialized():
        # torch puts its count of groups into the store's keys and does not decrease it after a failure: the ranks of the
        # next start would wait under different keys.
        distributed_c10d._world.group_count = 0
        return
    try:
        if failed and set(backends_by_device().values()) != {"gloo"}:
            bounded(_abort_process_group, _ABORT_S)
        else:
            dist.destroy_process_group()
    except (RuntimeError, TimeoutError) as error:
        _ray.logger.debug("the failed process group did not close cleanly: %s", error)


def _abort_process_group() -> None:
    # torch before 2.6 has no such function; destroying aborts NCCL there.
    abort = getattr(distributed_c10d, "_abort_process_group", dist.destroy_process_group)
    try:
        abort()
    except RuntimeError:  # a backend that cannot be aborted, such as the Gloo of a pair
        dist.destroy_process_group()


def _prepare(plan: WorkerPlan) -> None:
    environment.set_default(plan.env_defaults)
    environment.set_always(plan.rendezvous.env)
    if plan.rendezvous.interface_by_route:
        interface = route_interface(plan.rendezvous.master_addr)
        environment.set_default({IFNAME: interface} if interface else {})
    if plan.train_on_cpu:
        _ray.train_on_cpu()
    if plan.set_distributed_env:
        _ray.set_torch_distributed_env()
    if plan.backends.has_nccl and "TORCH_NCCL_BLOCKING_WAIT" not in os.environ:
        # As stock: a collective that times out must end the process instead of hanging it.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    memory_cap.set_cap(plan.memory_fraction, plan.device)


def _check_network(plan: WorkerPlan, deadline: float) -> None:
    """Check Gloo's device and rank 0's store within seconds; torch would find a fault after half an hour or never."""
    rendezvous = plan.rendezvous
    if rendezvous.check_device:
        check_gloo_device(os.environ.get(IFNAME))
    if rendezvous.check_reachable:
        store.check_reachable(rendezvous.master_addr, rendezvous.master_port, min(store.REACH_S, _left_s(deadline)))


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _init_process_group(plan: WorkerPlan, deadline: float) -> None:
    """Create the group on rank 0's store, in threads: torch's store client waits without a limit for a silent store."""
    if plan.backends.has_ipc:
        import ray_fracbackend.ipc  # noqa: F401  registers the backend
    address, port = plan.rendezvous.master_addr, plan.rendezvous.master_port
    with _named("rendezvous", plan):
        left_s = _left_s(deadline)
        connect = partial(store.connect_store, plan.rank, plan.world_size, address, port, left_s)
        common = bounded(connect, left_s + _SILENCE_S)
    with _named(f"creating the {plan.backend} process group", plan, GroupFormationError):
        left_s = _left_s(deadline)
        group_s = left_s if _connects_at_init(plan) else plan.timeout_s
        common.set_timeout(timedelta(seconds=left_s))
        create = partial(
            dist.init_process_group,
            plan.backend,
            # The same prefix as init_process_group puts before a store that it makes itself.
            store=PrefixStore("default_pg", common),
            rank=plan.rank,
            world_size=plan.world_size,
            timeout=timedelta(seconds=group_s),
        )
        bounded(create, left_s + _SILENCE_S)
    common.set_timeout(timedelta(seconds=plan.timeout_s))


def _connects_at_init(plan: WorkerPlan) -> bool:
    """Return whether the group is created with the start's timeout and gets its own afterwards.

    Gloo connects all ranks when the group is made; NCCL does it in the first collective, where the verification is the bound.
    Under TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps Gloo and NCCL in a group whose timeout cannot be changed later.
    """
    return plan.backends.has_ipc or (plan.backends.connects_with_gloo and get_debug_level() != DebugLevel.DETAIL)


def _set_group_timeout(plan: WorkerPlan) -> None:
    timeout = timedelta(seconds=plan.timeout_s)
    if plan.backends.has_ipc:
        distributed_c10d._get_default_group().set_timeout(timeout)
    elif _connects_at_init(plan):
        distributed_c10d._set_pg_timeout(timeout)


def _advice(plan: WorkerPlan, error: Exception) -> str:
    if isinstance(error, TimeoutError):  # of bounded(): c10d's own are of another class
        return "Rank 0 hangs, the network to it is cut, or another rank did not connect: look at that process and at the nodes."
    if not plan.backends.connects_with_gloo:
        return "Check that every node reaches that address and port."
    interface = os.environ.get(IFNAME)
    over = f"over {interface}" if interface else "over the address of its host name"
    return (
        f"Gloo connects every pair of ranks on random ports, on this node {over}: check that all nodes pass them, or set "
        f"{IFNAME} to an interface that the others reach."
    )


@contextmanager
def _named(step: str, plan: WorkerPlan, kind: type[RendezvousError] = RendezvousError) -> Iterator[None]:
    try:
        yield
    except FracBackendError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        sentence = refusal_in(str(error))
        if sentence:
            raise SharedDeviceError(
                f"NCCL refused ranks that share a GPU: {sentence}", ranks=refused_ranks(sentence)
            ) from error
        where = f"{plan.rendezvous.master_addr}:{plan.rendezvous.master_port}"
        raise kind(
            f"{step} at {where} failed ({cause_of(error)}). {_advice(plan, error)}",
            ranks=(plan.rank,),
        ) from error
