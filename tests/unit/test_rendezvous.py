"""Address, port, interface and libuv: every row of the table, with simulated workers."""

from __future__ import annotations

import cProfile
from dataclasses import replace
from typing import Any

import pytest

from ray_fracbackend.decide.addresses import is_link_local, is_loopback, normal
from ray_fracbackend.decide.interfaces import IFNAME
from ray_fracbackend.decide.rendezvous import NOTE_10049, Rendezvous, plan_rendezvous
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import decide_start
from ray_fracbackend.decide.worker_info import NetworkInfo, WorkerInfo
from ray_fracbackend.errors import (
    BackendUnavailableError,
    IncompatibleWorkersError,
    RendezvousError,
)

LO = {"lo": ("127.0.0.1", "::1")}
WINDOWS_LO = {"Loopback Pseudo-Interface 1": ("127.0.0.1", "::1")}


def worker(rank: int, node_ip: str = "10.0.0.1", **changes: Any) -> WorkerInfo:
    """Return a worker on Linux whose node has ``lo`` and, on eth0, the node's address."""
    network = {"interfaces": {**LO, "eth0": (node_ip,)}, "store_port": 4321 if rank == 0 else None}
    network.update(changes.pop("network", {}))
    base: dict[str, Any] = {"rank": rank, "node_id": node_ip, "node_ip": node_ip, "hostname": "h", "platform": "linux"}
    return WorkerInfo(**{**base, **changes}, network=NetworkInfo(**network))


def windows(rank: int, node_ip: str = "127.0.0.1", node_id: str = "w", **changes: Any) -> WorkerInfo:
    return worker(
        rank, node_ip, node_id=node_id, platform="win32", **{"network": {"interfaces": WINDOWS_LO}, **changes}
    )


def plan(workers: list[WorkerInfo], backend: str = "gloo", **options: Any) -> Rendezvous:
    return plan_rendezvous(workers, Settings(**options), backend, workers[0].network.store_port)


def two_nodes(**changes: Any) -> list[WorkerInfo]:
    return [worker(0, "10.0.0.1", **changes), worker(1, "10.0.0.2", **changes)]


