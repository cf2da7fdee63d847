"""Report a checkpoint that is equal on all ranks only once. Runs in the train function.

Ray Train merges the checkpoints of all ranks into one directory. If two ranks copy a file with the same name at the
same time, the last copy wins on Linux. On Windows the second copy raises ``PermissionError [WinError 32]``, unless
FracTorchConfig started the workers: then they copy one after the other (turns.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray.train
from ray.train import Checkpoint


def report_rank0(metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None, **options: Any) -> None:
    """Report metrics from every rank, and the checkpoint only from rank 0.

    Call it on every rank instead of ``ray.train.report``, if the checkpoints are equal on all ranks, like the model's
    state with DDP. For sharded state, where the checkpoint of every rank matters, use ``ray.train.report`` with a
    different file name on each rank, such as ``f"model-rank={rank}.pt"``.

    Args:
        metrics: Metrics of this rank.
        checkpoint: The checkpoint; ignored on other ranks than 0.
        options: Other arguments of ``ray.train.report`` in the installed version, such as ``checkpoint_dir_name``.

    Example::

        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.module.state_dict(), os.path.join(folder, "model.pt"))
            report_rank0({"loss": loss}, Checkpoint.from_directory(folder))
    """
    from_rank0 = ray.train.get_context().get_world_rank() == 0
    ray.train.report(dict(metrics), checkpoint=checkpoint if from_rank0 else None, **options)
