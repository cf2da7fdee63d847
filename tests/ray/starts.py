"""Starts on real workers, the train function's view of them, and workers that fail at a chosen place."""

from __future__ import annotations

import os

import ray.train
from ray.train.base_trainer import TrainingFailedError as V1TrainingFailedError

from ray_fracbackend import FracTorchConfig
from ray_fracbackend.start.backend import FracTorchBackend

# Errors of fit() by engine.
TRAINING_FAILED = (V1TrainingFailedError, getattr(ray.train, "TrainingFailedError", V1TrainingFailedError))
# Enough for a rendezvous on a busy machine; a hanging one takes this long.
START_S = 8.0


def causes(error):
    """Return the messages of an error and all its causes: the V1 engine keeps the cause separate."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(texts)


def start(group, **settings):
    FracTorchBackend().on_start(group, FracTorchConfig(**settings))


def stop(group):
    FracTorchBackend().on_shutdown(group, FracTorchConfig())


def group_state():
    """Return what a train function would see of its group."""
    import torch.distributed as dist

    options = dist.group.WORLD._get_backend(__import__("torch").device("cpu")).options
    return {
        "backend": dist.get_backend(),
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "timeout_s": options._timeout.total_seconds(),
        "addr": os.environ.get("MASTER_ADDR"),
        "port": os.environ.get("MASTER_PORT"),
    }


def initialized():
    import torch.distributed as dist

    return dist.is_initialized()


def replace_in_worker(module, name, action, times=1_000_000):
    """Replace a function of the package in this worker by an action, for a number of calls; ``nap 5`` takes 5 s."""
    import importlib
    import time

    import psutil

    owner = importlib.import_module(module)
    original = getattr(owner, name)
    left = times

    def replaced(*args, **kwargs):
        nonlocal left
        left -= 1
        if left < 0:
            return original(*args, **kwargs)
        if action == "kill":
            psutil.Process().kill()
        if action == "stop":
            psutil.Process().suspend()
        if action == "raise":
            raise OSError("the disk is on fire")
        if action == "sleep":
            time.sleep(3600)
        if action.startswith("nap"):
            time.sleep(float(action.removeprefix("nap") or 3))
        if action == "starve":
            import torch

            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        result = original(*args, **kwargs)
        if action == "corrupt":
            result.wait()
            args[0][3] += 1
        return result

    setattr(owner, name, replaced)
