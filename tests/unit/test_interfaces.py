"""Interfaces that match the variables of NCCL."""

import pytest

from ray_fracbackend.decide.nccl import interface_doubts, matching
from ray_fracbackend.decide.worker_info import NetworkInfo
from tests.unit.builders import worker

KNOWN = ["lo", "eth0", "eth1", "docker0", "ib0"]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("eth", ["eth0", "eth1"]),
        ("eth0,ib", ["eth0", "ib0"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("^docker", ["eth0", "eth1", "ib0"]),
        ("^docker,eth,ib", []),
        ("^=eth0,docker0", ["eth1", "ib0"]),
        ("lo", ["lo"]),
        ("nosuch0", []),
    ],
)
def test_nccls_syntax(value, names):
    """Prefixes, exact names and exclusions, as in NCCL's documentation; a doubt if nothing matches, with the ranks."""
    assert matching(value, KNOWN) == names
    network = NetworkInfo(interfaces=dict.fromkeys(KNOWN, ()))
    own, unknown, none = {"NCCL_SOCKET_IFNAME": value}, worker(1), worker(2, network=network)
    doubts = interface_doubts([worker(0, network=network, env=own), unknown, none])
    assert [doubt.partition(":")[0] for doubt in doubts] == ([] if names else ["rank 0"])
