"""The checks of ``ray-fracbackend doctor``: from facts of machines to lines with a verdict and a fix. Pure.

machine.py collects the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from packaging.version import Version

from ray_fracbackend.device_checks import check_devices
from ray_fracbackend.diagnosis import Check, Level, MachineFacts
from ray_fracbackend.facts import WorkerFacts, version_text
from ray_fracbackend.interfaces import IFNAME, is_loopback, normal, owner_of
from ray_fracbackend.sharing import short_uuid

# Oldest versions that are supported.
_OLDEST = {"ray": "2.40", "torch": "2.4"}
# Docker's default is 64 MiB; NCCL's troubleshooting guide asks for 1 GiB.
_SHM_PROBLEM_BYTES, _SHM_WARNING_BYTES = 64 << 20, 1 << 30
# A name server that answers slower than this holds up everything that goes by host name.
_SLOW_LOOKUP_S = 1.0


def check_machine(facts: MachineFacts, num_nodes: int = 1) -> tuple[Check, ...]:
    """Every line about one machine.

    Args:
        facts: What was found there.
        num_nodes: Nodes of the cluster that it is part of.
    """
    return (
        _versions(facts),
        *check_devices(facts),
        _gloo(facts),
        _host_name(facts, num_nodes),
        _interfaces(facts.worker, num_nodes),
        _environment(facts),
        *_name_server(facts.worker),
        *_shm(facts),
    )


def check_cluster(machines: Sequence[MachineFacts]) -> tuple[Check, ...]:
    """Every line about the machines of one cluster against each other; none where there is one machine."""
    if len(machines) < 2:
        return ()
    same: dict[str, Callable[[MachineFacts], str]] = {
        "system": lambda facts: facts.worker.platform,
        "ray_fracbackend": lambda facts: facts.package_version,
        "Python": lambda facts: ".".join(facts.python_version.split(".")[:2]),
        "torch": lambda facts: facts.worker.torch_version,
        "NCCL": lambda facts: version_text(facts.worker.nccl_version) if facts.worker.devices else "",
    }
    mixed = [check for name, value_of in same.items() if (check := _mixed(name, machines, value_of)) is not None]
    return (
        *(mixed or [Check("same", "ok", f"{len(machines)} nodes of one kind: {', '.join(same)}")]),
        *_doubles(machines),
    )


def _mixed(name: str, machines: Sequence[MachineFacts], value_of: Callable[[MachineFacts], str]) -> Check | None:
    nodes: dict[str, list[str]] = {}
    for facts in machines:
        if value := value_of(facts):
            nodes.setdefault(value, []).append(facts.worker.node_ip)
    if len(nodes) < 2:
        return None
    listed = "; ".join(f"{value} on {', '.join(on[:4])}{', ...' if len(on) > 4 else ''}" for value, on in nodes.items())
    fix = (
        "place the workers of a job on nodes of one system" if name == "system" else f"install one {name} on every node"
    )
    return Check(name, "problem", f"differs: {listed}", fix)


def _doubles(machines: Sequence[MachineFacts]) -> list[Check]:
    """Devices that several nodes have: containers of one machine, to which Ray gives one device several times."""
    nodes: dict[str, list[str]] = {}
    for facts in machines:
        for device in facts.worker.devices:
            nodes.setdefault(device.uuid, []).append(facts.worker.node_ip)
    return [
        Check(
            "CUDA devices",
            "warning",
            f"{short_uuid(uuid)} belongs to nodes {', '.join(on)}: Ray gives the whole of it out on each",
            "give every container devices of its own, or start Ray there with fewer --num-gpus",
        )
        for uuid, on in nodes.items()
        if len(on) > 1
    ]


def _versions(facts: MachineFacts) -> Check:
    found = {"ray": facts.worker.ray_version, "torch": facts.worker.torch_version}
    text = ", ".join(
        [f"ray_fracbackend {facts.package_version}", *(f"{name} {version}" for name, version in found.items())]
    )
    text = f"{text}, Python {facts.python_version} on {facts.worker.platform}"
    old = [f"{name}>={oldest}" for name, oldest in _OLDEST.items() if Version(found[name]) < Version(oldest)]
    if old:
        return Check("versions", "problem", text, f"pip install '{' '.join(old)}'")
    return Check("versions", "ok", text)


def _gloo(facts: MachineFacts) -> Check:
    over = facts.gloo_interface or "the host name's interface"
    if facts.worker.network.gloo_missing:
        fix = "unset GLOO_DEVICE_TRANSPORT" if "GLOO_DEVICE_TRANSPORT" in facts.worker.env else "install another torch"
        return Check("Gloo", "problem", facts.worker.network.gloo_missing, fix)
    if facts.gloo_device_missing:
        return Check("Gloo", "problem", facts.gloo_device_missing, f"see the line on interfaces, or set {IFNAME}")
    return Check("Gloo", "ok", f"makes a device on {over}")


def _host_name(facts: MachineFacts, num_nodes: int) -> Check:
    """The machine's own name: Gloo without an interface name, and much else, goes by what it resolves to."""
    worker = facts.worker
    name, addresses = worker.hostname, ", ".join(facts.host_addresses)
    line = f"write the line '{_own_address(worker)} {name}' into the hosts file"
    if facts.host_missing is not None:
        # Gloo's own look-up on Windows reads an uninitialised pointer then.
        level: Level = "problem" if worker.platform == "win32" else "warning"
        return Check("host name", level, f"{name!r} does not resolve: {facts.host_missing}", line)
    own = {address for found in worker.network.interfaces.values() for address in found}
    foreign = [a for a in facts.host_addresses if normal(a) not in own and not is_loopback(a)]
    if foreign:
        text = f"{name!r} resolves to {foreign[0]}, which is no address of this machine"
        return Check("host name", "problem", text, f"correct the hosts file or the name server: {line}")
    if facts.host_lookup_s > _SLOW_LOOKUP_S:
        text = f"{name!r} took {facts.host_lookup_s:.1f} s to resolve"
        return Check("host name", "warning", text, f"mend the name server, or {line}")
    if num_nodes > 1 and is_loopback(facts.host_addresses[0]):
        text = f"{name!r} resolves to {addresses}: whoever goes by it between nodes meets only himself"
        return Check("host name", "warning", f"{text}; FracTorchConfig does not", line)
    return Check("host name", "ok", f"{name!r} resolves to {addresses}")


