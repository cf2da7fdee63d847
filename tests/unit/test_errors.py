"""Errors cross processes whole."""

import pickle

import pytest
from ray.exceptions import RayActorError

from ray_fracbackend import errors
from ray_fracbackend.gather import WorkerDiedError

_ALL = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RuntimeError)]


@pytest.mark.parametrize("cls", [*_ALL, WorkerDiedError], ids=lambda cls: cls.__name__)
def test_pickle(cls):
    """Type, message, ranks and reason survive pickling, as between worker and driver."""
    error = pickle.loads(pickle.dumps(cls("what happened", ranks=[3, 1])))
    assert (type(error), str(error), error.ranks, error.reason) == (cls, "what happened", (1, 3), cls.reason)


def test_reasons_are_distinct():
    """A machine can tell the errors apart by their reason."""
    assert len({cls.reason for cls in _ALL}) == len(_ALL)


def test_a_dead_worker_is_a_ray_actor_error():
    """Ray Train restarts workers on RayActorError only."""
    assert isinstance(WorkerDiedError("gone"), RayActorError)
