"""Every row of the decision table, with simulated workers."""

import re
from dataclasses import replace

import pytest

from ray_fracbackend.decide.left_to_ray import left_to_ray
from ray_fracbackend.decide.plan import StartPlan, WorkerPlan
from ray_fracbackend.decide.rendezvous import WorkerRendezvous, plan_rendezvous
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import decide_start
from ray_fracbackend.errors import (
    BackendUnavailableError,
    IncompatibleWorkersError,
    MissingDeviceError,
    OutOfMemoryError,
    SharedDeviceError,
    StartTimeoutError,
    VerificationError,
)
from tests.unit.builders import gpu, job, mig, worker


def plan(workers, node_gpus=None, **options):
    return decide_start(workers, Settings(**options), node_gpus)


def bound(workers, **options):
    """Return of each worker whether its group is bound to its device."""
    settings = Settings(**options)
    decision = decide_start(workers, settings)
    rendezvous = plan_rendezvous(workers, settings, decision.backend, 29500)
    told = StartPlan.of(decision, rendezvous).worker_plans(workers, settings, budget_s=1.0, attempt="a")
    return [each.bind_device for each in told]


_IPC = {"ipc_host_memory_missing": None, "ipc_device_memory_missing": None}
_NO_NCCL = {"nccl_available": False, "nccl_version": None}


class TestWithoutGpus:
    """No GPU was requested."""

    def test_cpu_job_uses_gloo(self):
        """A CPU job gets gloo on the CPU, as stock."""
        found = plan(job(None, None))
        assert (found.backend, found.device_type, dict(found.env_defaults)) == ("gloo", "cpu", {})

    @pytest.mark.parametrize(
        ("level", "options", "warns"),
        [("detail", {}, True), ("INFO", {}, False), ("DETAIL", {"backend": "ipc"}, False)],
    )
    def test_debug_level_that_ends_ddp_on_gloo(self, level, options, warns):
        """A warning for Gloo names the ranks."""
        found = plan([worker(0, **_IPC), worker(1, env={"TORCH_DISTRIBUTED_DEBUG": level}, **_IPC)], **options)
        assert [warning.partition(":")[0] for warning in found.warnings] == (
            ["TORCH_DISTRIBUTED_DEBUG=DETAIL on rank 1"] if warns else []
        )

    def test_explicit_nccl_needs_gpus(self):
        """backend='nccl' for workers without GPUs is an error that names the ranks and the advice."""
        with pytest.raises(MissingDeviceError, match=r"needs GPUs and NCCL; ranks 0,1 lack one of them.*use_gpu=True"):
            plan(job(None, None), backend="nccl")

    def test_explicit_nccl_with_devices_that_ray_does_not_count(self):
        """If the user manages GPUs without Ray's GPU resource, NCCL is used as requested."""
        found = plan([worker(0, nccl_available=True, num_visible_devices=1)], backend="nccl")
        assert (found.backend, dict(found.env_defaults), found.device_of(worker(0))) == ("nccl", {}, "cuda")

    def test_ipc_uses_host_memory_where_it_can(self):
        """backend='ipc' on a CPU job runs on host memory."""
        found = plan(job(None, None, ipc_host_memory_missing=None), backend="ipc")
        assert (found.backend, found.device_type) == ("ipc", "cpu")

    def test_ipc_that_cannot_run_is_an_error(self):
        """If ipc cannot be used, the error names the worker and what is missing."""
        with pytest.raises(BackendUnavailableError, match=r"rank 0 .*no ipc here.*backend='auto'"):
            plan(job(None, None), backend="ipc")

    def test_torch_without_gloo_is_an_error(self):
        """A torch without Gloo is an error before c10d fails."""
        with pytest.raises(BackendUnavailableError, match="built without Gloo"):
            plan([worker(0), worker(1, gloo_available=False)])


