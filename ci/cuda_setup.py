"""Set up a CUDA build of torch, Ray, and CUDA libraries that run on the CPU, with pip and g++.

=======================  =============================================================================================
libcudart.so.13 or .12   ci/cuda/*.cpp; other functions that torch uses return cudaErrorNotSupported
libcuda.so.1             empty; the driver's functions are in the library above, which it loads
libnccl.so.2             ci/cuda/nccl*.cpp
nvml/libnvidia-ml.so.1   ci/cuda/nvml.cpp and the files that it needs
rig_error_table.hpp      names and texts of the errors, read from torch's real runtime library
=======================  =============================================================================================

One folder for each torch contains the virtual environment, the compiled libraries in ``lib-HASH``, and the logs. The
project is not installed there: ci/cuda.py puts the work tree on the path.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from common import ROOT, make_venv

SOURCES = ROOT / "ci" / "cuda"
# Packages that the tests need besides torch and Ray, as in pyproject.toml.
_TESTS = ("pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "expecttest", "psutil", "filelock", "nvidia-ml-py")
_TESTS += ("packaging", "scikit-learn", "tqdm", "matplotlib")
_LIBRARIES = ("lightning", "accelerate", "transformers")
_TOOLS = {"g++": "g++", "nm": "binutils", "ar": "binutils"}
_FLAGS = ("-std=c++17", "-O2", "-g", "-fPIC", "-Wall", "-pthread")
_NEEDED_GB = 12
_OLD_SECONDS = 24 * 3600
_ERROR_TABLE = """
import ctypes, json, sys
runtime = ctypes.CDLL(sys.argv[1])
runtime.cudaGetErrorName.restype = runtime.cudaGetErrorString.restype = ctypes.c_char_p
found = [(code, runtime.cudaGetErrorName(code).decode(), runtime.cudaGetErrorString(code).decode()) for code in range(1001)]
print(json.dumps([entry for entry in found if entry[1] != "unrecognized error code"]))
"""
_STUBS = """
// Made by ci/cuda_setup.py: functions that torch's libraries take and the emulated ones lack.
#include <stdio.h>
#include <stdlib.h>
#define MISSING(name, error) \\
  extern "C" int name() { \\
    if (getenv("CUDA_RIG_TRACE")) fprintf(stderr, "cuda rig: " #name " is not there\\n"); \\
    return error; \\
  }
"""


@dataclass(frozen=True)
class Cell:
    """Versions that belong together.

    Args:
        ray: Version of Ray.
        runtime: Name of CUDA's runtime library.
        headers: Requirements of wheels with headers that torch does not depend on.
        include: Folders of the headers, below site-packages.
        real_runtime: The runtime library of torch's dependencies, below site-packages.
        nccl: Version of NCCL in torch's dependencies.
    """

    ray: str
    runtime: str
    headers: tuple[str, ...]
    include: tuple[str, ...]
    real_runtime: str
    nccl: str


_CUDA_13 = Cell(
    ray="2.60.0",
    runtime="libcudart.so.13",
    headers=("nvidia-cuda-crt==13.0.*", "nvidia-cuda-cccl==13.0.*"),
    include=("nvidia/cu13/include", "nvidia/nccl/include"),
    real_runtime="nvidia/cu13/lib/libcudart.so.13",
    nccl="2.30.7",
)
CELLS = {
    "2.14.1": _CUDA_13,
    "2.15.0": replace(_CUDA_13, headers=("nvidia-cuda-crt==13.2.*", "nvidia-cuda-cccl==13.2.*")),
    "2.11.0": replace(_CUDA_13, nccl="2.28.9"),
    "2.7.1": Cell(
        ray="2.51.1",
        runtime="libcudart.so.12",
        headers=("nvidia-cuda-nvcc-cu12==12.6.*", "nvidia-cuda-cccl-cu12==12.6.*"),
        include=tuple(f"nvidia/{name}/include" for name in ("cuda_runtime", "cuda_nvcc", "cuda_cccl", "nccl")),
        real_runtime="nvidia/cuda_runtime/lib/libcudart.so.12",
        nccl="2.26.2",
    ),
}


class Rig:
    """A folder with torch, Ray and the emulated libraries.

    Args:
        folder: Absolute path; made by `set_up`.
        torch: A key of CELLS.
    """

    def __init__(self, folder: Path, torch: str) -> None:
        self.folder = folder
        self.torch = torch
        self.cell = CELLS[torch]
        self.venv = folder / "venv"
        self.lib = folder / f"lib-{self._sources_hash()}"
        self._logs = folder / "logs"
        self._lock_held = -1  # file descriptor, during set_up
        version = "{}.{}".format(*sys.version_info[:2])
        self._site = self.venv / "lib" / f"python{version}" / "site-packages"
        packages = [f"torch=={torch}", f"ray[train]=={self.cell.ray}", *self.cell.headers, *_TESTS]
        self._stages = {"packages": packages, "libraries": list(_LIBRARIES)}

    def why_not(self) -> str | None:
        """Return what this machine lacks, None if the emulation can be or is set up."""
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            return f"needs Linux on x86-64; this is {sys.platform} on {platform.machine()}"
        for tool, package in _TOOLS.items():
            if shutil.which(tool) is None:
                return f"needs {tool}, which the package {package} has"
        if self._stamp("packages").exists():
            return None
        if subprocess.run([sys.executable, "-c", "import ensurepip, pip"], capture_output=True, check=False).returncode:
            return f"needs pip and ensurepip for {sys.executable}, which the packages python3-pip and python3-venv have"
        for requirement in self._stages["packages"][: -len(_TESTS)]:
            name, wanted = requirement.replace("[train]", "").split("==")
            if not any(_is_version(found, wanted) for found in _versions(name)):
                version = "{}.{}".format(*sys.version_info[:2])
                return f"the package sources of pip have no {name} {wanted} for Python {version} on this machine"
        return None

    def set_up(self, libraries: bool = False, always_say: bool = False) -> None:
        """Set up what is missing: minutes the first time, seconds after a change of the sources, nothing later.

        Args:
            libraries: Also install Lightning, Accelerate and Transformers.
            always_say: Print time and disk space even if nothing was missing.

        Raises:
            SystemExit: A command failed; the message names its log.
        """
        started = time.monotonic()
        self._logs.mkdir(parents=True, exist_ok=True)
        with self._lock():
            made = self._install("packages")
            made |= libraries and self._install("libraries")
            made |= self._build()
        if made or always_say:
            seconds = time.monotonic() - started
            _say(f"torch {self.torch}: set up in {seconds:.0f} s, {self.disk_gb():.1f} GB in {self.folder}")

    def disk_gb(self) -> float:
        """Return the disk space of the folder in GB."""
        files = (os.lstat(Path(at, name)) for at, _, names in os.walk(self.folder) for name in names)
        return sum(file.st_blocks * 512 for file in files) / 1e9

    @property
    def _python(self) -> Path:
        return self.venv / "bin" / "python"

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say(f"another process sets {self.folder} up: waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            self._lock_held = file.fileno()
            yield

    def _call(self, log: str, *command: str | Path) -> None:
        path = self._logs / f"{log}.txt"
        line = shlex.join(map(str, command))
        with path.open("a") as output:
            print(f"+ {line}", file=output, flush=True)
            # A pip that outlives this process keeps the lock, so no other process writes to the folder.
            code = subprocess.run(
                list(map(str, command)), stdout=output, stderr=output, pass_fds=[self._lock_held], check=False
            ).returncode
        if code:
            last = "".join(path.read_text(errors="replace").splitlines(keepends=True)[-20:])
            raise SystemExit(f"ci/cuda.py: {line} ended with {code}; its log is {path}:\n{last}")

    # ---- packages

    def _stamp(self, stage: str) -> Path:
        parts = [sys.version, *self._stages["packages"], *(self._stages[stage] if stage != "packages" else [])]
        return self.venv / f".ready-{stage}-{_hash(' '.join(parts).encode())}"

    def _install(self, stage: str) -> bool:
        """Install the packages of one stage; return whether they were missing."""
        if self._stamp(stage).exists():
            return False
        pip = [self._python, "-m", "pip", "install", "--disable-pip-version-check", "--no-warn-script-location"]
        pip += ["--prefer-binary", *self._stages[stage]]
        if stage == "packages":
            free_gb = shutil.disk_usage(self.folder).free / 1e9
            if free_gb < _NEEDED_GB:
                raise SystemExit(f"ci/cuda.py: {self.folder} has {free_gb:.0f} GB free, and {_NEEDED_GB} are needed")
            _say(f"torch {self.torch} and Ray {self.cell.ray}: installing into {self.venv}, some minutes and 7 GB")
            shutil.rmtree(self.venv, ignore_errors=True)
            make_venv(self.venv)
        else:
            constraints = self.folder / "constraints.txt"
            constraints.write_text(f"torch=={self.torch}\nray=={self.cell.ray}\n")
            pip += ["--constraint", constraints]
        self._call("pip", *pip)
        self._stamp(stage).touch()
        return True

    # ---- libraries

    def _sources_hash(self) -> str:
        files = [Path(__file__), *sorted(SOURCES.glob("*.[ch]pp"))]
        parts = [f"{file.name}\0".encode() + file.read_bytes() for file in files]
        return _hash(self.torch.encode(), *parts)

    def _build(self) -> bool:
        """Compile and link the libraries; return whether they were missing."""
        if self.lib.exists():
            os.utime(self.lib)
            return False
        for old in [*self.folder.glob("lib-*"), *self.folder.glob("objects/*")]:
            if time.time() - old.stat().st_mtime > _OLD_SECONDS:
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        work = self.folder / "build"
        shutil.rmtree(work, ignore_errors=True)
        (work / "nvml").mkdir(parents=True)
        self._write_error_table(work)
        sources = sorted(SOURCES.glob("*.cpp"))
        # One job per core. Object files of unchanged sources and headers are reused.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = dict(zip(sources, pool.map(lambda source: self._compile(source, work), sources), strict=True))
        nccl = [made for source, made in compiled.items() if source.name.startswith("nccl")]
        nvml = [made for source, made in compiled.items() if source.name == "nvml.cpp"]
        others = [made for made in compiled.values() if made not in nccl + nvml]
        self._link_all(work, others, nccl, nvml)
        work.rename(self.lib)
        return True

    def _write_error_table(self, work: Path) -> None:
        command = [self._python, "-c", _ERROR_TABLE, self._site / self.cell.real_runtime]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        rows = "".join(f"    {{{code}, {json.dumps(name)}, {json.dumps(text)}}},\n" for code, name, text in found)
        (work / "rig_error_table.hpp").write_text(
            f"// Made by ci/cuda_setup.py: the answers of cudaGetErrorName and cudaGetErrorString of {self.cell.runtime}.\n"
            "#pragma once\n\nnamespace rig {\n\nstruct ErrorText {\n  int code;\n  const char* name;\n  const char* text;\n};\n"
            f"constexpr ErrorText kErrorTexts[] = {{\n{rows}}};\n\n}}  // namespace rig\n"
        )

    def _compile(self, source: Path, work: Path) -> Path:
        headers = [work / "rig_error_table.hpp", *sorted(SOURCES.glob("*.hpp"))]
        digest = _hash(*(file.read_bytes() for file in [source, *headers]), " ".join(_FLAGS).encode())
        target = self.folder / "objects" / f"{source.stem}-{digest}.o"
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            include = [f"-isystem{self._site / folder}" for folder in self.cell.include]
            command = ["g++", *_FLAGS, f"-I{work}", f"-I{SOURCES}", *include, "-c", source, "-o", work / target.name]
            self._gxx(command)
            (work / target.name).rename(target)
        return target

    def _gxx(self, command: Sequence[str | Path]) -> None:
        """Run the compiler and show its output, including warnings."""
        done = subprocess.run(list(map(str, command)), stderr=subprocess.PIPE, text=True, check=False)
        sys.stderr.write(done.stderr)
        if done.returncode:
            raise SystemExit(f"ci/cuda.py: the emulated libraries do not compile:\n{shlex.join(map(str, command))}")

    def _link_all(self, work: Path, others: list[Path], nccl: list[Path], nvml: list[Path]) -> None:
        runtime, taken = self.cell.runtime, self._taken()
        stubs = self._stubs(work, "cuda", 801, {name for name, of in taken if of.startswith(runtime)}, others)
        names = f'{runtime} {{ global: cuda*; __cuda*; cu*; rig_*; extern "C++" {{ rig::* }}; local: *; }};'
        self._link(work, runtime, names, [*others, stubs])
        against = [f"-L{work}", "-Wl,--no-as-needed", f"-l:{runtime}", "-Wl,-rpath,$ORIGIN"]
        self._link(work, "libcuda.so.1", "{ local: *; };", against)
        if nccl:
            # ncclInternalError
            stubs = self._stubs(work, "nccl", 3, {name for name, of in taken if name.startswith("nccl")}, nccl)
            self._link(work, "libnccl.so.2", "{ global: nccl*; pnccl*; local: *; };", [*nccl, stubs, *against])
        # Link only what NVML calls: this library must have no symbol in common with the runtime library.
        archive = work / "rig.a"
        self._call("link", "ar", "rcs", archive, *others)
        options = ["-Wl,--no-undefined", "-Wl,-soname,libnvidia-ml.so.1"]
        self._link(work / "nvml", "libnvidia-ml.so.1", "{ global: nvml*; local: *; };", [*nvml, archive, *options])
        archive.unlink()

    def _link(self, folder: Path, name: str, versions: str, what: Iterable[str | Path]) -> None:
        script = folder / f"{name}.map"
        script.write_text(versions + "\n")
        options = [f"-Wl,-soname,{name}", f"-Wl,--version-script={script}"]
        self._gxx(["g++", "-shared", *_FLAGS, "-o", folder / name, *what, *options, "-ldl", "-lrt"])
        script.unlink()

    def _stubs(self, work: Path, name: str, error: int, taken: set[str], objects: list[Path]) -> Path:
        """Compile a function for each required name that the objects do not define."""
        listed = subprocess.run(["nm", "--defined-only", "--extern-only", *objects], capture_output=True, check=True)
        defined = {line.split()[-1] for line in listed.stdout.decode().splitlines() if line}
        source = work / f"{name}_stubs.cpp"
        source.write_text(_STUBS + "".join(f"MISSING({missing}, {error})\n" for missing in sorted(taken - defined)))
        self._gxx(["g++", *_FLAGS, "-c", source, "-o", source.with_suffix(".o")])
        return source.with_suffix(".o")

    def _taken(self) -> set[tuple[str, str]]:
        """Return the symbols that the libraries of torch and its dependencies import, with their libraries if known."""
        libraries = [*self._site.glob("torch/lib/*.so*"), *self._site.glob("nvidia/**/*.so*")]
        command = ["nm", "--dynamic", "--undefined-only", *libraries]
        # A nonzero exit code means only that some files are not libraries.
        listed = subprocess.run(command, capture_output=True, check=False).stdout.decode()
        return set(re.findall(r"^ +U (\w+)(?:@+(\S+))?$", listed, re.M))


def _versions(name: str) -> list[str]:
    """Return the versions of a package that pip can install here, none if its sources cannot be reached."""
    command = [sys.executable, "-m", "pip", "index", "versions", name, "--retries", "1", "--disable-pip-version-check"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"^Available versions: (.+)$", listed, re.M)
    return found[1].split(", ") if found else []


def _is_version(found: str, wanted: str) -> bool:
    return found == wanted or (wanted.endswith(".*") and found.startswith(wanted[:-1]))


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _say(text: str) -> None:
    print(f"ci/cuda.py: {text}", file=sys.stderr, flush=True)