def _name_server(worker: WorkerFacts) -> list[Check]:
    if not worker.network.name_server_silent:
        return []
    text = "no answer within a second: torch's store asks it for the name of every peer and serves nobody meanwhile"
    return [
        Check("name server", "warning", text, "correct /etc/resolv.conf; FracTorchConfig keeps these look-ups short")
    ]


def _own_address(worker: WorkerFacts) -> str:
    """An address of the machine that others may reach, where it has one."""
    known = [address for found in worker.network.interfaces.values() for address in found]
    return next((address for address in (worker.node_ip, *known) if not is_loopback(address)), worker.node_ip)


def _interfaces(worker: WorkerFacts, num_nodes: int) -> Check:
    known = worker.network.interfaces
    text = ", ".join(f"{name} {addresses[0]}" for name, addresses in known.items())
    if not known:
        return Check("interfaces", "problem", "none is up", "bring at least the loopback interface up")
    unknown = [name for name in worker.env.get(IFNAME, "").split(",") if name and name not in known]
    if unknown:
        found = f"{IFNAME}={worker.env[IFNAME]} names {unknown[0]!r}, which is none of {', '.join(known)}"
        return Check("interfaces", "problem", found, f"unset {IFNAME}, or name an interface; Gloo knows no patterns")
    if num_nodes > 1 and is_loopback(worker.node_ip):
        found = f"Ray knows this node as {worker.node_ip}, which no other node reaches"
        return Check("interfaces", "problem", found, "start Ray there with --node-ip-address=ADDRESS")
    if num_nodes > 1 and owner_of(worker, worker.node_ip) is None:
        found = f"none has the node's address {worker.node_ip} ({text}): it is translated on the way"
        return Check("interfaces", "warning", found, "run the container with --network=host: Gloo's ports are random")
    return Check("interfaces", "ok", text)


def _environment(facts: MachineFacts) -> Check:
    if facts.vgpu_preloaded:
        found = "libvgpu (HAMi) is preloaded; NCCL is reported to crash under it"
        return Check("environment", "warning", found, "FracTorchConfig(on_shared_device='gloo'), or backend='gloo'")
    env = facts.worker.env
    if facts.worker.platform == "win32" and env.get("USE_LIBUV") == "1":
        found = "USE_LIBUV=1, which torch's wheels for Windows cannot do"
        return Check("environment", "warning", found, "unset USE_LIBUV; FracTorchConfig overrides it")
    return Check("environment", "ok", ", ".join(f"{name}={value}" for name, value in env.items()) or "nothing is set")


def _shm(facts: MachineFacts) -> list[Check]:
    total, free = facts.shm_total_bytes, facts.shm_free_bytes
    if total is None or free is None:
        return []
    text = f"{_size(free)} free of {_size(total)}"
    fix = "--shm-size=1g or --ipc=host (Docker); an emptyDir with medium: Memory (Kubernetes)"
    users = "NCCL, data loader workers and Ray's object store"
    if free <= _SHM_PROBLEM_BYTES:
        return [Check("/dev/shm", "problem", f"{text}: {users} fail on so little", fix)]
    if total < _SHM_WARNING_BYTES:
        return [Check("/dev/shm", "warning", f"{text}: little for {users}", fix)]
    return [Check("/dev/shm", "ok", text)]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.0f} MiB"
