"""Logical GPUs and CPUs for the Ray that a script starts: ``--num-gpus`` and ``--num-cpus`` of ``run``. Runs on the driver."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from ray_fracbackend.cli.connect.address import ClusterError, target_of
from ray_fracbackend.cli.options import declared_text, options_text

_Say = Callable[[str], None]


@dataclass
class UsedRay:
    """The Ray that this process uses.

    Attributes:
        is_own: ``ray.init`` started it here, False if it was running; None before ``ray.init`` was called.
    """

    is_own: bool | None = None


@contextmanager
def declaring(resources: Mapping[str, int], say: _Say) -> Iterator[UsedRay]:
    """Declare resources for each local Ray that ``ray.init`` starts in the block, also when Ray calls it by itself.

    Args:
        resources: ``num_gpus`` and ``num_cpus``, each optional. Arguments that the script passes take precedence.
        say: Called with a line about the declared resources, and with a line about options without an effect.

    Yields:
        Information about the Ray that is used.
    """
    used = UsedRay()
    original = ray.init

    @functools.wraps(original)
    def init(address: str | None = None, **options: Any) -> Any:
        if ray.is_initialized():  # the script's second call
            return original(address, **options)
        is_local, where = _is_local(address)
        passed = {name: options[name] for name in resources if options.get(name) is not None}
        added = {name: number for name, number in resources.items() if is_local and name not in passed}
        context = original(address, **{**options, **added})
        used.is_own = is_local
        if not is_local and resources:
            say(f"{options_text(resources)}: no effect, because the script uses the running Ray cluster at {where}")
        elif ignored := {name: resources[name] for name in passed}:
            own = ", ".join(f"{name}={number}" for name, number in passed.items())
            say(f"{options_text(ignored)}: no effect, because the script passes {own} to ray.init()")
        if added:
            say(declared_text(added))
        return context

    ray.init = init
    try:
        yield used
    finally:
        ray.init = original


def _is_local(address: str | None) -> tuple[bool, str]:
    """Return whether ``ray.init`` starts a Ray for this address, and the address of the running one."""
    try:
        target = target_of(address)
    except ClusterError:  # not an address: Ray raises the error
        return False, str(address)
    return target.is_local, target.text
