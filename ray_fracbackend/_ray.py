"""All uses of private Ray names; no other module imports one.

Each function imports the private names that it uses. A Ray release without one of them breaks only that function, with
an ImportError that names it, and not ``import ray_fracbackend``. Checked against Ray 2.40 (first supported; V1 engine
only), 2.48 and 2.60 (V1 and V2 engines). The calls of ``_private`` have the imported names, with the first release that has
them. Attributes of objects that Ray passes in need no import:

==============================================  ====================================================================
V1 worker groups                                ``.workers``, ``.num_gpus_per_worker``, ``._remote_cls``, and no
                                                ``.get_workers``, which those of V2 have
V2 worker groups                                ``.get_workers()``, ``._worker_group_state``, ``._clear_state()``,
                                                ``._worker_group_context``, ``._storage_context``, ``._callbacks``
V2's StateManagerCallback                       ``._state_manager``, ``._run_id``
workers of both                                 ``.metadata``, ``.actor``
``TorchTrainer``                                ``._param_dict`` (V1), 2.40 to 2.60; ``._register_sigint_handler`` (V2),
                                                2.48 to 2.60
==============================================  ====================================================================
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import ray
import ray.tune  # public; Ray would import it during a start, at a worker's first get_device()

from ray_fracbackend.decide.worker_info import WorkerAddress
from ray_fracbackend.log import logger

if TYPE_CHECKING:
    import torch


class WorkerGroup(Protocol):
    """What a start uses of a worker group of Ray Train, V1 or V2."""

    def execute_async(self, function: Callable[..., Any], *arguments: Any) -> list[ray.ObjectRef[Any]]:
        """Start a function on all workers, and return a reference to each result, by rank."""

    def execute_single_async(self, rank: int, function: Callable[..., Any], *arguments: Any) -> ray.ObjectRef[Any]:
        """Start a function on one worker, and return a reference to its result."""


_NEWEST_CHECKED = "2.60"
# A worker that does not answer a call within this time is still in the failed start.
_BUSY_S = 2.0


def _private(module: str, *names: str, by: str, since: str = "2.40") -> Any:
    """Import a private module of Ray with these names. Call it only with literals, because ci/canary.py reads them.

    Args:
        module: The module.
        *names: Names of the module that are used.
        by: Name of the calling function.
        since: First supported Ray version that has the names.

    Raises:
        ImportError: This Ray has no such module, or the module lacks one of the names.
    """
    missing = names[0]
    try:
        found = importlib.import_module(module)
        for missing in names:
            getattr(found, missing)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ImportError) and not (error.name or "").startswith("ray."):
            raise  # a package that Ray needs is not installed
        raise ImportError(
            f"Ray {ray.__version__} has no {module}.{missing}, which {by}() of ray_fracbackend/_ray.py needs. Checked with Ray "
            f"{since} to {_NEWEST_CHECKED}: install one of these, or a ray-fracbackend that supports this Ray.",
            name=module,
        ) from error
    return found


def is_v1(worker_group: Any) -> bool:
    """Return True for V1's worker groups, False for V2's; imports no class of V1."""
    return not hasattr(worker_group, "get_workers")


def _workers(worker_group: Any) -> list[Any]:
    return list(worker_group.workers if is_v1(worker_group) else worker_group.get_workers())


def worker_addresses(worker_group: Any) -> list[WorkerAddress]:
    """Return the addresses of all workers of a V1 or V2 worker group, by rank."""
    found = enumerate(worker.metadata for worker in _workers(worker_group))
    return [WorkerAddress(rank, worker.node_ip, worker.pid, worker.node_id) for rank, worker in found]


def resources_per_worker(worker_group: Any) -> Mapping[str, float]:
    """Return the resources that every worker of the group has reserved, without a call to a worker."""
    if hasattr(worker_group, "get_resources_per_worker"):
        resources: Mapping[str, float] = worker_group.get_resources_per_worker()
        return resources
    if is_v1(worker_group):  # before Ray 2.49
        return {"GPU": worker_group.num_gpus_per_worker, **worker_group._remote_cls._default_options["resources"]}
    return dict(_workers(worker_group)[0].resources)


def release_workers(worker_group: Any, error: BaseException) -> None:
    """End the workers of a V2 group whose start failed, and V1 workers that are still busy with the failed start.

    After an exception in ``on_start`` V2 drops its reference to the new group, but the workers and the placement group
    stay (WorkerGroup.create and _start, 2.48 to 2.60). V1 ends its workers itself, after a graceful shutdown that waits
    30 s for a hanging worker (BackendExecutor.shutdown, 2.40 to 2.60).

    Args:
        worker_group: The group.
        error: Why the start failed, for Ray's record of the attempt.
    """
    _logged(_end_busy_workers, worker_group)
    state = getattr(worker_group, "_worker_group_state", None)  # V2's
    if state is None:
        return
    context, callbacks = worker_group._worker_group_context, worker_group._callbacks
    _logged(state.shutdown)
    _logged(worker_group._clear_state)
    # The callbacks' own starts may not have run, so WorkerGroup.abort would often fail before it ends the workers.
    for callback in callbacks:
        if hasattr(callback, "after_worker_group_abort"):  # of Ray's data executors and preemption watcher, for example
            _logged(callback.after_worker_group_abort, context)
        _logged(_record_error, callback, context, error)


def _logged(step: Callable[..., None], *arguments: Any) -> None:
    """Run a step of the release; the start's own error is the one to report, and the next step runs anyway."""
    try:
        step(*arguments)
    except Exception as error:
        logger.warning("releasing the workers of the failed start: %s: %s", type(error).__name__, error)


