"""What training libraries are told by environment variables."""

from ray_fracbackend.libraries import library_env
from ray_fracbackend.options import StartOptions
from ray_fracbackend.plan import plan_start
from tests.unit.builders import gpu, job


def env(workers, **options):
    """The variables of the last worker of a job."""
    return dict(library_env(workers[-1], plan_start(workers, StartOptions(**options))))


def test_accelerate_on_a_shared_device():
    """Ranks that share a device: Accelerate must not take LOCAL_RANK for its index."""
    assert env(job(gpu(), gpu())) == {"ACCELERATE_BYPASS_DEVICE_MAP": "true"}


def test_accelerate_where_gpus_are_missing():
    """GPU workers that train on the CPU: Accelerate must be told, or it is not distributed at all."""
    workers = job(None, None, resources={"GPU": 0.5}, cuda_missing="no driver")
    assert env(workers, on_missing_cuda="cpu") == {"ACCELERATE_USE_CPU": "true"}


def test_nothing_where_nothing_differs_from_stock():
    """CPU workers and workers with devices of their own have the environment of stock Ray Train."""
    assert env(job(None, None)) == {}
    assert env(job(gpu("a"), gpu("b", index=1), num_visible_devices=2)) == {}
