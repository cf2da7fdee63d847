"""Interfaces that match the variables of Gloo and NCCL."""

import pytest

from ray_fracbackend.decide.interfaces import gloo_doubt, matched, nccl_doubt

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
    """Prefixes, exact names and exclusions, as in NCCL's documentation."""
    assert matched(value, KNOWN) == names
    assert (nccl_doubt(value, KNOWN) is None) == bool(names)


def test_an_empty_variable_is_as_none():
    """NCCL then chooses by itself."""
    assert nccl_doubt("", KNOWN) is None


@pytest.mark.parametrize("value", ["eth0", "eth0,eth1"])
def test_gloos_names(value):
    """Exact names of existing interfaces."""
    assert gloo_doubt(value, KNOWN) is None


@pytest.mark.parametrize(
    ("value", "instead"),
    [
        ("eth", "GLOO_SOCKET_IFNAME=eth0"),
        ("^lo,docker0", "GLOO_SOCKET_IFNAME=eth0"),
        ("=ib0", "GLOO_SOCKET_IFNAME=ib0"),
    ],
)
def test_nccls_syntax_in_gloos_variable(value, instead):
    """The message states whose syntax it is and which name to set."""
    doubt = gloo_doubt(value, KNOWN)
    assert "that is the syntax of NCCL_SOCKET_IFNAME, and Gloo accepts only whole names" in doubt
    assert instead in doubt


def test_a_name_that_is_not_there():
    """A missing name is reported without a suggestion."""
    assert gloo_doubt("wlan0", KNOWN) == "'wlan0' is none of this node's interfaces (lo, eth0, eth1, docker0, ib0)"