def _record_error(callback: Any, context: Any, error: BaseException) -> None:
    """Record in Ray's state of the run, if it is tracked, that the attempt failed and why."""
    manager = getattr(callback, "_state_manager", None)
    if manager is not None:
        manager.update_train_run_attempt_errored(callback._run_id, context.run_attempt_id, str(error))


def _end_busy_workers(worker_group: Any) -> None:
    """Kill the workers that are still in the failed start: neither engine waits for a dead worker."""
    answers = worker_group.execute_async(os.getpid)
    _, busy = ray.wait(answers, num_returns=len(answers), timeout=_BUSY_S)
    for worker, answer in zip(_workers(worker_group), answers, strict=True):
        if answer in busy:
            ray.kill(worker.actor)


def set_torch_distributed_env() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, ... as stock Ray Train does. On the worker."""
    _private(
        "ray.train.torch.config", "_set_torch_distributed_env_vars", by="set_torch_distributed_env"
    )._set_torch_distributed_env_vars()


def send_token() -> None:
    """Let this process send the user's token, if there is one, as ``ray.init("auto")`` does; to an address Ray sends none by default."""
    _private(
        "ray._private.authentication.authentication_token_setup",
        "maybe_enable_token_auth_if_token_available",
        by="send_token",
        since="2.60",
    ).maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def worker_devices() -> list[torch.device]:
    """Return the devices that ``ray.train.torch.get_devices()`` will return in this worker's train function."""
    return list(_private("ray.air._internal.torch_utils", "get_devices", by="worker_devices").get_devices())


def train_on_cpu() -> None:
    """Make ``ray.train.torch.get_device()`` and ``prepare_model`` use the CPU in this worker."""
    manager = _private(
        "ray.air._internal.device_manager",
        "CPUTorchDeviceManager",
        "_torch_device_manager",
        "_torch_device_manager_lock",
        by="train_on_cpu",
    )
    with manager._torch_device_manager_lock:
        manager._torch_device_manager = manager.CPUTorchDeviceManager()


def wrap_checkpoint_copies(call: Callable[[str, Callable[[], Any]], Any]) -> None:
    """Let a function make Ray Train's copies of files to a local folder in this process. A second call does nothing.

    Args:
        call: Called with the destination folder and the copy.
    """
    if v2_enabled():
        storage = _private(
            "ray.train.v2._internal.execution.storage",
            "_pyarrow_fs_copy_files",
            by="wrap_checkpoint_copies",
            since="2.48",
        )
    else:
        storage = _private("ray.train._internal.storage", "_pyarrow_fs_copy_files", by="wrap_checkpoint_copies")
    copy_files = storage._pyarrow_fs_copy_files
    if not hasattr(copy_files, "__wrapped__"):
        storage._pyarrow_fs_copy_files = _called_by(call, copy_files)


