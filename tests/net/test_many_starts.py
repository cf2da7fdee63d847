"""Many starts at the same time on one machine: the user sees no conflict of ports."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from net_nodes import Node
from net_starts import ours

from ray_fracbackend.decide.settings import Settings

NUM_STARTS = 200
AT_A_TIME = 8
# Twice the number of ports that the concurrent starts hold.
RANGE = (22000, 22000 + 2 * AT_A_TIME - 1)


def start_many(node: Node, folder: Path, options: Settings) -> list[Any]:
    def one(_: int) -> Any:
        results, _, workers = ours([node, node], folder, options=options)
        for worker in workers:
            worker.call(dist.destroy_process_group)
            worker.kill()
        return results

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(one, range(NUM_STARTS)))


@pytest.mark.full
@pytest.mark.parametrize("options", [Settings(), Settings(master_port=RANGE)], ids=["any-port", "range"])
def test_starts_side_by_side_never_clash(two_nodes: tuple[Node, Node], tmp_path: Path, options: Settings) -> None:
    """Eight concurrent starts, with any port or a shared narrow range, all compute the correct sum."""
    assert start_many(two_nodes[0], tmp_path, options) == [[3.0, 3.0]] * NUM_STARTS
