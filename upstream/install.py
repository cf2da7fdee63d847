"""Puts pieces into the running Ray, so that "as if merged" can be run and tested.

    with as_if_merged("gloo_default") as runtime_env:
        ray.init(runtime_env=runtime_env)
        TorchTrainer(...).fit()

Ray Train starts workers from a controller in a process of its own. So the pieces go
into this process now, and into every process of the job by a setup hook.
"""

import functools
import importlib
import os
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

from upstream.seams import PIECES, Seam

_PIECES_ENV_VAR = "RAY_FRACBACKEND_UPSTREAM_PIECES"


@contextmanager
def as_if_merged(*pieces: str) -> Iterator[Dict[str, Any]]:
    """Replaces the seams of some pieces, and puts them back on exit.

    Enter it before ``ray.init``. Processes that Ray has started end with their job, not
    with this context.

    Args:
        *pieces: Names out of ``upstream.seams.PIECES``; what they require comes along.

    Yields:
        The runtime environment for ``ray.init``, which does the same in every process
        of the job.

    Raises:
        ValueError: A piece is unknown.
    """
    ordered = _with_requirements(pieces)
    # A worker runs the hook before Ray has given it the driver's sys.path.
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]
    env_vars = {
        _PIECES_ENV_VAR: ",".join(ordered),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    with ExitStack() as stack:
        for piece in ordered:
            for seam in PIECES[piece].seams:
                stack.enter_context(_replaced(seam))
        yield {
            "worker_process_setup_hook": "upstream.install.install_in_worker",
            "env_vars": env_vars,
        }


def install_in_worker() -> None:
    """Installs for the life of a process; Ray calls it in each worker process."""
    for piece in os.environ[_PIECES_ENV_VAR].split(","):
        for seam in PIECES[piece].seams:
            _replace(seam)


def _with_requirements(pieces: Tuple[str, ...]) -> List[str]:
    ordered: List[str] = []
    for piece in pieces:
        if piece not in PIECES:
            raise ValueError(f"no piece {piece!r}; there are {', '.join(PIECES)}.")
        for name in (*PIECES[piece].requires, piece):
            if name not in ordered:
                ordered.append(name)
    return ordered


def _replace(seam: Seam) -> Tuple[Any, str, Any]:
    module, _, path = seam.target.partition(":")
    owner = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    wrapper_module, _, wrapper = seam.wrapper.partition(":")
    new = getattr(importlib.import_module(wrapper_module), wrapper)(original)
    setattr(owner, name, functools.wraps(original)(new) if callable(new) else new)
    return owner, name, original


@contextmanager
def _replaced(seam: Seam) -> Iterator[None]:
    owner, name, original = _replace(seam)
    try:
        yield
    finally:
        setattr(owner, name, original)