def _called_by(call: Callable[[str, Callable[[], Any]], Any], copy_files: Callable[..., Any]) -> Any:
    @functools.wraps(copy_files)
    def copy(
        source: str, destination: str, source_filesystem: Any = None, destination_filesystem: Any = None, **options: Any
    ) -> Any:
        run = functools.partial(copy_files, source, destination, source_filesystem, destination_filesystem, **options)
        is_local = getattr(destination_filesystem, "type_name", None) == "local"
        return call(destination, run) if is_local else run()

    return copy


def keep_torch_config(trainer: Any, config: Any) -> None:
    """Make V1 use this configuration also when it builds the trainer again in its trial.

    V1 builds the trainer there from the arguments of the first one (BaseTrainer.__new__).
    """
    arguments = getattr(trainer, "_param_dict", None)
    if arguments is not None:
        arguments["torch_config"] = config


def leave_sigint_to_python(trainer_class: type) -> None:
    """Make Ctrl-C raise KeyboardInterrupt also while a trainer runs.

    V2 sets a handler for each run. It waits without a limit for the controller, which does not answer while it waits for
    resources, and then exits with code 0 or 1 (DataParallelTrainer._register_sigint_handler, 2.60). V1 leaves SIGINT to
    Tune, which ends the run, and the script continues.
    """
    if v2_enabled():
        trainer_class._register_sigint_handler = lambda self, controller: None  # type: ignore[attr-defined]
    else:
        os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")


def started_here() -> bool:
    """Return True if this process started the Ray that it uses, False if it connected to a running one."""
    node = _private("ray._private.worker", "_global_node", by="started_here")._global_node
    return node is not None and bool(node.is_head())


def v2_enabled() -> bool:
    """Return True if ``ray.train.torch.TorchTrainer`` is that of the V2 engine."""
    return hasattr(ray.train, "UserCallback")


def worker_group_callback_class() -> type:
    """Return V2's base class of worker group callbacks."""
    execution = _private(
        "ray.train.v2._internal.execution.callback",
        "WorkerGroupCallback",
        by="worker_group_callback_class",
        since="2.48",
    )
    base: type = execution.WorkerGroupCallback
    return base


def run_name(worker_group: Any) -> str:
    """Return the name of the run of a V2 worker group, as in RunConfig; empty for a group without a run."""
    folder = results_folder(worker_group)
    return os.path.basename(folder[1]) if folder is not None else ""


def replace_backend_config(worker_group: Any, replace: Callable[[Any], Any]) -> None:
    """Replace the backend configuration of a V2 worker group.

    Args:
        worker_group: A V2 group whose backend has not started.
        replace: Returns the configuration to use instead of the current one; if it returns the same object, nothing
            changes.
    """
    callbacks = _private(
        "ray.train.v2._internal.callbacks", "BackendSetupCallback", by="replace_backend_config", since="2.48"
    )
    for callback in worker_group._callbacks:
        if isinstance(callback, callbacks.BackendSetupCallback):
            config = replace(callback._backend_config)
            if config is not callback._backend_config:
                callback._backend_config, callback._backend = config, config.backend_cls()


@contextmanager
def learner_backend_config(config: Any) -> Iterator[None]:
    """Use this configuration for RLlib's torch learners that this process starts inside the context."""
    learner_group = _private("ray.rllib.core.learner.learner_group", "_get_backend_config", by="learner_backend_config")
    original = learner_group._get_backend_config
    learner_group._get_backend_config = lambda learner_class: (
        config if learner_class.framework == "torch" else original(learner_class)
    )
    try:
        yield
    finally:
        learner_group._get_backend_config = original


def results_folder(worker_group: Any) -> tuple[Any, str] | None:
    """Return file system and folder of the run's results, as in ``Result.path``; None for a group without a run.

    V2 calls ``on_start`` in its controller, and the worker group has the storage. V1 calls it in the trial, and
    there the session has the storage.
    """
    storage = getattr(worker_group, "_storage_context", None)
    if storage is not None:
        return storage.storage_filesystem, storage.experiment_fs_path
    if not is_v1(worker_group):
        return None
    session = _private("ray.train._internal.session", "get_session", by="results_folder").get_session()
    storage = getattr(session, "storage", None)
    return (storage.storage_filesystem, storage.trial_fs_path) if storage is not None else None
