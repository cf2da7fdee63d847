"""Run a function as the ranks of an ipc or staged group, in real processes with a time limit."""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ray_fracbackend.worker.store import open_store
from tests.processes import Outcome, run_each

# Device of the tensors that a rank passes to collectives.
DEVICE_ENV_VAR = "IPC_TEST_DEVICE"
# Backend of the group that a rank creates: ipc or staged.
BACKEND_ENV_VAR = "IPC_TEST_BACKEND"

_WINDOWS = sys.platform == "win32"


def open_local_store() -> dist.TCPStore:
    """Create a store that listens only on loopback; the hosts file has its peers' names, so no name server is used."""
    return open_store(host="127.0.0.1")


def rank_device() -> torch.device:
    return torch.device(os.environ.get(DEVICE_ENV_VAR, "cpu"))


def rank_backend() -> str:
    return os.environ.get(BACKEND_ENV_VAR, "ipc")


@dataclass(frozen=True)
class Job:
    """One rank's parameters of a run, for `init`."""

    rank: int
    size: int
    port: int
    timeout_s: float

    def store(self) -> dist.TCPStore:
        return dist.TCPStore(
            "127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=60), use_libuv=not _WINDOWS
        )

    def init(self, backend: str | None = None, **options: Any) -> None:
        """Call ``init_process_group`` with a store that outlives every rank; by default for the backend of the run."""
        torch.set_num_threads(1)
        limit = timedelta(seconds=self.timeout_s)
        options = {"store": self.store(), "rank": self.rank, "world_size": self.size, "timeout": limit, **options}
        dist.init_process_group(backend or rank_backend(), **options)


def _as_rank(function: Callable[..., Any], job: Job, args: tuple[Any, ...], env: Mapping[str, str]) -> Any:
    faulthandler.enable()
    os.environ.update({**({} if _WINDOWS else {"GLOO_SOCKET_IFNAME": "lo"}), **env})
    if (seed := os.environ.get("FAKE_CUDA_SEED")) is not None:
        import fake_cuda

        fake_cuda.install(int(seed) + job.rank)
    return function(job, *args)


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    limit_s: float = 120.0,
    timeout_s: float = 30.0,
    env: Mapping[str, str] | Callable[[int], Mapping[str, str]] = {},  # noqa: B006 (read only)
    needed: int | None = None,
    fresh: bool = False,
) -> list[Outcome]:
    """Run ``function(job, *args)`` in `size` processes; kill the rest after `limit_s` seconds.

    Args:
        function: Function at module level, so it can be pickled.
        size: Number of processes.
        args: Further arguments, equal for all.
        limit_s: As in `run_each`.
        timeout_s: Collective timeout of the process group that `Job.init` creates.
        env: Environment variables, for all ranks or by rank.
        needed: Wait only for this number of first ranks, then kill the rest.
        fresh: Start new interpreters, which have the variables before torch is imported.
    """
    store = open_local_store()
    variables = [dict(env(rank) if callable(env) else env) for rank in range(size)]
    calls = [(function, Job(rank, size, store.port, timeout_s), args, variables[rank]) for rank in range(size)]
    ranks = range(size if needed is None else needed)
    return run_each(_as_rank, calls, limit_s, needed=ranks, fresh=variables if fresh else None)


def values(outcomes: list[Outcome]) -> list[Any]:
    """Return the values of a run in which every rank must return."""
    # All of them, because the first one is often only a consequence.
    failed = [
        f"rank {outcome.rank}: exit {outcome.exitcode} after {outcome.seconds:.1f} s, {outcome.error!r}\n{outcome.trace}"
        for outcome in outcomes
        if not outcome.returned
    ]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]


def on_ranks(size: int | None = None, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that every rank of a run calls with its `Job`, and that asserts there.

    Args:
        size: Number of ranks; by default the parameter ``size`` of the test.
        options: As for `run_ranks`; a callable ``env`` also gets the parameters of the test.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def test(**parameters: Any) -> None:
            num_ranks, env = size or parameters["size"], options.get("env", {})
            more = {**options, "env": (lambda rank: env(rank, **parameters)) if callable(env) else env}
            # By name, because pickle finds the test in place of the function.
            outcomes = run_ranks(_run_test, num_ranks, function.__module__, function.__name__, parameters, **more)
            values(outcomes[: options.get("needed", num_ranks)])

        test.__name__, test.__doc__, test.__module__ = function.__name__, function.__doc__, function.__module__
        signature = inspect.signature(function)
        test.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
        test.on_rank = function  # type: ignore[attr-defined]
        return test

    return decorate


def _run_test(job: Job, module: str, name: str, parameters: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).on_rank(job, **parameters)