class TestLeftToRay:
    """Backends and accelerators that are left to Ray."""

    @pytest.mark.parametrize(
        "backend", ["tpu_dist", "hccl", "xla", "ucc", "mine", "cpu:gloo,xpu:ccl", "cpu:gloo,mine:mine", "npu:gloo"]
    )
    def test_other_backends(self, backend):
        """A backend that is neither NCCL, Gloo nor ipc goes to stock Ray Train."""
        assert left_to_ray(backend, {})

    @pytest.mark.parametrize("backend", ["auto", "nccl", "gloo", "ipc", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"])
    def test_our_backends(self, backend):
        """The backends of the table are ours."""
        assert left_to_ray(backend, {"CPU": 1, "GPU": 0.5}) is None

    @pytest.mark.parametrize("resource", ["TPU", "HPU", "NPU", "RBLN", "FURIOSA", "TTNPU", "MBLT", "neuron_cores"])
    def test_other_accelerators(self, resource):
        """Workers on an accelerator without CUDA go to stock Ray Train."""
        assert left_to_ray("auto", {"CPU": 1, resource: 1})


class TestMissingCuda:
    """Ray assigned GPUs, but torch has no CUDA."""

    workers = job(gpu("a"), None)
    workers[1] = worker(
        1, node="2", resources={"GPU": 0.5}, cuda_missing="torch 2.13.0+cpu is a CPU-only build", num_visible_devices=0
    )

    def test_error_names_rank_node_and_cause(self):
        """The default is an error with rank, node, cause and the setting that trains on the CPU."""
        with pytest.raises(
            MissingDeviceError, match=r"rank 1 .*10\.0\.0\.2: .*CPU-only.*on_missing_cuda='cpu'"
        ) as caught:
            plan(self.workers)
        assert caught.value.ranks == (1,)

    @pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:gloo"])
    def test_explicit_gloo_starts_with_a_warning(self, backend):
        """Gloo needs no CUDA, and stock starts it: so do we, and leave get_device() to Ray."""
        found = plan(self.workers, backend=backend)
        assert (found.backend, found.device_type, found.train_on_cpu) == (backend, "cpu", False)
        assert "rank 1 GPUs that torch cannot use (node 10.0.0.2: torch 2.13.0+cpu" in found.warnings[0]

    def test_reserved_gpu_without_a_device(self):
        """A worker that has a GPU of Ray's and no device at all is no worker on a device of its own."""
        workers = job(None, None, resources={"GPU": 1.0}, nccl_available=True, nccl_version=(2, 28, 9))
        with pytest.raises(MissingDeviceError, match=r"ranks 0,1 GPUs .*no CUDA device was found"):
            plan(workers)

    @pytest.mark.parametrize("backend", ["auto", "gloo"])
    def test_cpu_takes_every_worker_there(self, backend):
        """on_missing_cuda='cpu' trains all ranks on the CPU, also those that have a device."""
        found = plan(self.workers, on_missing_cuda="cpu", backend=backend)
        assert (found.backend, found.device_type, found.warnings) == ("gloo", "cpu", ())
        assert found.train_on_cpu
        assert {found.device_of(w) for w in self.workers} == {"cpu"}

    def test_cpu_overrides_nccl_with_a_warning(self):
        """An explicit NCCL cannot be used on the CPU, and a warning says so."""
        found = plan(self.workers, on_missing_cuda="cpu", backend="nccl")
        assert found.backend == "gloo"
        assert "backend='nccl' needs CUDA devices" in found.warnings[0]

    def test_a_pair_without_nccl_is_not_overridden(self):
        """It uses Gloo on the CPU too, so there is no warning."""
        found = plan(self.workers, on_missing_cuda="cpu", backend="cpu:gloo,cuda:gloo")
        assert (found.backend, found.warnings) == ("gloo", ())

    @pytest.mark.parametrize("options", [{"backend": "ipc"}, {"on_shared_device": "ipc"}])
    def test_cpu_with_ipc(self, options):
        """ipc by backend or by on_shared_device is kept on the CPU, on host memory."""
        workers = job(None, None, resources={"GPU": 0.5}, cuda_missing="no driver", ipc_host_memory_missing=None)
        found = plan(workers, on_missing_cuda="cpu", **options)
        assert (found.backend, found.device_type) == ("ipc", "cpu")


class TestHalfOfAPair:
    """A backend for only one device type starts as with stock, and the plan warns of the missing one."""

    def test_a_backend_only_for_cpu_on_workers_with_devices(self):
        """Their gradients are CUDA tensors."""
        found = plan(job(gpu("a"), gpu("b"), resources={"GPU": 1.0}), backend="cpu:gloo")
        assert (found.backend, found.device_type) == ("cpu:gloo", "cuda")
        assert found.warnings == ("backend='cpu:gloo' has no backend for cuda tensors, and the workers train on cuda",)

    def test_a_backend_only_for_cuda_on_workers_without_devices(self):
        """The other way round."""
        found = plan(job(None, None), backend="cuda:gloo")
        assert (found.backend, found.device_type) == ("cuda:gloo", "cpu")
        assert found.warnings == ("backend='cuda:gloo' has no backend for cpu tensors, and the workers train on cpu",)

    def test_complete_pairs_have_no_warning(self):
        """There is no warning for a pair, or for a name that covers all devices."""
        for backend in ("cpu:gloo,cuda:gloo", "gloo"):
            assert plan(job(None, None), backend=backend).warnings == ()


class TestOwnDevices:
    """Nothing is shared."""

    def test_nccl_untouched(self):
        """Every worker has its own device: NCCL, without any environment variable."""
        found = plan(job(gpu("a"), gpu("b", index=1), num_visible_devices=2))
        assert (found.backend, found.device_type, dict(found.env_defaults)) == ("nccl", "cuda", {})
        assert (found.share_groups, found.warnings, found.hints) == ((), (), ())

    def test_the_group_is_bound_to_devices_of_its_own(self):
        """After the verification, because a new group splits the communicator that it has connected."""
        own, shared = job(gpu("a"), gpu("b", index=1), num_visible_devices=2), job(gpu("a"), gpu("a"))
        assert bound(own) == [True, True]
        assert bound(own, verify=False) == bound(own, backend="gloo") == bound(job(None, None)) == [False, False]
        assert bound(shared, on_shared_device="gloo") == [False, False]
        assert bound(own, backend="cpu:gloo,cuda:nccl") == [True, True]

    @pytest.mark.parametrize(
        ("policy", "fallback"),
        [("auto", "gloo"), ("gloo", "gloo"), ("error", None), ("nccl", None), ("ipc", None), ("staged", None)],
    )
    def test_gloo_where_nccl_refuses_them(self, policy, fallback):
        """If NCCL refuses ranks that share nothing, the job uses Gloo. Other failures have no fallback, and no time is reserved for it."""
        found = plan(job(gpu("a"), gpu("b", index=1), num_visible_devices=2), on_shared_device=policy)
        assert (found.fallback, found.is_trial) == (fallback, False)
        assert found.falls_back_from(SharedDeviceError("x")) == (fallback is not None)
        for other in (VerificationError, OutOfMemoryError, StartTimeoutError):
            assert not found.falls_back_from(other("x"))

    def test_pair_of_backends_is_kept(self):
        """A pair with NCCL for CUDA stays as the user wrote it."""
        assert plan(job(gpu("a"), gpu("b")), backend="cpu:gloo,cuda:nccl").backend == "cpu:gloo,cuda:nccl"

    @pytest.mark.parametrize(("platform", "expected"), [("linux", "gloo"), ("win32", "cpu:gloo,cuda:staged")])
    @pytest.mark.parametrize(("backend", "num_warnings"), [("auto", 0), ("nccl", 1), ("cpu:gloo,cuda:nccl", 1)])
    def test_gloo_without_nccl(self, backend, num_warnings, platform, expected):
        """Without NCCL torch uses Gloo on the devices, on Windows staged, with a warning if NCCL was requested."""
        workers = job(gpu("a"), gpu("b"), platform=platform, nccl_available=False, nccl_version=None)
        found = plan(workers, backend=backend)
        assert (found.backend, found.device_type, len(found.warnings)) == (expected, "cuda", num_warnings)
        assert ("pytorch#186535" in found.reason) == (platform == "win32")

    def test_gloo_where_one_rank_lacks_nccl(self):
        """If one torch has no NCCL, the whole job uses none, with a warning that names the rank."""
        (warning,) = plan(
            [*job(gpu("a"), gpu("b")), worker(2, gpu("c"), nccl_available=False, nccl_version=None)]
        ).warnings
        assert warning.startswith("torch of rank 2 has no NCCL, so all 3 ranks use gloo: gradients go through")

    def test_mixed_nccl_versions(self):
        """NCCL refuses ranks of different versions; the error lists the version of each rank."""
        workers = [worker(0, gpu("a")), worker(1, gpu("b"), node="2", nccl_version=(2, 30, 7))]
        with pytest.raises(IncompatibleWorkersError, match=r"rank 0: 2\.28\.9; rank 1: 2\.30\.7"):
            plan(workers)
        assert plan(workers, backend="gloo").backend == "gloo"

    def test_unknown_nccl_version(self):
        """A version that could not be read is no different version: nccl, as stock."""
        found = plan([worker(0, gpu("a")), worker(1, gpu("b"), nccl_version=None)])
        assert (found.backend, found.reason[-30:]) == ("nccl", "of unknown version and 2.28.9)")

    def test_windows_and_linux(self):
        """Gloo cannot connect Windows and Linux, so no backend can: the error names the ranks on Windows."""
        with pytest.raises(IncompatibleWorkersError, match="Windows on rank 1, Linux or macOS on the others"):
            plan([worker(0), worker(1, node="2", platform="win32")])


class TestShared:
    """Two ranks on one device."""

    workers = job(gpu("ab12cd34-56"), gpu("ab12cd34-56"))

    def test_auto_uses_gloo_and_logs_the_reason_in_one_line(self):
        """The exact log line if ipc cannot be used on device memory."""
        found = plan(self.workers)
        assert found.reason == (
            "ranks 0,1 share GPU-ab12cd34 (NVIDIA H200) on node 10.0.0.1: using gloo (NCCL 2.28.9 refuses shared devices)"
        )
        assert (found.backend, found.device_type, found.device_of(self.workers[1])) == ("gloo", "cuda", "cuda:0")

    def test_auto_does_not_use_ipc_yet(self):
        """Until a run on a GPU has proven ipc on device memory, auto uses Gloo even if ipc could run."""
        found = plan(job(gpu(), gpu(), ipc_device_memory_missing=None))
        assert (found.backend, found.fallback) == ("gloo", None)

    def test_error_policy(self):
        """on_shared_device='error' reports the share map, the advice and the ranks."""
        with pytest.raises(SharedDeviceError, match=r"ranks 0,1 share GPU-.*whole GPU per worker") as caught:
            plan(self.workers, on_shared_device="error")
        assert caught.value.ranks == (0, 1)

    @pytest.mark.parametrize("backend", ["gloo", "ipc", "nccl"])
    def test_error_policy_holds_for_every_backend(self, backend):
        """Sharing is refused for every backend, even one that could work."""
        with pytest.raises(SharedDeviceError):
            plan(self.workers, backend=backend, on_shared_device="error")

    def test_gloo_policy(self):
        """on_shared_device='gloo' is used even if ipc could run."""
        found = plan(job(gpu(), gpu(), ipc_device_memory_missing=None), on_shared_device="gloo")
        assert (found.backend, found.fallback) == ("gloo", None)

    def test_ipc_policy_without_the_means(self):
        """If ipc cannot be used, on_shared_device='ipc' names the worker and what is missing."""
        with pytest.raises(BackendUnavailableError, match=r"rank 0 .*no ipc here"):
            plan(self.workers, on_shared_device="ipc")

    def test_ipc_policy_has_no_way_back(self):
        """An explicit ipc has no fallback."""
        found = plan(job(gpu(), gpu(), **_IPC), on_shared_device="ipc")
        assert (found.backend, found.fallback, found.warnings) == ("ipc", None, ())
        assert found.reason.endswith("using ipc (as requested)")

    def test_ipc_policy_without_device_memory(self):
        """If ranks cannot map each other's device memory, ipc stages CUDA tensors, and the warning states the reason."""
        found = plan(job(gpu(), gpu(), ipc_host_memory_missing=None), on_shared_device="ipc")
        assert found.backend == "ipc"
        (warning,) = found.warnings
        assert re.search(r"stages CUDA tensors through host memory.*\(rank 0 \(.*\): no ipc here\)", warning)

    def test_ipc_policy_on_several_devices(self):
        """Device memory supports a group on one device only."""
        workers = job(gpu("a"), gpu("a"), gpu("b"), gpu("b"), **_IPC)
        (warning,) = plan(workers, on_shared_device="ipc").warnings
        assert "stages CUDA tensors through host memory" in warning
        assert "the workers are on 2 devices" in warning

    @pytest.mark.parametrize(
        ("platform", "options", "backend"),
        [
            ("linux", {"on_shared_device": "staged"}, "cpu:gloo,cuda:staged"),
            ("linux", {"backend": "staged"}, "staged"),
            ("linux", {"backend": "cpu:gloo,cuda:staged"}, "cpu:gloo,cuda:staged"),
            ("linux", {"backend": "gloo"}, "gloo"),
            ("linux", {"backend": "nccl", "on_shared_device": "staged"}, "cpu:gloo,cuda:staged"),
            ("win32", {}, "cpu:gloo,cuda:staged"),
            ("win32", {"on_shared_device": "gloo"}, "cpu:gloo,cuda:staged"),
            ("win32", {"backend": "gloo"}, "gloo"),
            ("win32", {"backend": "cpu:gloo,cuda:gloo"}, "cpu:gloo,cuda:gloo"),
        ],
    )
    def test_staged(self, platform, options, backend):
        """By policy or by name. On Windows also wherever a policy leads to Gloo, which is used there only if it is named."""
        found = plan(job(gpu(), gpu(), platform=platform, **_NO_NCCL), **options)
        assert (found.backend, found.device_type, found.fallback) == (backend, "cuda", None)
        by_name = platform == "win32" and "gloo" in options.get("backend", "")
        assert ["pytorch#186535" in warning for warning in found.warnings] == [by_name] * len(found.warnings)
        assert len(found.warnings) == (by_name or options.get("backend") == "nccl")

    @pytest.mark.parametrize(
        ("platform", "options"),
        [
            ("linux", {"on_shared_device": "staged"}),
            ("linux", {"backend": "staged"}),
            ("win32", {}),
            ("win32", {"on_shared_device": "gloo"}),
        ],
    )
    def test_staged_that_cannot_be_used(self, platform, options):
        """It does not become Gloo, but an error with the ranks and the advice."""
        workers = job(gpu(), gpu(), platform=platform, staged_missing="torch 2.6.0 cannot", **_NO_NCCL)
        # An explicit Gloo would end the process on Windows.
        instead = "fix this, or use backend='gloo'" if platform == "linux" else "install such a torch"
        with pytest.raises(
            BackendUnavailableError, match=rf"rank 0 .*: torch 2\.6\.0 cannot\. To go on, {instead}"
        ) as caught:
            plan(workers, **options)
        assert caught.value.ranks == (0, 1)

    @pytest.mark.parametrize(("ranks", "ctas"), [(2, "4"), (3, "2"), (8, "1"), (16, "1")])
    def test_nccl_policy_sets_the_flags(self, ranks, ctas):
        """With NCCL 2.30 and newer: multi-rank on, NVLS off, and 8 CTAs divided by the ranks on the fullest device."""
        found = plan(job(*[gpu()] * ranks, nccl_version=(2, 30, 7)), on_shared_device="nccl")
        assert found.backend == "nccl"
        assert found.env_defaults == {
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_MAX_CTAS": ctas,
        }

    def test_nccl_policy_across_nodes(self):
        """Across nodes GPU-direct is kept local."""
        workers = [worker(rank, gpu(f"{rank // 2}"), node=f"{rank // 2}", nccl_version=(2, 30, 7)) for rank in range(4)]
        assert plan(workers, on_shared_device="nccl").env_defaults["NCCL_NET_GDR_LEVEL"] == "LOC"

    def test_nccl_policy_keeps_and_reports_the_users_flags(self):
        """A variable that the user set is not changed, and is named."""
        workers = job(gpu(), gpu(), nccl_version=(2, 30, 7), env={"NCCL_MAX_CTAS": "16"})
        assert plan(workers, on_shared_device="nccl").warnings == ("NCCL_MAX_CTAS=16 was set by the user and is kept",)

    @pytest.mark.parametrize("version", [(2, 29, 7), None])
    def test_nccl_policy_on_an_old_nccl(self, version):
        """NCCL below 2.30 does not support it; the error contains the version."""
        with pytest.raises(
            BackendUnavailableError, match=r"NCCL (2\.29\.7|of unknown version) \(ranks 0,1\)\. .*2\.30 or newer"
        ):
            plan(job(gpu(), gpu(), nccl_version=version), on_shared_device="nccl")

    @pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
    def test_explicit_nccl_is_overridden_with_a_warning(self, backend):
        """The policy overrides an explicit NCCL, and the warning names it."""
        found = plan(self.workers, backend=backend)
        assert found.backend == "gloo"
        assert len(found.warnings) == 1
        assert f"backend={backend!r} cannot be used" in found.warnings[0]
        assert "2 of 2 ranks share a GPU" in found.warnings[0]

    def test_explicit_pair_is_kept_with_ncclss_own_flags(self):
        """NCCL's flags make the requested pair work, so nothing is overridden."""
        workers = job(gpu(), gpu(), nccl_version=(2, 30, 7))
        found = plan(workers, backend="cpu:gloo,cuda:nccl", on_shared_device="nccl")
        assert (found.backend, found.warnings) == ("cpu:gloo,cuda:nccl", ())

    def test_explicit_gloo(self):
        """An explicit Gloo is used, and the share map is still reported."""
        found = plan(self.workers, backend="gloo")
        assert (found.backend, len(found.share_groups), found.warnings) == ("gloo", 1, ())

    def test_shared_without_nccl(self):
        """Windows workers that share a device use Gloo, and the reason is that NCCL is missing."""
        found = plan(job(gpu(), gpu(), nccl_available=False, nccl_version=None))
        assert found.reason.endswith("using gloo (torch has no NCCL)")

    def test_a_newer_nccl_refuses_by_default(self):
        """From 2.30 on on_shared_device='nccl' enables it; the doctor's line on NCCL says the same."""
        found = plan(job(gpu(), gpu(), nccl_version=(2, 30, 7)))
        assert found.reason.endswith("using gloo (NCCL 2.30.7 refuses shared devices by default)")

    def test_gloo_for_fractions_is_a_warning(self):
        """What sharing costs and how many ranks share, in one line; which ranks share is in the reason only."""
        found = plan([*self.workers, worker(2, gpu("b"))])
        assert found.warnings == (
            "2 of 3 ranks share a GPU, so all ranks use gloo instead of nccl: gradients go through host memory and TCP. "
            "on_shared_device='gloo' accepts this without a warning, 'error' refuses such a start.",
        )
        assert found.reason.startswith("ranks 0,1 share GPU-a")
        assert plan(self.workers, on_shared_device="gloo").warnings == ()

    @pytest.mark.parametrize(
        ("node_gpus", "advised"),
        [({}, False), ({"node1": 1}, False), ({"node1": 2}, True), ({"node1": 1, "node2": 1}, True)],
    )
    def test_more_than_half_a_gpu_is_advised_where_ray_has_the_gpus(self, node_gpus, advised):
        """Each worker would need a GPU of its own, on whatever node."""
        (warning,) = plan(self.workers, node_gpus).warnings
        assert ("Ray has 2 GPUs: ask for more than half a GPU per worker and NCCL can be used" in warning) is advised
        assert ("half a GPU" in warning) is advised
        hints = plan(self.workers, {**node_gpus, "node1": 2}, on_shared_device="gloo").hints
        assert len([hint for hint in hints if "half a GPU" in hint]) == 1

    def test_a_node_with_gpus_for_its_own_workers_only(self):
        """Two GPUs on the first node and one on the second do not suffice for four workers: no advice to ask for more."""
        workers = [*self.workers, worker(2, gpu("b"), "2"), worker(3, gpu("b"), "2")]
        for policy in ("auto", "gloo"):
            found = plan(workers, {"node1": 2, "node2": 1}, on_shared_device=policy)
            assert not [text for text in (*found.warnings, *found.hints) if "half a GPU" in text]

    def test_gloo_for_whole_gpus_is_a_warning_of_its_own(self):
        """Workers with whole GPUs cannot ask for more: the cluster allocates one twice."""
        (warning,) = plan(job(*[gpu(f"{rank % 63}") for rank in range(64)], resources={"GPU": 1.0})).warnings
        assert warning.startswith("2 of 64 ranks share a GPU, so all ranks use gloo")
        assert "asked for a whole GPU, so the cluster assigns one GPU several times" in warning
        assert "half a GPU" not in warning

    def test_gloo_for_slices_has_its_own_warning(self):
        """NCCL treats slices as one GPU: the advice is a newer NCCL."""
        (warning,) = plan(job(mig("1"), mig("2"))).warnings
        assert "NCCL 2.30.7 or newer accepts MIG slices as different devices" in warning

    def test_no_nccl_anywhere_is_no_warning(self):
        """If torch has no NCCL, nothing was replaced: Windows workers are not warned at every start."""
        assert plan(job(gpu(), gpu(), nccl_available=False, nccl_version=None)).warnings == ()

    @pytest.mark.parametrize("policy", ["auto", "gloo", "ipc"])
    def test_users_own_nccl_switch(self, policy):
        """With NCCL_MULTI_RANK_GPU_ENABLE=1 on all sharing ranks the backend is nccl with Gloo as fallback; the policy is overridden."""
        switch = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        workers = [worker(rank, gpu("a"), env=switch, nccl_version=(2, 30, 7)) for rank in range(2)]
        found = plan([*workers, worker(2, gpu("b"), nccl_version=(2, 30, 7))], on_shared_device=policy)
        assert (found.backend, found.fallback) == ("nccl", None if policy == "ipc" else "gloo")
        assert found.env_defaults["NCCL_NVLS_ENABLE"] == "0"
        assert len(found.warnings) == (policy != "auto")

    def test_users_own_nccl_switch_and_error(self):
        """The policy "error" is the stricter setting of the same user."""
        workers = job(gpu(), gpu(), env={"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, nccl_version=(2, 30, 7))
        with pytest.raises(SharedDeviceError):
            plan(workers, on_shared_device="error")

    def test_containers_of_one_host(self):
        """NCCL does not detect sharing across host names; the plan does, by UUID."""
        workers = [worker(0, gpu()), worker(1, gpu(), node="2", hostname="container2", boot_id="boot1")]
        found = plan(workers)
        assert found.backend == "gloo"
        assert "on nodes 10.0.0.1, 10.0.0.2" in found.reason
        assert "does not see it across host names" in found.reason

    def test_only_some_ranks_share(self):
        """One shared device decides for the whole job."""
        found = plan([*job(gpu("a"), gpu("a"), gpu("b"))])
        assert found.backend == "gloo"
        assert [group.ranks for group in found.share_groups] == [(0, 1)]

    def test_many_groups_are_summed_up(self):
        """The line stays readable with many shared devices."""
        found = plan(job(*[gpu(f"{rank // 2}") for rank in range(20)]))
        assert "and 7 more such groups: using gloo" in found.reason


class TestMig:
    """MIG slices: own UUIDs, one bus id."""

    def test_slices_of_one_gpu_collide_below_2_30_7(self):
        """NCCL below 2.30.7 compares bus ids, so slices of one GPU cannot use it."""
        found = plan(job(mig("1"), mig("2"), nccl_version=(2, 30, 3)))
        assert found.backend == "gloo"
        assert "MIG slices of GPU-a" in found.reason
        assert "compares PCI bus ids" in found.reason

    def test_slices_of_one_gpu_from_2_30_7(self):
        """From 2.30.7 on NCCL compares UUIDs and is used, with Gloo as fallback because users saw refusals."""
        found = plan(job(mig("1"), mig("2"), nccl_version=(2, 30, 7)))
        assert (found.backend, found.fallback) == ("nccl", "gloo")

    def test_slices_with_ncclss_own_flags(self):
        """on_shared_device='nccl' sets NCCL's flags for slices of one GPU, which users saw refused without them (nccl#1716)."""
        found = plan(job(mig("1"), mig("2"), nccl_version=(2, 30, 7)), on_shared_device="nccl")
        assert (found.backend, found.env_defaults["NCCL_MULTI_RANK_GPU_ENABLE"]) == ("nccl", "1")

    def test_ipc_stages_between_slices(self):
        """Slices cannot map each other's memory: ipc stages, with a warning."""
        found = plan(job(mig("1"), mig("2"), **_IPC), on_shared_device="ipc")
        assert found.backend == "ipc"
        assert re.search(r"stages CUDA tensors .*cannot map each other's memory", found.warnings[0])

    def test_one_slice_shared(self):
        """Two ranks on one slice share it like a device."""
        found = plan(job(mig("1"), mig("1"), nccl_version=(2, 30, 7)))
        assert [group.same_device for group in found.share_groups] == [True]

    def test_slices_of_different_gpus(self):
        """Slices of different GPUs are different devices at any version."""
        found = plan(job(mig("1", "a"), mig("2", "b")))
        assert (found.backend, found.is_trial, found.warnings) == ("nccl", False, ())


class TestComputeMode:
    """Compute modes that forbid sharing."""

    def test_exclusive_process_on_a_shared_device(self):
        """EXCLUSIVE_PROCESS without MPS is reported before CUDA's busy error, with both fixes."""
        with pytest.raises(SharedDeviceError, match=r"EXCLUSIVE_PROCESS.*nvidia-smi -c DEFAULT.*MPS"):
            plan(job(*[gpu(compute_mode="exclusive_process")] * 2), backend="gloo")

    def test_exclusive_process_with_mps(self):
        """MPS makes the clients one process for the device."""
        assert plan(job(*[gpu(compute_mode="exclusive_process")] * 2, mps_reachable=True)).backend == "gloo"

    def test_exclusive_process_on_own_devices(self):
        """An exclusive device of one worker is fine."""
        workers = job(gpu("a", compute_mode="exclusive_process"), gpu("b", compute_mode="exclusive_process"))
        assert plan(workers).backend == "nccl"

    def test_prohibited(self):
        """No process can use a PROHIBITED device, shared or not."""
        with pytest.raises(MissingDeviceError, match="rank 1 is in compute mode PROHIBITED"):
            plan(job(gpu("a"), gpu("b", compute_mode="prohibited")))


class TestHints:
    """Hints on better settings."""

    def test_spread(self):
        """If Ray has a GPU for every rank on the node, the hint says that NCCL could be used."""
        workers = job(gpu(), gpu())
        accepted = {"on_shared_device": "gloo"}
        (hint,) = plan(workers, {"node1": 2.0}, **accepted).hints
        assert "Ray has 2 GPUs on node 10.0.0.1 and placed ranks 0,1 on one" in hint
        # The node has more GPUs than Ray was started with, as with `CUDA_VISIBLE_DEVICES=1 ray start --num-gpus=1`.
        assert plan(workers, {"node1": 1.0}, **accepted).hints == ()
        assert plan(workers, **accepted).hints == ()
        # Only the warning about the cost contains the same advice.
        assert plan(workers, {"node1": 2.0}).hints == ()
        found = plan(workers, {"node1": 2.0}, backend="nccl", **accepted)
        assert "cannot be used as it is" in found.warnings[0]
        assert found.hints == (hint,)

    def test_fraction(self):
        """A fraction that is not 1/k leaves part of each GPU unused; the hint names a fraction with which one more fits."""
        workers = job(gpu(), gpu(), resources={"GPU": 0.3})
        said = "with 0.3 GPU per worker, 3 fit on one GPU and 0.1 of it stays unused"
        assert any(said in h and h.endswith("; with 0.25 GPU per worker, 4 would fit") for h in plan(workers).hints)
        assert not any("unused" in h for h in plan(job(gpu(), gpu(), resources={"GPU": 1 / 3})).hints)

    @pytest.mark.parametrize(
        ("fraction", "is_advised"), [(0.22, False), (0.23, False), (0.45, False), (0.4, True), (0.6, True)]
    )
    def test_room_for_contexts(self, fraction, is_advised):
        """Under a cap on memory, the part of a GPU that a few contexts need is not unused; docs/recipes/one-gpu.md advises 0.22."""
        workers = job(gpu(), resources={"GPU": fraction})
        assert any("unused" in hint for hint in plan(workers).hints)
        assert any("unused" in hint for hint in plan(workers, limit_gpu_memory=True).hints) is is_advised

    def test_multi_rank_variable(self):
        """If the user's multi-rank variable has no effect on the chosen backend, this is reported with the reason."""
        workers = job(gpu(), gpu(), env={"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
        assert any("=1 has no effect: NCCL 2.28.9 is older than 2.30" in h for h in plan(workers).hints)
        workers = job(gpu(), gpu(), env={"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, nccl_version=(2, 30, 7))
        assert any("=1 has no effect: gloo was requested" in h for h in plan(workers, backend="gloo").hints)
        workers[0] = worker(0, gpu(), nccl_version=(2, 30, 7))
        assert any("=1 has no effect: it is not set on rank 0" in h for h in plan(workers).hints)

    def test_gpus_that_were_not_requested(self):
        """Ray 2.60 does not hide them from workers without GPUs, and the train function would use them."""
        (hint,) = plan(job(None, None, num_visible_devices=2)).hints
        assert hint.startswith("ranks 0,1 can use GPUs that Ray did not reserve")
        assert "use_gpu=True" in hint
        assert "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1" in hint
        assert plan(job(None, None)).hints == ()

    def test_devices_that_were_chosen_before_rays_variable(self):
        """Whole GPUs with different ids in Ray but one UUID in CUDA: the cluster is not to blame."""
        workers = [worker(rank, gpu(), resources={"GPU": 1.0}, gpu_ids=(str(rank),)) for rank in range(2)]
        (warning,) = plan(workers).warnings
        assert "Ray assigned ranks 0,1 the GPUs 0 and 1 of node 10.0.0.1" in warning
        assert "chosen before Ray set CUDA_VISIBLE_DEVICES" in warning
        assert "time-slicing" not in warning
        apart = [worker(rank, gpu(), node=str(rank), resources={"GPU": 1.0}, gpu_ids=("0",)) for rank in range(2)]
        assert "time-slicing" in plan(apart).warnings[0]

    def test_local_rank(self):
        """LOCAL_RANK is beyond the visible devices in every job that shares; CUDA reports this itself."""
        assert plan(job(gpu(), gpu())).hints == ()

    def test_local_rank_of_another_device(self):
        """Four ranks on two devices: LOCAL_RANK 1 is the index of another rank's device."""
        devices = (gpu("a"), gpu("a"), gpu("b", index=1), gpu("b", index=1))
        hints = plan(job(*devices, num_visible_devices=2)).hints
        assert any("LOCAL_RANK 1 is not the device of rank 1 on node 10.0.0.1, which is cuda:0" in h for h in hints)

    def test_nodes_of_one_host(self):
        """DeepSpeed counts local ranks by host name, across Ray's nodes (ray#37212)."""
        apart = [worker(rank, gpu(str(rank)), node=str(rank)) for rank in range(2)]
        assert not any("DeepSpeed" in hint for hint in plan(apart).hints)
        together = [replace(each, hostname="host", boot_id="boot") for each in apart]
        (hint,) = [hint for hint in plan(together).hints if "DeepSpeed" in hint]
        assert hint.startswith("2 Ray nodes are on host host: LOCAL_RANK counts the ranks of each Ray node")


class TestVerifyOn:
    """The devices that each worker verifies the group on."""

    @pytest.mark.parametrize(
        ("backend", "device", "expected"),
        [
            ("nccl", "cuda:1", ("cuda:1",)),
            ("cpu:gloo,cuda:nccl", "cuda:1", ("cpu", "cuda:1")),
            ("cpu:gloo,cuda:staged", "cuda:0", ("cpu", "cuda:0")),
            ("gloo", "cuda:0", ("cuda:0",)),
            ("ipc", "cuda:0", ("cuda:0",)),
            ("gloo", "cpu", ("cpu",)),
            # Parts of a pair for a device type that the worker does not use.
            ("cpu:gloo", "cuda:0", ("cpu",)),
            ("cuda:gloo", "cpu", ()),
            ("cpu:gloo,cuda:staged", "cpu", ("cpu",)),
            # Ray assigned no device: the script chooses one later.
            ("nccl", "cuda", ()),
            ("cpu:gloo,cuda:nccl", "cuda", ("cpu",)),
        ],
    )
    def test_devices(self, backend, device, expected):
        """One for each backend of the group, the worker's own last; never a device that Ray did not assign."""
        rendezvous = WorkerRendezvous(master_addr="127.0.0.1", master_port=1)
        facts = {
            "rank": 0,
            "world_size": 2,
            "rendezvous": rendezvous,
            "timeout_s": 9,
            "budget_s": 9,
            "attempt": "first",
        }
        assert WorkerPlan(backend=backend, device=device, verify=True, **facts).verify_on == expected
        assert WorkerPlan(backend=backend, device=device, verify=False, **facts).verify_on == ()


class TestFallback:
    """The fallback."""

    def test_one_step_down(self):
        """A failed NCCL becomes Gloo with a warning that contains the cause, and has no further fallback."""
        workers = job(gpu(), gpu(), env={"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, nccl_version=(2, 30, 7))
        found = plan(workers).after_failure(VerificationError("wrong sum.", advice="Do not train with this group."))
        assert (found.backend, found.fallback) == ("gloo", None)
        assert found.reason == (
            "ranks 0,1 share GPU-a (NVIDIA H200) on node 10.0.0.1: using gloo (nccl failed its verification)"
        )
        assert found.warnings == (
            "ranks 0,1 share GPU-a (NVIDIA H200) on node 10.0.0.1: nccl failed its verification, fell back to gloo, so that "
            "gradients go through host memory and TCP: wrong sum",
        )

    def test_no_step_down(self):
        """The stock choice has no fallback."""
        with pytest.raises(ValueError, match="no fallback from gloo"):
            plan(job(None)).after_failure(VerificationError("x"))


class TestAccelerate:
    """Variables for Hugging Face Accelerate, where it cannot detect the situation itself."""

    @staticmethod
    def env(workers, **options):
        """Return the variables of the last worker of a job."""
        return dict(decide_start(workers, Settings(**options)).env_of(workers[-1]))

    def test_on_a_shared_device(self):
        """On a shared device Accelerate must not use LOCAL_RANK as the device index."""
        assert self.env(job(gpu(), gpu())) == {"ACCELERATE_BYPASS_DEVICE_MAP": "true"}

    def test_where_gpus_are_missing(self):
        """GPU workers that train on the CPU: without the variable Accelerate does not run distributed."""
        workers = job(None, None, resources={"GPU": 0.5}, cuda_missing="no driver")
        assert self.env(workers, on_missing_cuda="cpu") == {"ACCELERATE_USE_CPU": "true"}

    def test_nothing_where_nothing_differs_from_stock(self):
        """CPU workers and workers with their own devices have the environment of stock Ray Train."""
        assert self.env(job(None, None)) == {}
        assert self.env(job(gpu("a"), gpu("b", index=1), num_visible_devices=2)) == {}
