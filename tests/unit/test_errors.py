"""Errors cross processes with all their attributes."""

import gc
import pickle
import weakref
from types import SimpleNamespace

import pytest
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.train._internal.worker_group import WorkerGroup

from ray_fracbackend import errors
from ray_fracbackend.errors import VerificationError
from ray_fracbackend.start.failure.merge import LostWorkerError, as_engine_error

_ALL = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RuntimeError)]


@pytest.mark.parametrize("cls", [*_ALL, LostWorkerError], ids=lambda cls: cls.__name__)
def test_pickle(cls):
    """Type, message, ranks and reason survive pickling, as between worker and driver."""
    error = pickle.loads(pickle.dumps(cls("what happened", ranks=[3, 1])))
    assert (type(error), str(error), error.ranks, error.reason) == (cls, "what happened", (1, 3), cls.reason)


def test_fields_cross_processes():
    """The driver reads them instead of the message, adds what it knows, and the text is made of all of them."""
    error = VerificationError(
        "barrier failed (no answer).", advice="Look.", ranks=[1], kind="stalled", step="barrier", cause="no answer"
    )
    assert str(error) == "barrier failed (no answer). Look."
    error.faults, error.warnings, error.report = "no answer from rank 1", ("doubt one", "doubt two"), "/runs/a.json"
    found = pickle.loads(pickle.dumps(error))
    assert vars(found) == vars(error)
    assert (found.found, found.ranks, found.kind) == ("barrier failed (no answer)", (1,), "stalled")
    assert str(found).splitlines() == [
        "barrier failed (no answer). Look. Search for the fault: no answer from rank 1.",
        "warning before this error: doubt one",
        "warning before this error: doubt two",
        "report of this start: /runs/a.json",
    ]
    assert VerificationError("x").kind == "verification"


def test_pickle_as_an_error_of_a_task():
    """Ray's version of an error that a task raised can be pickled too; up to Ray 2.40 by the error's own rule."""

    class AsInTask(RayError, errors.MissingDeviceError):
        def __init__(self, cause):
            self.cause = cause
            self.args = (cause,)

        def __str__(self):
            return f"in a task: {self.cause}"

    error = pickle.loads(cloudpickle.dumps(AsInTask(errors.MissingDeviceError("no device", ranks=[2]))))
    assert isinstance(error, errors.MissingDeviceError)
    assert (str(error), error.cause.ranks) == ("in a task: no device", (2,))
    in_task = RayTaskError("f", "traceback", errors.MissingDeviceError("no device", ranks=[2])).as_instanceof_cause()
    assert pickle.loads(cloudpickle.dumps(in_task)).ranks == (2,)


def test_reasons_are_distinct():
    assert len({cls.reason for cls in _ALL}) == len(_ALL)


@pytest.mark.parametrize(
    ("worker_group", "restarts"),
    [(SimpleNamespace(get_workers=list), True), (WorkerGroup.__new__(WorkerGroup), False)],
    ids=["V2", "V1"],
)
def test_a_dead_worker(worker_group, restarts):
    """V2 restarts the workers of a start on a RayActorError only; V1 would lose that one, so there it is none."""
    died = errors.WorkerDiedError("gone.", advice="Look.", ranks=[1], step="starting gloo", cause="killed")
    died.report = "/runs/a.json"
    with pytest.raises(errors.WorkerDiedError, match="gone") as caught:
        fail(died, worker_group)
    assert isinstance(caught.value, RayActorError) == restarts
    found = pickle.loads(pickle.dumps(caught.value))
    then = " Ray Train starts the workers again, up to FailureConfig(controller_failure_limit=...) times, by default without a limit."
    assert str(found) == f"gone. Look.{then if restarts else ''}\nreport of this start: /runs/a.json"
    assert (found.ranks, found.step, found.cause, found.found) == ((1,), "starting gloo", "killed", "gone")


def fail(found, worker_group):
    """Raise an error as on_start does."""
    try:
        raise found
    except BaseException as error:
        raise as_engine_error(error, worker_group)  # noqa: B904
    finally:
        del found


@pytest.mark.parametrize("cls", [errors.WorkerDiedError, errors.RendezvousError])
def test_a_failed_start_is_freed_at_once(cls):
    """The error references no frame that references the error; otherwise the worker group would wait for a garbage collection."""
    gc.disable()
    try:
        try:
            fail(cls("the reason"), SimpleNamespace(get_workers=list))
        except errors.FracBackendError as error:
            seen = weakref.ref(error)
        assert seen() is None
    finally:
        gc.enable()
