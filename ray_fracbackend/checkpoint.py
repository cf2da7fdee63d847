"""Report a checkpoint that is equal on all ranks, once. Runs in the train function.

Ray Train merges the checkpoints of all ranks into one directory. Where two of them copy a file of one name at a time,
Linux keeps the last one in silence, and Windows ends the second with ``PermissionError [WinError 32]``, unless FracTorchConfig
started the workers: then they copy in turn there (checkpoint_turns.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray.train
from ray.train import Checkpoint


def report_rank0(metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None, **options: Any) -> None:
    """Report metrics from every rank and the checkpoint from rank 0 alone.

    Call it on every rank, instead of ``ray.train.report``, with checkpoints that are equal on all ranks, as the model's
    state is under DDP. For sharded state, where every rank's checkpoint matters, use ``ray.train.report`` with a file name
    of each rank's own, such as ``f"model-rank={rank}.pt"``.

    Args:
        metrics: What to report, on every rank.
        checkpoint: The checkpoint; passed on from rank 0 only.
        options: Further arguments of ``ray.train.report`` in the installed version, such as ``checkpoint_dir_name``.

    Example::

        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.module.state_dict(), os.path.join(folder, "model.pt"))
            report_rank0({"loss": loss}, Checkpoint.from_directory(folder))
    """
    from_rank0 = ray.train.get_context().get_world_rank() == 0
    ray.train.report(dict(metrics), checkpoint=checkpoint if from_rank0 else None, **options)
