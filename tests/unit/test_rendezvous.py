"""Address, port and Gloo's interface: every rule, with simulated workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_fracbackend.decide.addresses import is_link_local, is_loopback
from ray_fracbackend.decide.interfaces import BY_ROUTE, IFNAME
from ray_fracbackend.decide.plan import Decision, StartPlan, WorkerPlan
from ray_fracbackend.decide.rendezvous import Rendezvous, plan_rendezvous
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.worker_info import NetworkInfo, WorkerInfo
from ray_fracbackend.errors import RendezvousError
from tests.unit.builders import num_calls

LO = {"lo": ("127.0.0.1", "::1")}
PSEUDO = "Loopback Pseudo-Interface 1"


def worker(rank: int, ip: str = "10.0.0.1", interfaces: Any = None, node: str = "", **changes: Any) -> WorkerInfo:
    """Return a worker on Linux whose node has ``lo`` and, on eth0, the node's address."""
    network = {"interfaces": {**LO, "eth0": (ip,)} if interfaces is None else interfaces, **changes.pop("network", {})}
    base: dict[str, Any] = {"rank": rank, "node_id": node or ip, "node_ip": ip, "hostname": "h", "platform": "linux"}
    return WorkerInfo(**{**base, **changes}, network=NetworkInfo(**network))


def on_windows(rank: int, ip: str = "127.0.0.1", node: str = "w", **changes: Any) -> WorkerInfo:
    interfaces = {PSEUDO: ("127.0.0.1", "::1"), "Ethernet 2": (ip,)}
    return worker(rank, ip, interfaces, node, platform="win32", **changes)


def apart(**changes: Any) -> list[WorkerInfo]:
    return [worker(0, "10.0.0.1", **changes), worker(1, "10.0.0.2", **changes)]


def plan(workers: list[WorkerInfo], backend: str = "gloo", **options: Any) -> Rendezvous:
    return plan_rendezvous(workers, Settings(**options), backend, 4321)


def worker_plans(workers: list[WorkerInfo], backend: str = "gloo", **options: Any) -> list[WorkerPlan]:
    start = StartPlan(Decision(backend=backend, device_type="cpu", reason=""), plan(workers, backend, **options))
    return start.worker_plans(workers, Settings(**options), budget_s=1.0, attempt="a")


_V6 = [worker(0, "fd00:0:0::1", {"eth0": ("fd00::1",)}), worker(1, "fd00::2", {"eth0": ("fd00::2",)})]
_TWIN = {"network_id": "boot/4026531840"}
_ONE_MACHINE = [worker(rank, node=f"n{rank}", network=_TWIN) for rank in range(2)]
_UNKNOWN = [worker(0, interfaces={}), worker(1, "10.0.0.2", {})]
_WINDOWS = [on_windows(0, "10.0.0.1", "a"), on_windows(1, "10.0.0.2", "b")]
_NO_LOOPBACK = {"network": {"loopback_works": False}}
_MINE = [worker(0, env={IFNAME: "ib0"}, interfaces={"eth0": ("10.0.0.1",), "ib0": ("10.1.0.1",)}), apart()[1]]
_OTHER_NAMES = [worker(0), worker(1, "10.0.0.2", {"ens5": ("10.0.0.2",), "eth0": ("172.17.0.1",)})]
_BRIDGE = [worker(0, "192.0.2.9", {**LO, "eth0": ("172.17.0.2",)}), worker(1, "10.0.0.2")]

