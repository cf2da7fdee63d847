"""The failing starts, one list for both engines of Ray Train, and what the engine has to do in each."""

from __future__ import annotations

from dataclasses import dataclass

# Steps of a start on a worker, in their order.
STEPS = ("probe", "store", "connect", "create", "verify")
# Faults after which a worker's process is gone; V2 restarts the workers.
LOST = ("kill", "node")
# Faults of the package on the node of a worker.
PACKAGES = ("other version", "no package")
# Hooks of V2's callbacks, in the order in which a failing start reaches them.
V2_HOOKS = (
    "after_controller_state_update",
    "on_controller_start_worker_group",
    "on_worker_group_start",
    "before_worker_group_start",
    "before_init_train_context",
    "after_worker_group_start",
    "before_worker_group_abort",
    "after_worker_group_abort",
    "before_worker_group_shutdown",
    "before_controller_execute_failure_decision",
    "before_controller_shutdown",
    "after_controller_finish",
)
# Hooks of Tune's callbacks, which run in the driver.
V1_HOOKS = ("on_trial_start", "on_trial_error", "on_experiment_end")
# Hooks whose own error takes the place of the start's in the error of fit().
HIDING_HOOKS = ("before_controller_execute_failure_decision", "on_experiment_end")


@dataclass(frozen=True)
class Case:
    """One run of two workers with a fault.

    Attributes:
        fault: What happens to rank 1: ``kill``, ``stop``, ``raise``, ``hang``, ``wrong`` (a wrong sum), ``memory`` (it allocates until Ray
            kills a worker), ``node`` (its node is lost), or nothing. ``port``: another process has master_port. ``device``: half a GPU and no
            CUDA. ``other version`` and ``no package``: of this package on the node of rank 1.
        step: One of STEPS, ``train`` or ``shutdown``.
        ray: The Ray that runs it, one of ``driver.RAYS``.
        backend: Backend of the configuration.
        is_lasting: Whether every start has the fault, not only the first one.
        max_failures: Of FailureConfig.
        controller_failure_limit: Of FailureConfig, V2 only.
        is_elastic: One or two workers.
        is_repeated: Whether a run that failed is started again: with Tuner.restore, in V2 as a run of the same name.
        hook: Hook of a user's callback that raises.
        is_first: Whether that callback is registered before ours.
    """

    fault: str
    step: str = "connect"
    ray: str = "one node"
    backend: str = "gloo"
    is_lasting: bool = False
    max_failures: int = 0
    controller_failure_limit: int = -1
    is_elastic: bool = False
    is_repeated: bool = False
    hook: str = ""
    is_first: bool = False

    @property
    def conditions(self) -> str:
        """What differs from a run with the defaults."""
        found = [self.backend] if self.backend != "gloo" else []
        found += [self.ray] if self.ray in ("two nodes", "state tracking") else []
        found += ["every start"] if self.is_lasting else []
        found += [f"max_failures={self.max_failures}"] if self.max_failures else []
        found += (
            [f"controller_failure_limit={self.controller_failure_limit}"] if self.controller_failure_limit >= 0 else []
        )
        found += ["num_workers=(1, 2)"] if self.is_elastic else []
        found += ["started again"] if self.is_repeated else []
        found += [f"{self.hook} raises, {'before' if self.is_first else 'after'} ours"] if self.hook else []
        return ", ".join(found)

    def why_not(self, engine: str) -> str | None:
        """Return why the engine cannot have this case, None if it can."""
        if engine == "V1":
            if self.hook in V2_HOOKS:
                return "a hook of V2"
            if self.controller_failure_limit >= 0:
                return "V1 has no such limit"
            return "V1 has no elastic groups" if self.is_elastic else None
        return "a hook of Tune" if self.hook in V1_HOOKS else None

    def num_starts(self, engine: str) -> int:
        """Return how many starts the engine has to make: V1 counts every failure; V2 restarts lost workers, by default without a limit."""
        limit: float = self.max_failures
        if engine == "V2":
            unlimited = self.controller_failure_limit < 0
            limit = 0 if self.fault not in LOST else float("inf") if unlimited else self.controller_failure_limit
        return int(min(1 + limit, float("inf") if self.is_lasting else 2))

    def ends_well(self, engine: str) -> bool:
        """Return whether a failing start is followed by one without a fault."""
        return not self.is_lasting and self.num_starts(engine) > 1


def cases() -> list[Case]:
    """Return every case."""
    found = [Case(fault, step) for step in STEPS for fault in ("kill", "stop", "raise")]
    found += [Case("hang", step) for step in ("create", "verify")]
    found += [Case("wrong", "verify"), Case("wrong", "verify", backend="ipc")]
    found += [Case("port", "probe"), Case("device", "probe")]
    found += [
        Case("raise", max_failures=2),
        Case("raise", is_lasting=True, max_failures=2),
        Case("kill", max_failures=2),
        Case("kill", is_lasting=True, controller_failure_limit=1),
        Case("raise", is_repeated=True),
    ]
    found += [Case("raise", hook=hook) for hook in V1_HOOKS]
    found += [Case("raise", hook=hook) for hook in V2_HOOKS]
    found += [
        Case("raise", hook=hook, is_first=True) for hook in V2_HOOKS[V2_HOOKS.index("after_worker_group_start") :]
    ]
    found += [Case("", "after it", hook="after_worker_group_start")]
    found += [Case(fault, "train") for fault in ("kill", "stop", "raise", "hang")]
    found += [Case("stop", "train", backend="ipc"), Case("kill", "shutdown"), Case("raise", "shutdown")]
    found += [Case(fault, ray="state tracking") for fault in ("kill", "raise")]
    found += [
        Case("raise", ray="state tracking", hook="after_worker_group_abort", is_first=first) for first in (True, False)
    ]
    found += [Case("memory", ray="little memory")]
    found += [Case("other version", "probe", ray="other version"), Case("no package", "probe", ray="no package")]
    found += [Case("node", step, ray="two nodes") for step in ("connect", "verify")]
    return [*found, Case("node", ray="two nodes", is_elastic=True)]
