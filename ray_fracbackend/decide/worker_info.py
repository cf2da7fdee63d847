"""Address, devices and network of one worker, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NcclVersion = tuple[int, int, int]
# In place of the reason why a backend cannot be used, where no start may choose it.
NOT_PROBED = "not probed"
_NUM_NAMED = 4


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Rank, node and process of a worker, known before the worker answers.

    Attributes:
        rank: Rank in the worker group.
        node_ip: Ray's address of its node.
        pid: Process id of the worker.
        node_id: Ray's id of its node.
    """

    rank: int
    node_ip: str
    pid: int
    node_id: str

    @property
    def text(self) -> str:
        """``rank 3 (node 10.0.0.3, pid 4711)``."""
        return f"rank {self.rank} (node {self.node_ip}, pid {self.pid})"


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One CUDA device as seen by one worker.

    Attributes:
        uuid: CUDA's UUID of the device: ``GPU-...``, or ``MIG-...`` for a MIG slice. Equal UUIDs mean the same device.
            If CUDA has no UUID, as in old ROCm builds, ``BUS-...`` with host and PCI bus id.
        index: torch's index of the device in the worker's process.
        name: Product name, such as ``NVIDIA H200``.
        total_memory_bytes: Memory of the device or slice, 0 if unknown.
        pci_bus_id: PCI bus id of the physical GPU, lower case; MIG slices of one GPU have the same. None if unknown.
        parent_uuid: UUID of the physical GPU if the device is a MIG slice, else None.
        compute_mode: ``default``, ``exclusive_process``, ``prohibited``, or ``unknown`` if the driver does not
            report it.
    """

    uuid: str
    index: int = 0
    name: str = "GPU"
    total_memory_bytes: int = 0
    pci_bus_id: str | None = None
    parent_uuid: str | None = None
    compute_mode: str = "default"

    @property
    def is_mig(self) -> bool:
        """True for a slice of a GPU in MIG mode."""
        return self.parent_uuid is not None or self.uuid.startswith("MIG-")


@dataclass(frozen=True, kw_only=True)
class NetworkInfo:
    """Network of one worker's node, as torch can use it.

    Attributes:
        network_id: Equal for workers that share one loopback interface, even on different Ray nodes; empty if unknown.
        interfaces: Addresses of every interface that is up and has not only link-local addresses, by the name that Gloo
            compares, in the order of the system, without IPv6 scopes.
        gloo_missing: Why Gloo cannot create a device of any kind, None if it can.
        loopback_works: Whether Gloo can use the loopback interface by its name; checked only on Windows.
        store_port: Port of the store that this worker holds open for the others, None except on rank 0.
        master_addrs: Addresses that the configured name of rank 0's node resolves to here, IPv4 first.
        master_addr_missing: Why the name does not resolve here, None if it resolves or no name is configured.
    """

    network_id: str = ""
    interfaces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gloo_missing: str | None = None
    loopback_works: bool = True
    store_port: int | None = None
    master_addrs: tuple[str, ...] = ()
    master_addr_missing: str | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """One worker of the job, before any process group exists.

    Attributes:
        rank: Rank in the worker group.
        node_id: Ray's id of the worker's node.
        node_ip: Ray's address of the worker's node, a literal IP.
        hostname: Host name as NCCL sees it; containers on one host may differ.
        boot_id: Kernel boot id, equal for all containers of one host; empty if the platform has none.
        pid: Process id of the worker.
        platform: ``sys.platform``.
        torch_version: ``torch.__version__``.
        ray_version: ``ray.__version__``.
        resources: Resources that Ray reserved for the worker, such as ``{"CPU": 1.0, "GPU": 0.5}``.
        gpu_ids: Ray's ids of the worker's GPUs; used only in messages, never to identify a device.
        devices: The worker's own CUDA devices; its collectives run on the first one.
        num_visible_devices: Number of devices that torch sees in the worker's process, including those of other
            workers.
        cuda_missing: Why torch has no CUDA device for this worker, None if it has one.
        nccl_available: Whether torch was built with NCCL.
        nccl_version: Version of the loaded NCCL library, None if unknown or not loaded.
        mps_reachable: Whether a CUDA MPS control daemon has its pipe open on this node.
        ipc_host_memory_missing: Why the ipc backend cannot use host memory here, None if it can; checked only if ipc
            may be used.
        staged_missing: Why the staged backend cannot be used here, None if it can; checked as above, and on Windows
            with devices.
        env: The user's environment variables for NCCL, Gloo, MPS and the rendezvous.
        network: The node's network.
    """

    rank: int
    node_id: str
    node_ip: str
    hostname: str
    boot_id: str = ""
    pid: int = 0
    platform: str = "linux"
    torch_version: str = ""
    ray_version: str = ""
    resources: Mapping[str, float] = field(default_factory=dict)
    gpu_ids: tuple[str, ...] = ()
    devices: tuple[DeviceInfo, ...] = ()
    num_visible_devices: int = 0
    cuda_missing: str | None = None
    nccl_available: bool = False
    nccl_version: NcclVersion | None = None
    mps_reachable: bool = False
    ipc_host_memory_missing: str | None = NOT_PROBED
    staged_missing: str | None = NOT_PROBED
    env: Mapping[str, str] = field(default_factory=dict)
    network: NetworkInfo = field(default_factory=NetworkInfo)

    @property
    def gpu_fraction(self) -> float:
        """Fraction or number of GPUs that Ray reserved for the worker: 0 for a CPU worker, 0.5 for half a device."""
        return self.resources.get("GPU", 0.0)

    @property
    def device(self) -> DeviceInfo | None:
        """Device that the worker's collectives run on, as returned by ``ray.train.torch.get_device()``."""
        return self.devices[0] if self.devices else None

    @property
    def nccl_host(self) -> str:
        """Host identity that NCCL compares: ``NCCL_HOSTID``, else host name and boot id (NCCL utils.cc)."""
        return self.env.get("NCCL_HOSTID") or f"{self.hostname}/{self.boot_id}"

    @property
    def where(self) -> str:
        """Rank, node and process for messages."""
        return WorkerAddress(self.rank, self.node_ip, self.pid, self.node_id).text


def version_text(version: NcclVersion | None) -> str:
    """Format a version: ``2.28.9``, or ``of unknown version``."""
    return ".".join(map(str, version)) if version else "of unknown version"


def ranks_text(ranks: tuple[int, ...] | list[int], limit: int = 8) -> str:
    """Format ranks: ``rank 3``, ``ranks 0,1`` or ``ranks 0,1,2,... (64 in all)``; ranges are not merged, for grep."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= limit:
        return "ranks " + ",".join(map(str, ranks))
    return "ranks " + ",".join(map(str, ranks[:limit])) + f",... ({len(ranks)} in all)"


def named(ranks: Sequence[int], addresses: Mapping[int, WorkerAddress] | Sequence[WorkerAddress]) -> str:
    """Format ranks with their nodes and processes; of many ranks the nodes only.

    Args:
        ranks: Ranks to name, at least one.
        addresses: Node and process of each of them, by rank.
    """
    if len(ranks) > _NUM_NAMED:
        nodes = sorted({addresses[rank].node_ip for rank in ranks})
        return f"{ranks_text(list(ranks))} (nodes {', '.join(nodes[:_NUM_NAMED])})"
    return ", ".join(addresses[rank].text for rank in ranks)
