"""What a start knows of one worker: address, devices, network. Frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NcclVersion = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Rank, node and process of a worker, known before the worker has answered anything.

    Attributes:
        rank: Index in its worker group.
        node_ip: Ray's address of its node.
        pid: Its process id.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    """One CUDA device as one worker sees it.

    Attributes:
        uuid: CUDA's UUID of the device: ``GPU-...``, or ``MIG-...`` for a MIG slice. Equal UUIDs are one device. Where
            CUDA gives none, as old ROCm builds, ``BUS-...`` of host and PCI bus id.
        index: torch's index of the device in the worker's process.
        name: Product name, such as ``NVIDIA H200``.
        total_memory_bytes: Memory of the device or slice.
        pci_bus_id: PCI bus id of the physical GPU, lower case; MIG slices of one GPU have the same. None if unknown.
        parent_uuid: UUID of the physical GPU where the device is a MIG slice, else None.
        compute_mode: ``default``, ``exclusive_process``, ``prohibited``, or ``unknown`` without NVML.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkInfo:
    """Network of one worker's node, as far as torch can use it.

    Attributes:
        network_id: Equal for workers that share one loopback interface, even as different Ray nodes; empty if unknown.
        interfaces: Addresses of every interface that is up and has more than link-local ones, by name as Gloo compares
            it, in the order in which the system lists them, without IPv6 scopes.
        gloo_missing: Why Gloo cannot make a device of any kind, None where it can.
        default_device_missing: Why Gloo cannot find a device without the name of an interface, None where it can. Checked on
            Windows only: elsewhere an interface is always named, and a slow name server must not hold up the start.
        store_port: Port of the store that this worker holds open for the others, None except on rank 0.
        master_addrs: Addresses that the configured name of rank 0's node resolves to here, IPv4 first.
        master_addr_missing: Why it does not resolve here, None where it does or no name is configured.
    """

    network_id: str = ""
    interfaces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gloo_missing: str | None = None
    default_device_missing: str | None = None
    store_port: int | None = None
    master_addrs: tuple[str, ...] = ()
    master_addr_missing: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """One worker of the job, before any process group exists.

    Attributes:
        rank: Rank within the worker group that is being started.
        node_id: Ray's id of the worker's node.
        node_ip: Ray's address of the worker's node, a literal IP.
        hostname: Host name as NCCL sees it; containers on one host may differ.
        boot_id: Kernel boot id, equal for all containers of one host; empty where the platform has none.
        pid: Process id of the worker.
        platform: ``sys.platform``.
        torch_version: ``torch.__version__``.
        ray_version: ``ray.__version__``.
        resources: Resources that Ray reserved for the worker, such as ``{"CPU": 1.0, "GPU": 0.5}``.
        gpu_ids: Ray's ids of the worker's GPUs; for messages only, never an identity.
        devices: The worker's own CUDA devices; the first is the one its collectives run on.
        num_visible_devices: Devices that torch sees in the worker's process, its neighbours' included.
        cuda_missing: Why torch has no CUDA device for this worker, None where it has one.
        nccl_available: torch was built with NCCL.
        nccl_version: Version of the NCCL library that is loaded into the process, None if unknown or absent.
        gloo_available: torch was built with Gloo.
        mps_reachable: A CUDA MPS control daemon answers on this node.
        ipc_host_memory_missing: Why the ipc backend cannot use host memory here, None where it can; probed where it may be used.
        ipc_device_memory_missing: Why the ipc backend cannot use device memory here, None where it can; probed as above.
        staged_missing: Why the staged backend cannot be used here, None where it can; probed as above, and on Windows.
        env: The worker's environment variables for NCCL, Gloo, MPS and the rendezvous, as the user set them.
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
    gloo_available: bool = True
    mps_reachable: bool = False
    ipc_host_memory_missing: str | None = "not probed"
    ipc_device_memory_missing: str | None = "not probed"
    staged_missing: str | None = "not probed"
    env: Mapping[str, str] = field(default_factory=dict)
    network: NetworkInfo = field(default_factory=NetworkInfo)

    @property
    def gpu_fraction(self) -> float:
        """GPUs that Ray reserved for the worker: 0 for a CPU worker, 0.5 for half a device."""
        return self.resources.get("GPU", 0.0)

    @property
    def device(self) -> DeviceInfo | None:
        """Device that the worker's collectives run on, as ``ray.train.torch.get_device()`` picks it."""
        return self.devices[0] if self.devices else None

    @property
    def nccl_host(self) -> str:
        """Host identity that NCCL compares: ``NCCL_HOSTID``, else host name and boot id (NCCL utils.cc)."""
        return self.env.get("NCCL_HOSTID") or f"{self.hostname}/{self.boot_id}"

    @property
    def where(self) -> str:
        """The worker in a message."""
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
