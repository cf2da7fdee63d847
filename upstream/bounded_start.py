"""Piece 3: a start that ends, and that names the ranks that did not answer.

Goes into ``ray/train/torch/config.py``. With it moves ``collect.py``. Ray's diff is
``ray.get(futures)`` -> ``gather(futures, ...)`` at each wait of ``on_start``; here the
waits are reached through the worker group's methods and the module's name ``ray``.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Callable, Iterator, List, Optional, Sequence

from ray_fracbackend import _ray
from ray_fracbackend.collect import gather, raise_for_engine
from ray_fracbackend.timeouts import Deadline

import ray
from ray._private.ray_constants import env_float
from ray.train.torch import TorchConfig

# Seconds for the torch process group to start. By default the config's timeout_s, so
# that a start which works today has all the time that it has today.
TORCH_PROCESS_GROUP_START_TIMEOUT_S = "TORCH_PROCESS_GROUP_START_TIMEOUT_S"

# torch keeps the same deadline in the workers; this is for their own word to arrive.
_ANSWER_S = 3.0


class _Start:
    """The waits of one call of ``on_start``, under one deadline."""

    def __init__(self, worker_group: Any, budget_s: float) -> None:
        self._addresses = _ray.worker_addresses(worker_group)
        self._deadline = Deadline(budget_s)

    def wait(self, refs: Sequence[Any], ranks: Optional[List[int]] = None) -> List[Any]:
        ranks = list(range(len(refs))) if ranks is None else ranks
        addresses = [self._addresses[rank] for rank in ranks]
        step = "setting up the torch process group"
        return gather(refs, addresses, self._deadline, step, slack_s=_ANSWER_S)


# One per thread: torchft starts its replica groups side by side.
_current: ContextVar[Optional[_Start]] = ContextVar("torch_start", default=None)


def on_start(original: Callable[..., None]) -> Callable[..., None]:
    """``_TorchBackend.on_start`` that is bounded as a whole."""

    def on_start(self: Any, worker_group: Any, backend_config: TorchConfig) -> None:
        budget_s = env_float(
            TORCH_PROCESS_GROUP_START_TIMEOUT_S, backend_config.timeout_s
        )
        start = _Start(worker_group, budget_s)
        token = _current.set(start)
        try:
            with _bounded(worker_group, start):
                original(self, worker_group, backend_config)
        except BaseException as error:
            # A rank that hangs would keep its resources from the next attempt.
            _ray.release_workers(worker_group)
            raise_for_engine(error, worker_group)
            raise
        finally:
            _current.reset(token)

    return on_start


def get_all(refs: Sequence[Any]) -> List[Any]:
    """``ray.get`` of one reference a rank; bounded and named within a start."""
    start = _current.get()
    return ray.get(list(refs)) if start is None else start.wait(refs)


class _BoundedRay:
    """``ray`` as one module sees it: its bare ``ray.get`` of a start is bounded."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get(self, refs: Any, **kwargs: Any) -> Any:
        if _current.get() is None or kwargs or not isinstance(refs, list):
            return self._module.get(refs, **kwargs)
        return get_all(refs)


def bounded_ray(original: Any) -> Any:
    """The name ``ray`` of ``ray.train.torch.config``."""
    return _BoundedRay(original)


@contextmanager
def _bounded(worker_group: Any, start: _Start) -> Iterator[None]:
    """Bounds the waits that a worker group does itself."""

    def execute(fn: Callable, *args: Any, **kwargs: Any) -> List[Any]:
        return start.wait(worker_group.execute_async(fn, *args, **kwargs))

    def execute_single(rank: int, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        ref = worker_group.execute_single_async(rank, fn, *args, **kwargs)
        return start.wait([ref], [rank])[0]

    worker_group.execute, worker_group.execute_single = execute, execute_single
    try:
        yield
    finally:
        del worker_group.execute, worker_group.execute_single
