"""Copy checkpoints with the same file name one after the other, on Windows. Runs on the worker after the start.

Ray Train merges the checkpoints of all ranks into one directory. On Windows a rank cannot open a file that another rank
is copying there; its copy raises ``PermissionError [WinError 32]``. On other systems the last copy wins. With this
module the last copy also wins on Windows. ``RAY_FRACBACKEND_CHECKPOINT_TURNS=0`` leaves Ray's copies unchanged.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

from filelock import FileLock

from ray_fracbackend import _ray
from ray_fracbackend.decide.settings import switch
from ray_fracbackend.log import logger

TURNS_ENV = "RAY_FRACBACKEND_CHECKPOINT_TURNS"
# Longer than the copies of all other ranks take. After this time a rank copies without the lock, as stock Ray does.
_TURN_S = 600.0
# Access denied, sharing and lock violation, user-mapped section: a program that looks at new files holds one for a moment.
_HELD = {5, 32, 33, 1224}
_PAUSES_S = (0.1, 0.3, 1.0, 2.0, 4.0)


def copy_checkpoints_in_turn() -> None:
    """Make this worker's ``ray.train.report`` wait for other workers of its machine that copy to the same folder.

    Raises:
        ValueError: The variable is neither 0 nor 1.
    """
    if not switch(TURNS_ENV, os.environ.get(TURNS_ENV, "1")):
        return
    try:
        _ray.wrap_checkpoint_copies(copy_in_turn)
    except ImportError as error:
        logger.warning(
            "checkpoints of several ranks with the same file name may raise PermissionError [WinError 32]: use a different file "
            "name on each rank, or use ray_fracbackend.report_rank0 (%s)",
            error,
        )


def copy_in_turn(folder: str, copy: Callable[[], Any]) -> Any:
    """Copy while holding the machine's lock for a folder; the system releases the lock of a process that dies.

    Args:
        folder: Destination of the copy, spelled the same in all processes.
        copy: Copies files; called again while another program holds one of them.

    Raises:
        OSError: The last copy raised it.
    """
    name = hashlib.sha256(folder.encode()).hexdigest()[:32]
    lock = FileLock(os.path.join(tempfile.gettempdir(), f"ray_fracbackend-{name}.lock"))
    try:
        lock.acquire(timeout=_TURN_S)
    except OSError as error:  # filelock.Timeout is one
        logger.warning("copying a checkpoint to %s without waiting for other workers: %s", folder, error)
    try:
        for pause_s in _PAUSES_S:
            try:
                return copy()
            except OSError as error:
                if getattr(error, "winerror", None) not in _HELD:
                    raise
                logger.warning("%s: a virus scanner, OneDrive or another program may hold the file", error)
            time.sleep(pause_s)
        return copy()
    finally:
        lock.release()