# Workers and settings; the address of rank 0, Gloo's interfaces, whether it is one node, a part of each warning.
_CASES = {
    "one node": ([worker(0), worker(1)], {}, "127.0.0.1", ["lo", "lo"], True, []),
    "IPv6 only": ([worker(0, interfaces={"lo": ("::1",)})], {}, "::1", ["lo"], True, []),
    "macOS": ([worker(0, interfaces={"lo0": ("127.0.0.1",)}, platform="darwin")], {}, "127.0.0.1", ["lo0"], True, []),
    "unknown interfaces": ([worker(0, interfaces={})], {}, "127.0.0.1", [None], True, []),
    "user, one node": ([worker(0, env={IFNAME: "eth0"})], {}, "127.0.0.1", ["eth0"], True, []),
    "user, one node, list": ([worker(0, env={IFNAME: "eth0,lo"})], {}, "127.0.0.1", ["eth0,lo"], True, []),
    "two Ray nodes on one machine": (_ONE_MACHINE, {}, "127.0.0.1", ["lo", "lo"], True, []),
    "clones": ([replace(w, network=replace(w.network, **_TWIN)) for w in apart()], {}, "10.0.0.1", ["eth0"] * 2, False, []),
    "one address, unknown networks": ([worker(0), worker(1, node="b")], {}, "10.0.0.1", ["eth0"] * 2, False, []),
    "several nodes": (apart(), {}, "10.0.0.1", ["eth0", "eth0"], False, []),
    "other names": (_OTHER_NAMES, {}, "10.0.0.1", ["eth0", "ens5"], False, []),
    "IPv6": (_V6, {}, "fd00:0:0::1", ["eth0", "eth0"], False, []),
    "bridge": (_BRIDGE, {}, "192.0.2.9", [BY_ROUTE, "eth0"], False, ["its node (lo 127.0.0.1,::1; eth0 172.17.0.2). If", "no interface has the node's"]),
    "unknown interfaces, several nodes": (_UNKNOWN, {}, "10.0.0.1", [BY_ROUTE] * 2, False, ["rank 0: no interface", "rank 1: no"]),
    "user": (_MINE, {}, "10.0.0.1", ["ib0", "eth0"], False, ["rank 0: GLOO_SOCKET_IFNAME=ib0 is kept; without it eth0 would"]),
    "user, as ruled": (apart(env={IFNAME: "eth0"}), {}, "10.0.0.1", ["eth0", "eth0"], False, []),
    "user, stale": (apart(env={IFNAME: "eth0,eth9"}), {}, "10.0.0.1", ["eth0,eth9"] * 2, False, []),
    "master_addr": (apart(), {"master_addr": "10.0.0.1"}, "10.0.0.1", ["eth0", "eth0"], False, []),
    "master_addr elsewhere": (apart(), {"master_addr": "192.0.2.5"}, "192.0.2.5", ["eth0"] * 2, False, ["192.0.2.5 (master_addr as configured) is on no"]),
    "Windows": ([on_windows(0)], {}, "127.0.0.1", [PSEUDO], True, []),
    "Windows, Gloo without loopback": ([on_windows(0, **_NO_LOOPBACK)], {}, "127.0.0.1", [None], True, []),
    "Windows, several nodes": (_WINDOWS, {}, "10.0.0.1", ["Ethernet 2"] * 2, False, []),
}  # fmt: skip


@pytest.mark.parametrize(
    ("workers", "options", "address", "interfaces", "one_node", "warns"), _CASES.values(), ids=_CASES
)
def test_rule(workers, options, address, interfaces, one_node, warns):
    """The address and interfaces of all ranks, and what each worker sets; NCCL's variables are never set."""
    found = plan(workers, **options)
    assert (found.master_addr, list(found.interfaces), found.one_node) == (address, interfaces, one_node)
    assert [text in warning for text, warning in zip(warns, found.warnings, strict=True)] == [True] * len(warns)
    assert found.reason.startswith(f"rank 0 at {f'[{address}]' if ':' in address else address}:4321 (")
    for each, info in zip(worker_plans(workers, **options), workers, strict=True):
        is_windows = info.platform == "win32"
        libuv = {"USE_LIBUV": "0"} if is_windows else {}
        assert each.env == {"MASTER_ADDR": address, "MASTER_PORT": "4321", **libuv}
        assert (each.master_addr, each.master_port) == (address, 4321)
        assert each.interface == interfaces[each.rank]
        assert each.drop_interface == (one_node and not is_windows)