class TestOneNode:
    """Loopback, whatever names and addresses the node has."""

    def test_linux_uses_loopback_for_store_and_gloo(self) -> None:
        """One node needs no network: 127.0.0.1 and lo, whatever its address and host name are."""
        found = plan([worker(0), worker(1)])
        assert found.of(1).env == {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4321"}
        assert found.of(1).start_env == {IFNAME: "lo"}
        assert not found.of(1).check_reachable
        assert found.reason == "rank 0 at 127.0.0.1:4321 (one node), Gloo over lo"

    def test_loopback_of_ipv6_only_kernels(self) -> None:
        """Without 127.0.0.1 the IPv6 loopback is used, with brackets only in the URL."""
        facts = {"interfaces": {"lo": ("::1",)}, "store_port": 1}
        found = plan([worker(0, network=facts), worker(1, network=facts)], init_method="tcp")
        assert found.master_addr == "::1"

    def test_loopback_under_another_name(self) -> None:
        """macOS calls it lo0."""
        facts = {"interfaces": {"lo0": ("127.0.0.1",)}, "store_port": 1}
        assert plan([worker(0, platform="darwin", network=facts)]).interfaces[0].name == "lo0"

    def test_no_interface_with_a_loopback_address_leaves_the_choice_to_gloo(self) -> None:
        """If no interface is known, Gloo chooses one, and the IPv4 loopback is used."""
        found = plan([worker(0, network={"interfaces": {}}), worker(1, network={"interfaces": {}})])
        assert found.master_addr == "127.0.0.1"
        assert IFNAME not in found.of(0).env

    def test_cloned_machines_are_two_nodes(self) -> None:
        """Machines from one snapshot have the same boot id and namespaces: their addresses distinguish them."""
        shared = {"network_id": "boot/4026531840", "interfaces": {**LO, "eth0": ("10.0.0.1",)}, "store_port": 5}
        clone = {**shared, "interfaces": {**LO, "eth0": ("10.0.0.2",)}}
        found = plan([worker(0, network=shared), worker(1, "10.0.0.2", network=clone)])
        assert not found.one_node
        assert found.master_addr == "10.0.0.1"
        assert found.of(1).check_reachable

    def test_the_interface_is_set_only_for_the_start(self) -> None:
        """On one node the variable is removed before training; between nodes later groups need it too."""
        found = plan([worker(0), worker(1)])
        assert (found.of(1).start_env, IFNAME in found.of(1).env) == ({IFNAME: "lo"}, False)
        between = plan(two_nodes())
        assert (between.of(1).start_env, between.of(1).env[IFNAME]) == ({}, "eth0")

    def test_a_valid_interface_of_the_user_is_no_warning(self) -> None:
        """On one node every interface reaches every rank."""
        facts = {"interfaces": {**LO, "eth0": ("10.0.0.1",)}, "store_port": 1}
        found = plan([worker(rank, env={IFNAME: "eth0"}, network=facts) for rank in range(2)])
        assert found.warnings == ()
        assert "Gloo over eth0 as set by the user" in found.reason

    def test_two_ray_nodes_on_one_machine_are_one_node(self) -> None:
        """Ray nodes that share a network stack share its loopback, even if Ray knows both as 127.0.0.1."""
        shared = {"network_id": "boot/4026531840", "interfaces": LO}
        workers = [
            worker(rank, "127.0.0.1", node_id=f"n{rank}", network={**shared, "store_port": 5}) for rank in (0, 1)
        ]
        assert plan(workers).one_node

    def test_unknown_networks_are_not_taken_for_one(self) -> None:
        """Two nodes with unknown network ids are two nodes."""
        assert not plan(two_nodes()).one_node

    def test_nccl_gets_no_gloo_variable(self) -> None:
        """Without Gloo only the rendezvous variables differ from stock."""
        assert set(plan([worker(0), worker(1)], "nccl").of(0).env) == {"MASTER_ADDR", "MASTER_PORT"}

    @pytest.mark.parametrize("backend", ["gloo", "ipc", "cpu:gloo,cuda:nccl"])
    def test_every_backend_with_gloo_inside_gets_an_interface(self, backend: str) -> None:
        """The ipc backend and a pair with Gloo contain Gloo groups."""
        assert plan([worker(0)], backend).of(0).start_env[IFNAME] == "lo"

    def test_no_nccl_variable_is_ever_set(self) -> None:
        """NCCL finds its interfaces itself."""
        for backend in ("nccl", "gloo", "ipc"):
            assert not [name for name in plan(two_nodes(), backend).of(1).env if name.startswith("NCCL")]


class TestWindows:
    """What differs on Windows."""

    def test_one_node_switches_libuv_off_in_url_and_environment(self) -> None:
        """No Windows wheel has a libuv store: it is disabled in the environment and in the URL, which takes precedence."""
        found = plan([windows(0), windows(1)])
        assert found.of(1).env == {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4321", "USE_LIBUV": "0"}

    def test_inherited_libuv_is_overridden_with_a_warning(self) -> None:
        """USE_LIBUV=1 cannot be used on Windows, and the log says so."""
        found = plan([windows(0), windows(1, env={"USE_LIBUV": "1"})])
        assert found.of(1).env["USE_LIBUV"] == "0"
        assert found.warnings == ("USE_LIBUV=1 on rank 1 is not kept: torch for Windows is built without libuv",)

    def test_libuv_stays_the_users_elsewhere(self) -> None:
        """On other systems the variable is left to torch and the user."""
        found = plan([worker(0, env={"USE_LIBUV": "0"})])
        assert "USE_LIBUV" not in found.of(0).env

    def test_the_10049_line_is_explained(self) -> None:
        """The note names the expected c10d line and calls it harmless."""
        assert "10049" in NOTE_10049
        assert "harmless" in NOTE_10049

    @pytest.mark.parametrize(
        ("workers", "off"),
        [([windows(0)], True), ([worker(0)], False), ([worker(0, platform="darwin")], False)],
        ids=["windows", "linux", "macos"],
    )
    def test_libuv_is_off_only_on_windows(self, workers: list[WorkerInfo], off: bool) -> None:
        """The plan disables libuv exactly where no torch has a libuv store."""
        assert plan(workers).libuv_off is off

    def test_the_interface_is_left_out_while_the_host_name_works(self) -> None:
        """While the host name works, Gloo's own lookup is used."""
        assert IFNAME not in plan([windows(0)]).of(0).env

    def test_the_loopback_adapter_is_named_when_the_host_name_fails(self) -> None:
        """A host name that does not work is replaced by the loopback adapter's friendly name."""
        facts = {"interfaces": WINDOWS_LO, "default_device_missing": "name does not resolve", "store_port": 1}
        assert plan([windows(0, network=facts)]).of(0).env[IFNAME] == "Loopback Pseudo-Interface 1"

    @pytest.mark.parametrize("name", ["Ger\u00e4t", "Loopback, first"])
    def test_no_usable_adapter_is_an_error(self, name: str) -> None:
        """If neither the host name nor the adapter's name can be used, the error states the fix."""
        facts = {"interfaces": {name: ("127.0.0.1",)}, "default_device_missing": "it does not resolve", "store_port": 1}
        with pytest.raises(BackendUnavailableError, match="hosts file"):
            plan([windows(0, network=facts)])

    def test_several_nodes_need_rays_cluster_flag(self) -> None:
        """For Ray's loopback address on several Windows nodes the error names the variable that Ray needs."""
        with pytest.raises(RendezvousError, match="RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1"):
            plan([windows(0, node_id="a"), windows(1, node_id="b")])

    def test_one_node_that_was_started_without_the_flag_is_named(self) -> None:
        """If a single node still reports loopback, the error names it."""
        with pytest.raises(RendezvousError, match=r"rank 1 on node 127\.0\.0\.1") as info:
            plan([windows(0, "10.0.0.1", "a", network={"store_port": 1}), windows(1, node_id="b")])
        assert info.value.ranks == (1,)

    def test_an_address_on_no_adapter_is_an_error(self) -> None:
        """An address that no longer exists, as of a VPN, cannot be bound."""
        with pytest.raises(RendezvousError, match=r"10\.9\.9\.9 is on none of its interfaces .*RAY_ENABLE_WINDOWS"):
            plan([windows(0, "10.9.9.9", "a"), windows(1, "10.0.0.2", "b")])

    def test_several_nodes_name_the_adapter_of_the_node_address(self) -> None:
        """Between nodes each rank uses the friendly name of the adapter with its node's address."""
        workers = [
            windows(r, ip, f"n{r}", network={"interfaces": {**WINDOWS_LO, "Ethernet 2": (ip,)}, "store_port": 1})
            for r, ip in enumerate(("10.0.0.1", "10.0.0.2"))
        ]
        assert plan(workers).of(1).env[IFNAME] == "Ethernet 2"

    @pytest.mark.parametrize(
        ("name", "addresses", "why"),
        [
            ("Ethern\u00e9t", ("10.0.0.2",), "not ASCII"),
            ("Ethernet, old", ("10.0.0.2",), "comma"),
            ("Ethernet", ("fe80::1", "10.0.0.2"), "link-local"),
        ],
    )
    def test_hostile_adapters_are_left_out_with_a_warning(
        self, name: str, addresses: tuple[str, ...], why: str
    ) -> None:
        """If Gloo cannot use a name or its first address, the variable stays unset, with a warning."""
        workers = [
            windows(0, "10.0.0.1", "a", network={"interfaces": {"Ethernet": ("10.0.0.1",)}, "store_port": 1}),
            windows(1, "10.0.0.2", "b", network={"interfaces": {name: addresses}}),
        ]
        found = plan(workers)
        assert IFNAME not in found.of(1).env
        assert why in found.warnings[0]
        assert found.warnings[0].startswith("rank 1: ")

    def test_a_link_local_address_beside_the_right_one_is_a_doubt(self) -> None:
        """The order of IPv4 and IPv6 on an adapter is unknown on Windows, so the warning explains a possible failure."""
        workers = [
            windows(
                r, f"10.0.0.{r}", f"n{r}", network={"interfaces": {"E": (f"10.0.0.{r}", "fe80::1")}, "store_port": 1}
            )
            for r in (0, 1)
        ]
        assert "may be its link-local one" in plan(workers).warnings[0]

    def test_windows_and_linux_are_refused(self) -> None:
        """Gloo cannot connect the two systems."""
        with pytest.raises(IncompatibleWorkersError, match="Gloo cannot connect Windows"):
            decide_start([windows(0), worker(1)], Settings())

    def test_gpus_without_nccl_are_staged_for_every_setting(self) -> None:
        """If torch has no NCCL, as on Windows, requesting NCCL leads to staged and a warning instead of a crash."""
        from ray_fracbackend.decide.worker_info import DeviceInfo

        gpus = [
            windows(
                r,
                resources={"GPU": 1.0},
                devices=(DeviceInfo(uuid=f"GPU-{r}"),),
                num_visible_devices=2,
                staged_missing=None,
            )
            for r in (0, 1)
        ]
        assert decide_start(gpus, Settings()).backend == "cpu:gloo,cuda:staged"
        forced = decide_start(gpus, Settings(backend="nccl"))
        assert forced.backend == "cpu:gloo,cuda:staged"
        assert forced.warnings

    def test_a_wheel_without_a_transport_is_refused_with_the_good_versions(self) -> None:
        """The probe detects the missing transport, and the start ends before any rank waits."""
        from ray_fracbackend.worker.network import no_transport_text

        text = no_transport_text("2.9.1")
        with pytest.raises(
            BackendUnavailableError, match=r"2\.8\.0 to 2\.10\.0.*2\.7\.1 or older, or 2\.11\.0 or newer"
        ):
            decide_start([windows(0, network={"gloo_missing": text})], Settings())


class TestSeveralNodes:
    """Addresses that every node reaches, and the interface of each."""

    def test_rank_0_does_not_connect_to_itself(self) -> None:
        """It has the store, and may not reach its own external address."""
        found = plan(two_nodes())
        assert [found.of(rank).check_reachable for rank in (0, 1)] == [False, True]

    def test_each_rank_gets_the_interface_of_its_own_node_address(self) -> None:
        """Names may differ between nodes; the host name is not used."""
        workers = two_nodes()
        workers[1] = worker(
            1, "10.0.0.2", network={"interfaces": {**LO, "ens5": ("10.0.0.2",), "eth0": ("172.17.0.1",)}}
        )
        found = plan(workers)
        assert [found.of(rank).env[IFNAME] for rank in (0, 1)] == ["eth0", "ens5"]
        assert found.master_addr == "10.0.0.1"
        assert found.of(1).check_reachable
        assert found.reason.endswith("Gloo over eth0 (rank 0), over ens5 (rank 1)")

    def test_an_ipv6_cluster_uses_bare_literals(self) -> None:
        """MASTER_ADDR has no brackets, a tcp URL has; the spelling of the address does not matter."""
        workers = [
            worker(r, ip, network={"interfaces": {"eth0": (normal(ip),)}, "store_port": 4321})
            for r, ip in enumerate(("fd00:0:0::1", "fd00::2"))
        ]
        found = plan(workers, init_method="tcp")
        assert found.of(1).master_addr == "fd00:0:0::1"
        assert [choice.name for choice in found.interfaces] == ["eth0", "eth0"]

    def test_a_link_local_node_address_is_dropped_for_another_of_its_interface(self) -> None:
        """fe80:: needs a scope that differs from node to node."""
        facts = {"interfaces": {"eth0": ("fe80::1", "fd00::1")}, "store_port": 1}
        workers = [worker(0, "fe80::1", network=facts), worker(1, "fd00::2")]
        assert plan(workers).master_addr == "fd00::1"

    def test_a_link_local_node_address_alone_is_an_error(self) -> None:
        """Without another address the user must set one."""
        with pytest.raises(RendezvousError, match="link-local and its interface has no other"):
            plan([worker(0, "fe80::1"), worker(1, "fd00::2")])

    def test_mixed_families_are_an_error_that_lists_both(self) -> None:
        """Gloo cannot connect IPv4 with IPv6."""
        with pytest.raises(RendezvousError, match=r"rank 0 IPv4, as node 10\.0\.0\.1 on eth0; rank 1 IPv6") as info:
            plan([worker(0), worker(1, "fd00::2")])
        assert info.value.ranks == (0,) or info.value.ranks == (1,)

    def test_mixed_families_of_the_users_own_interfaces_are_a_warning(self) -> None:
        """The user's settings are kept."""
        workers = [worker(0), worker(1, "fd00::2", env={IFNAME: "eth0"})]
        assert any("cannot connect IPv4 with IPv6" in warning for warning in plan(workers).warnings)

    def test_a_node_with_both_families_fits_an_ipv4_node(self) -> None:
        """Gloo uses an interface's IPv4 address if it has one, so a mixed cluster with common IPv4 works."""
        both = worker(1, "fd00::2", network={"interfaces": {"eth0": ("10.0.0.2", "fd00::2")}})
        assert plan([worker(0), both]).interfaces[1].name == "eth0"

    def test_loopback_node_addresses_are_an_error(self) -> None:
        """127.0.0.1 is a different machine on every node."""
        with pytest.raises(RendezvousError, match="--node-ip-address"):
            plan([worker(0, "127.0.0.1", node_id="a"), worker(1, "10.0.0.2")])

    def test_a_translated_address_warns_and_names_host_networking(self) -> None:
        """A container's bridge: no interface has the address, and Gloo's ports are random."""
        nat = worker(0, "192.0.2.9", network={"interfaces": {**LO, "eth0": ("172.17.0.2",)}, "store_port": 1})
        found = plan([nat, worker(1, "10.0.0.2")])
        assert "--network host" in found.warnings[0]
        assert found.of(0).interface_by_route
        assert IFNAME not in found.of(0).env

    def test_no_default_route_does_not_matter(self) -> None:
        """Only interfaces and addresses are used, so an offline cluster has the same result."""
        assert plan(two_nodes()).of(0).env[IFNAME] == "eth0"

    def test_a_comma_in_a_name_is_left_out_with_a_warning(self) -> None:
        """Gloo splits the variable at commas on every system."""
        facts = {"interfaces": {"eth,0": ("10.0.0.2",)}}
        found = plan([worker(0), worker(1, "10.0.0.2", network=facts)])
        assert IFNAME not in found.of(1).env
        assert "comma" in found.warnings[0]

    def test_a_non_ascii_name_is_fine_on_linux(self) -> None:
        """On Linux Gloo receives the bytes of the variable."""
        facts = {"interfaces": {"netz\u00fc": ("10.0.0.2",)}}
        assert plan([worker(0), worker(1, "10.0.0.2", network=facts)]).of(1).env[IFNAME] == "netz\u00fc"

    def test_the_users_interface_is_kept(self) -> None:
        """An explicit GLOO_SOCKET_IFNAME is never replaced; if it differs from the rule, there is a warning."""
        facts = {"interfaces": {**LO, "eth0": ("10.0.0.1",), "ib0": ("10.1.0.1",)}, "store_port": 1}
        found = plan([worker(0, env={IFNAME: "ib0"}, network=facts), worker(1, "10.0.0.2")])
        assert IFNAME not in found.of(0).env
        assert found.warnings == ("rank 0: GLOO_SOCKET_IFNAME=ib0 is kept; without it eth0 would be used",)

    def test_nccls_syntax_in_the_users_interface(self) -> None:
        """The warning states whose syntax it is and which name to set."""
        found = plan(two_nodes(env={IFNAME: "eth"}))
        assert "that is the syntax of NCCL_SOCKET_IFNAME" in found.warnings[0]
        assert "GLOO_SOCKET_IFNAME=eth0" in found.warnings[0]

    def test_the_users_interface_that_agrees_is_no_warning(self) -> None:
        """There is no warning if the user chose what the rule chooses."""
        assert plan(two_nodes(env={IFNAME: "eth0"})).warnings == ()

    def test_a_stale_interface_of_the_user_is_a_warning_with_the_existing_names(self) -> None:
        """A name that does not exist is kept, and the log lists the existing names."""
        assert (
            "'eth9' is none of this node's interfaces (lo, eth0)" in plan(two_nodes(env={IFNAME: "eth9"})).warnings[0]
        )

    def test_the_configured_address_wins(self) -> None:
        """master_addr is used unchanged; if no interface of rank 0's node has it, there is a warning."""
        found = plan(two_nodes(), master_addr="192.0.2.5")
        assert found.master_addrs == ("192.0.2.5", "192.0.2.5")
        assert found.warnings == (
            "master_addr='192.0.2.5' is on no interface of rank 0's node 10.0.0.1 (lo 127.0.0.1,::1; eth0 10.0.0.1), and is used as "
            "configured",
        )
        assert found.of(1).address_doubt == found.warnings[0]

    def test_the_configured_address_is_checked_on_one_node_too(self) -> None:
        """It may be wrong there as well, and rank 0 would wait for the others until its deadline."""
        workers = [worker(0), worker(1)]
        assert plan(workers, master_addr="192.0.2.5").of(1).check_reachable
        assert not plan(workers, master_addr="192.0.2.5").of(0).check_reachable
        found = plan(workers, master_addr="10.0.0.1")
        assert (found.of(1).check_reachable, found.of(1).address_doubt) == (True, "")

    def test_an_error_has_the_warnings_before_it(self) -> None:
        """A plan that fails at Gloo's interfaces tells what is wrong with the configured address too."""
        workers = [worker(0, "10.0.0.1"), worker(1, "fd00::2", network={"interfaces": {"eth0": ("fd00::2",)}})]
        with pytest.raises(RendezvousError, match="famil") as info:
            plan(workers, master_addr="192.0.2.5")
        assert "\nwarning before this error: master_addr='192.0.2.5' is on no interface" in str(info.value)

    def test_a_configured_name_becomes_each_ranks_own_literal(self) -> None:
        """c10d always receives an IP address, because it would look up a name repeatedly."""
        workers = [
            worker(
                0,
                network={
                    "interfaces": {**LO, "e": ("127.0.1.1", "10.0.0.1")},
                    "store_port": 1,
                    "master_addrs": ("127.0.1.1",),
                },
            ),
            worker(1, "10.0.0.2", network={"master_addrs": ("10.0.0.1", "fd00::1")}),
        ]
        found = plan(workers, backend="nccl", master_addr="head")
        assert [found.of(rank).env["MASTER_ADDR"] for rank in (0, 1)] == ["127.0.1.1", "10.0.0.1"]

    def test_a_name_that_one_rank_cannot_resolve_names_the_rank(self) -> None:
        """The error contains the rank and the resolver's message."""
        lost = worker(1, "10.0.0.2", network={"master_addr_missing": "Name or service not known"})
        with pytest.raises(
            RendezvousError, match=r"'head' cannot be resolved by rank 1 .*Name or service not known"
        ) as info:
            plan([worker(0), lost], master_addr="head")
        assert info.value.ranks == (1,)

    def test_without_a_held_store_there_is_nothing_to_meet_at(self) -> None:
        """If the probe did not open the store, this is an error, not port 0."""
        with pytest.raises(RendezvousError, match="holds no store"):
            plan([worker(1)])


@pytest.mark.parametrize(
    ("workers", "checked"),
    [
        ([worker(0)], False),
        (two_nodes(), False),
        (two_nodes(env={IFNAME: "eth0"}), True),
        ([worker(0), worker(1, "10.0.0.2", network={"interfaces": {"e,0": ("10.0.0.2",)}})], True),
        ([windows(0)], True),
    ],
)
def test_devices_in_doubt_are_checked_before_the_rendezvous(workers: list[WorkerInfo], checked: bool) -> None:
    """A name that was just read from the kernel needs no check; a user's name, no name, or another system does."""
    assert plan(workers).of(len(workers) - 1).check_device is checked
    assert plan(workers, "nccl").of(0).check_device is False


def test_the_store_of_torchruns_agent() -> None:
    """Scripts below torchrun inherit the flag; the warning names the ranks that have it."""
    workers = [worker(0), worker(1, env={"TORCHELASTIC_USE_AGENT_STORE": "True"})]
    (warning,) = plan(workers).warnings
    assert warning.startswith("TORCHELASTIC_USE_AGENT_STORE=True on rank 1 is not kept: torchrun sets it")
    assert plan([worker(0, env={"TORCHELASTIC_USE_AGENT_STORE": "False"}), worker(1)]).warnings == ()


def test_macos_and_linux_in_one_job() -> None:
    """Gloo is reported to hang between them: the warning comes before the start, also if the start fails."""
    mixed = two_nodes()
    mixed[1] = replace(mixed[1], platform="darwin")
    assert any("macOS on rank 1, Linux on the others" in warning for warning in plan(mixed).warnings)
    assert not any(
        "macOS" in warning for warning in plan([replace(w, platform="darwin") for w in two_nodes()]).warnings
    )


def test_kinds_of_addresses() -> None:
    """Loopback and link-local addresses are detected in every spelling; names other than localhost are neither."""
    assert [
        is_loopback(a) for a in ("127.0.1.1", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1", "localhost", "10.0.0.1", "head")
    ] == [
        True,
        True,
        True,
        True,
        False,
        False,
    ]
    assert [is_link_local(a) for a in ("fe80::1%eth0", "169.254.1.1", "fd00::1", "head")] == [True, True, False, False]


def test_the_choice_is_linear() -> None:
    """Ten times the workers cause ten times as many calls, not a hundred."""

    def num_calls(count: int) -> int:
        workers = [worker(rank, f"10.{rank // 65536}.{rank // 256 % 256}.{rank % 256}") for rank in range(1, count)]
        workers.insert(0, worker(0, "11.0.0.1"))
        profile = cProfile.Profile()
        profile.enable()
        found = plan(workers)
        for rank in range(count):
            found.of(rank)
        profile.disable()
        return sum(entry.callcount for entry in profile.getstats())

    assert num_calls(2_000) < 11 * num_calls(200)


def test_nodes_whose_interfaces_cannot_be_listed() -> None:
    """Ray's addresses are used unchanged, and each worker finds the interface of its route."""
    found = plan([replace(each, network=replace(each.network, interfaces={})) for each in two_nodes()])
    assert found.master_addr == "10.0.0.1"
    assert [found.of(rank).interface_by_route for rank in range(2)] == [True, True]