def test_reason():
    """The line of the log; many interfaces are shortened."""
    assert plan([worker(0)]).reason == "rank 0 at 127.0.0.1:4321 (one node), Gloo over lo"
    assert plan(_OTHER_NAMES).reason.endswith("(its node's address), Gloo over eth0 (rank 0), over ens5 (rank 1)")
    assert plan(_MINE).reason.endswith("Gloo over ib0 as set by the user (rank 0), over eth0 (rank 1)")
    assert plan([on_windows(0, **_NO_LOOPBACK)]).reason.endswith("Gloo over the address of the host name")
    many = [worker(rank, f"10.0.0.{rank}", {f"eth{rank}": (f"10.0.0.{rank}",)}) for rank in range(6)]
    assert plan(many).reason.endswith("over eth3 (rank 3), ...")
    assert plan(many[:4]).reason.endswith("over eth3 (rank 3)")


def test_backends_with_gloo_inside_get_an_interface():
    """ipc, staged and a pair with Gloo contain Gloo groups; NCCL finds its interfaces itself."""
    for backend in ("gloo", "ipc", "staged", "cpu:gloo,cuda:nccl"):
        assert worker_plans([worker(0)], backend)[0].interface == "lo"
    assert [each.interface for each in worker_plans(apart(), "nccl")] == [None, None]


def test_tcp_sets_no_master_addr():
    """With ``init_method="tcp"`` the train function finds no MASTER_ADDR, as with stock."""
    assert worker_plans([worker(0)], init_method="tcp")[0].env == {}


def test_a_configured_name_becomes_each_ranks_own_literal():
    """c10d always receives an IP address, because it would look up a name repeatedly."""
    first = worker(0, interfaces={"e": ("127.0.1.1", "10.0.0.1")}, network={"master_addrs": ("127.0.1.1",)})
    second = worker(1, "10.0.0.2", network={"master_addrs": ("10.0.0.1", "fd00::1")})
    plans = worker_plans([first, second], master_addr="head")
    assert (
        [each.env["MASTER_ADDR"] for each in plans] == [each.master_addr for each in plans] == ["127.0.1.1", "10.0.0.1"]
    )
    found = plan([first, second], master_addr="head")
    assert found.reason.startswith("rank 0 at 127.0.1.1:4321 (master_addr as configured), ")
    # Rank 0 itself has the address.
    elsewhere = replace(second, network=replace(second.network, master_addrs=("10.9.9.9",)))
    assert plan([first, elsewhere], master_addr="head").warnings == ()


@pytest.mark.parametrize(
    ("workers", "options", "ranks", "text"),
    [
        (
            [worker(0), worker(1, "10.0.0.2", network={"master_addr_missing": "Name or service not known"})],
            {"master_addr": "head"},
            (1,),
            "master_addr='head' cannot be resolved by rank 1 (rank 1 (node 10.0.0.2, pid 0): Name or service not known)",
        ),
        ([worker(0, "127.0.0.1", node="a"), worker(1, "10.0.0.2")], {}, (0,), "loopback address of rank 0"),
        ([on_windows(0, node="a"), on_windows(1, node="b")], {}, (0, 1), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1"),
    ],
    ids=["unresolved", "loopback", "Windows"],
)
def test_no_address_for_all_ranks(workers, options, ranks, text):
    with pytest.raises(RendezvousError) as caught:
        plan(workers, **options)
    assert caught.value.ranks == ranks
    assert text in str(caught.value)


def test_without_a_held_store_there_is_nothing_to_meet_at():
    """If the probe did not open the store, this is an error, not port 0."""
    with pytest.raises(RendezvousError, match="holds no store"):
        plan_rendezvous([worker(0)], Settings(), "gloo", None)


def test_kinds_of_addresses():
    """Loopback and link-local addresses are detected in every spelling; names other than localhost are neither."""
    loopback = ("127.0.1.1", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1", "localhost")
    assert [each for each in (*loopback, "10.0.0.1", "head", "fd00::1") if is_loopback(each)] == list(loopback)
    link_local = ("fe80::1%eth0", "169.254.1.1")
    assert [each for each in (*link_local, "fd00::1", "head") if is_link_local(each)] == list(link_local)


def test_the_choice_is_linear():
    def calls(count: int) -> int:
        workers = [worker(rank, f"10.{rank // 65536}.{rank // 256 % 256}.{rank % 256}") for rank in range(1, count)]
        return num_calls(worker_plans, [worker(0, "11.0.0.1"), *workers])

    assert calls(2_000) < 11 * calls(200)
