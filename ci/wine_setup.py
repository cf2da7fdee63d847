"""Set up a Windows CPython with Windows wheels under Wine on Debian 12, only from the package sources of apt and pip.

========================  ============================================================================================
Wine 10                   Debian 13's, in its own root directory: Debian 12's Wine 8 cannot stat an inherited file
python311.dll, ``.pyd``   python.org's 3.11.9, from the wheel of panda3d
python.exe                a launcher compiled here, whose manifest declares support of Windows 10
python3.dll               the stable ABI's forwarder, generated here; psutil needs it
Lib                       Debian 12's standard library for 3.11
MSVC runtime              the wheel of msvc-runtime, used before Wine's: with Wine's, Gloo of torch 2.13 never receives
========================  ============================================================================================

Drive W: is the folder. No drive is the machine's own root, so nothing of Linux (/proc, /dev/shm) is visible.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import ROOT

REQUIREMENTS = ROOT / "ci" / "wine-requirements.txt"
_PYTHON_WHEEL = "panda3d==1.10.16"
_RUNTIME_WHEEL = "msvc-runtime==14.44.35112"
_NEEDED_GB = 8
# Programs on this machine, and their packages.
_TOOLS = {
    "debootstrap": "debootstrap",
    "x86_64-w64-mingw32-gcc": "gcc-mingw-w64-x86-64",
    "unzip": "unzip",
    "git": "git",
    "unshare": "util-linux",
    "ip": "iproute2",
}
_FOR_WINDOWS = ["--no-deps", "--only-binary=:all:", "--platform", "win_amd64", "--python-version", "3.11"]
_FOR_WINDOWS += ["--implementation", "cp", "--quiet"]
_RUNTIME = ("msvcp140", "msvcp140_1", "msvcp140_2", "msvcp140_atomic_wait", "msvcp140_codecvt_ids", "concrt140")
_RUNTIME += ("vcomp140", "vcruntime140", "vcruntime140_1")
# The MSVC runtime beside python.exe is used before Wine's. The other entries disable windows that nobody would see.
_OVERRIDES = "mscoree,mshtml,winemenubuilder.exe,winedbg.exe=;" + ",".join(f"*{name}" for name in _RUNTIME) + "=n,b"
_LAUNCHER = r"""
/* python.exe: calls Py_Main of the Python DLL that lies beside it, as CPython's own PC/python.c does. */
#include <windows.h>
#include <stdio.h>
typedef int (*py_main)(int, wchar_t **);
int wmain(int argc, wchar_t **argv) {
    HMODULE dll = LoadLibraryW(L"python311.dll");
    if (!dll) { fwprintf(stderr, L"cannot load python311.dll: %lu\n", GetLastError()); return 101; }
    py_main run = (py_main)(void *)GetProcAddress(dll, "Py_Main");
    if (!run) { fwprintf(stderr, L"no Py_Main: %lu\n", GetLastError()); return 102; }
    return run(argc, argv);
}
"""
_MANIFEST = """<?xml version="1.0" encoding="UTF-8" standalone="yes"?>
<assembly xmlns="urn:schemas-microsoft-com:asm.v1" manifestVersion="1.0">
  <compatibility xmlns="urn:schemas-microsoft-com:compatibility.v1">
    <application><supportedOS Id="{8e0f7a12-bfb3-4fe8-b9a5-48fd50a15a9a}"/></application>
  </compatibility>
  <application xmlns="urn:schemas-microsoft-com:asm.v3">
    <windowsSettings><longPathAware xmlns="http://schemas.microsoft.com/SMI/2016/WindowsSettings">true</longPathAware>
    </windowsSettings>
  </application>
</assembly>
"""
_FORWARDER = "int __stdcall DllMainCRTStartup(void *a, unsigned long b, void *c) { return 1; }\n"


def why_not() -> str | None:
    """Return what this machine lacks, None if Wine can be set up."""
    release = platform.freedesktop_os_release() if sys.platform == "linux" else {}
    if (release.get("ID"), release.get("VERSION_ID")) != ("debian", "12") or platform.machine() != "x86_64":
        return f"needs Debian 12 on x86-64; this is {release.get('PRETTY_NAME', sys.platform)} on {platform.machine()}"
    if os.geteuid() != 0:
        return "needs root: for apt-get, and for the root directory that Wine is in"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        return "needs mount namespaces, which this container does not allow"
    return None


class Wine:
    """A folder with Wine, a Windows CPython and its packages.

    Args:
        folder: Absolute path; made by `set_up`.
    """

    prefix = "prefix"
    executable = r"W:\py\python.exe"
    encoding, language = "utf-8", "C.UTF-8"  # of its output; of its user
    variables: Mapping[str, str] = {"PYTHONUTF8": "1"}
    namespaces: tuple[str, ...] = ("--mount",)
    before = ""  # shell commands in the folder and the namespaces

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._logs = folder / "logs"

    def set_up(self, torches: set[str], rays: set[str]) -> None:
        """Set up what is missing: minutes the first time, seconds later.

        Args:
            torches: Versions of torch to install side by side.
            rays: Versions of Ray, likewise.

        Raises:
            SystemExit: A command failed; the message names its log.
        """
        for name in ("src", "py/DLLs", "v", "wheels", "logs", "run"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "run").chmod(0o700)
        free_gb = shutil.disk_usage(self.folder).free / 1e9
        if not (self.folder / "root" / ".ready").exists() and free_gb < _NEEDED_GB:
            raise SystemExit(f"ci/wine.py: {self.folder} has {free_gb:.0f} GB free, and {_NEEDED_GB} are needed")
        self._step("tools of this machine", self._tools)
        self._step("Wine 10, in a root directory of Debian 13", self._root)
        self._step("Windows CPython 3.11.9", self._cpython)
        self._step("Windows wheels", lambda: self._packages(torches, rays))
        self._step("Wine's registry and drives", self._prefix)

    def python(self, arguments: Sequence[str], torch: str, ray: str, variables: Mapping[str, str]) -> int:
        """Run Windows' python.exe in W: and show its output; return its exit code.

        Args:
            arguments: Arguments of python.exe.
            torch: Version of torch to put on its path.
            ray: Version of Ray to put on its path.
            variables: Further environment variables.
        """
        path = [rf"W:\v\torch-{torch}", rf"W:\v\ray-{ray}", r"W:\project", r"W:\project\ci\wine_site"]
        variables = {"PYTHONPATH": ";".join(path), **self.variables, **variables}
        environment = [f"{name}={value}" for name, value in variables.items()]
        output = self._logs / "python.txt"
        output.write_bytes(b"")
        command = shlex.join(["wine", self.executable, *arguments])
        script = self.folder / "run.sh"
        script.write_text(f"cd {shlex.quote(str(self.folder))} && exec {command} >{shlex.quote(str(output))} 2>&1\n")
        # With a terminal it has a console, as on Windows. Ray ends its processes with CTRL_BREAK, which needs one.
        line = ["env", *environment, "script", "-qec", f"bash {shlex.quote(str(script))}", "/dev/null"]
        process = subprocess.Popen(
            self._inside(line), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        follower = threading.Thread(target=_follow, args=(output, process, self.encoding))
        follower.start()
        try:
            return process.wait()
        finally:
            follower.join()

    def version(self) -> str:
        """Return the version of Wine, such as ``10.0``."""
        found = subprocess.run(self._inside(["wine", "--version"]), capture_output=True, text=True, check=True).stdout
        return found.strip().removeprefix("wine-").split()[0]

    def end(self) -> None:
        """End every process that is left in this Wine."""
        subprocess.run(self._inside(["wineserver", "-k"]), capture_output=True, check=False)

    def disk_gb(self) -> float:
        """Return the size of the folder in GB."""
        command = ["du", "-sb", "--one-file-system", str(self.folder)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) / 1e9

    def _step(self, name: str, make: object) -> None:
        started = time.monotonic()
        make()  # type: ignore[operator]
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)

    def _inside(self, command: Sequence[str]) -> list[str]:
        """Return the command in Wine's root; a mount namespace shows /proc, /dev and the folder only to it."""
        folder = shlex.quote(str(self.folder))
        script = (
            f"cd {folder}; {self.before}"
            f"for at in proc sys dev; do mount --rbind /$at {folder}/root/$at; done; "
            f"mount --bind {folder} {folder}/root{folder}; "
            f'exec chroot {folder}/root /usr/bin/env -i "$@"'
        )
        environment = {
            "HOME": "/root",
            "XDG_RUNTIME_DIR": f"{self.folder}/run",
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LC_ALL": self.language,
            "WINEPREFIX": f"{self.folder}/{self.prefix}",
            "WINEARCH": "win64",
            "WINEDEBUG": "-all",
            "WINEDLLOVERRIDES": _OVERRIDES,
            "KMP_AFFINITY": "disabled",  # libiomp5md requests processor groups, which Wine does not have
            "ONEDNN_MAX_CPU_ISA": "AVX2",  # wider instructions end the process under Wine
        }
        variables = [f"{name}={value}" for name, value in environment.items()]
        start = ["unshare", *self.namespaces, "--propagation", "slave", "bash", "-c", script, "inside"]
        return [*start, *variables, *command]

    def _call(self, log: str, *command: str | Path, cwd: Path | None = None, **environment: str) -> None:
        path = self._logs / f"{log}.txt"
        with path.open("a") as output:
            code = subprocess.run(
                list(map(str, command)),
                cwd=cwd,
                env={**os.environ, **environment},
                stdout=output,
                stderr=output,
                check=False,
            ).returncode
        if code:
            last = "".join(path.read_text(errors="replace").splitlines(keepends=True)[-5:])
            raise SystemExit(
                f"ci/wine.py: {shlex.join(map(str, command))} ended with {code}; its log is {path}:\n{last}"
            )

    def _pip(self, command: str, *arguments: str | Path) -> None:
        self._call("pip", sys.executable, "-m", "pip", command, *_FOR_WINDOWS, *arguments)

    def _tools(self) -> None:
        missing = [package for tool, package in _TOOLS.items() if shutil.which(tool) is None]
        listed = subprocess.run(["apt-cache", "show", "libpython3.11-stdlib"], capture_output=True, check=False)
        if missing or listed.returncode:
            self._call("apt", "apt-get", "update", "-qq")
        if missing:
            install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
            self._call("apt", *install, DEBIAN_FRONTEND="noninteractive")

    def _root(self) -> None:
        root = self.folder / "root"
        if not (root / ".ready").exists():
            shutil.rmtree(root, ignore_errors=True)
            self._call("debootstrap", "debootstrap", "--variant=minbase", "trixie", root, _apt_source())
            for name in ("resolv.conf", "hosts"):
                shutil.copy(Path("/etc", name).resolve(), root / "etc" / name)
            shutil.copytree("/etc/apt/apt.conf.d", root / "etc/apt/apt.conf.d", dirs_exist_ok=True)
            self._call("wine", "chroot", root, "apt-get", "update", "-qq")
            install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "wine64", "wine"]
            self._call("wine", "chroot", root, *install, DEBIAN_FRONTEND="noninteractive")
            self._call("wine", "chroot", root, "apt-get", "clean")
            (root / ".ready").touch()
        Path(f"{root}{self.folder}").mkdir(parents=True, exist_ok=True)

    def _cpython(self) -> None:
        py = self.folder / "py"
        if (py / ".ready").exists():
            return
        wheels, src = self.folder / "wheels", self.folder / "src"
        self._pip("download", "-d", wheels, _PYTHON_WHEEL, _RUNTIME_WHEEL)
        (python_wheel,), (runtime_wheel,) = wheels.glob("panda3d-*.whl"), wheels.glob("msvc_runtime-*.whl")
        libraries = ["*.pyd", "libffi-8.dll", "lib*-3.dll", "sqlite3.dll"]
        unzip = ["unzip", "-q", "-o", "-j"]
        self._call("unzip", *unzip, python_wheel, *(f"deploy_libs/{name}" for name in libraries), "-d", py / "DLLs")
        self._call("unzip", *unzip, python_wheel, "deploy_libs/python311.dll", "-d", py)
        self._call("unzip", *unzip, runtime_wheel, "*/data/Scripts/*.dll", "-d", py)
        self._standard_library(py / "Lib")
        self._compile(src, py)
        (py / ".ready").touch()

    def _standard_library(self, target: Path) -> None:
        deb = self.folder / "deb"
        shutil.rmtree(deb, ignore_errors=True)
        deb.mkdir()
        packages = ["libpython3.11-stdlib", "libpython3.11-minimal", "python3-distutils", "python3-lib2to3"]
        self._call("apt", "apt-get", "download", "-q", *packages, cwd=deb)
        for package in deb.glob("*.deb"):
            self._call("apt", "dpkg", "-x", package, deb)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(deb / "usr/lib/python3.11", target, ignore_dangling_symlinks=True)
        for path in [target / "lib-dynload", *target.glob("_sysconfigdata*"), target / "sitecustomize.py"]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        (target / "EXTERNALLY-MANAGED").unlink(missing_ok=True)
        shutil.rmtree(deb)

    def _compile(self, src: Path, py: Path) -> None:
        for name, text in (
            ("python.c", _LAUNCHER),
            ("python.manifest", _MANIFEST),
            ("python.rc", '1 24 "python.manifest"\n'),
            ("python3.c", _FORWARDER),
        ):
            (src / name).write_text(text)
        prefix = "x86_64-w64-mingw32-"
        self._call("compile", f"{prefix}windres", "python.rc", "-O", "coff", "-o", "python.res", cwd=src)
        options = ["-O2", "-s", "-municode", "-mconsole", "-Wl,--stack,2000000"]
        self._call("compile", f"{prefix}gcc", *options, "-o", py / "python.exe", "python.c", "python.res", cwd=src)
        dump = subprocess.run(
            [f"{prefix}objdump", "-p", py / "python311.dll"], capture_output=True, text=True, check=True
        )
        names = re.findall(r"^\t\[ *\d+\].* (\S+)$", dump.stdout.partition("[Ordinal/Name Pointer] Table")[2], re.M)
        exports = "".join(f"{name} = python311.{name}\n" for name in names)
        (src / "python3.def").write_text(f'LIBRARY "python3.dll"\nEXPORTS\n{exports}')
        self._call(
            "compile",
            f"{prefix}gcc",
            *("-shared", "-nostdlib", "-o", py / "python3.dll", "python3.c", "python3.def"),
            cwd=src,
        )

    def _packages(self, torches: set[str], rays: set[str]) -> None:
        site = self.folder / "py" / "Lib" / "site-packages"
        digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
        new = []
        if not (site / f".ready-{digest}").exists():
            shutil.rmtree(site, ignore_errors=True)
            self._install(site, "--requirement", REQUIREMENTS)
            (site / f".ready-{digest}").touch()
            new.append(self.folder / "py" / "Lib")
        for name, versions in (("torch", torches), ("ray", rays)):
            for version in sorted(versions):
                target = self.folder / "v" / f"{name}-{version}"
                if not (target / ".ready").exists():
                    shutil.rmtree(target, ignore_errors=True)
                    self._install(target, f"{name}=={version}")
                    (target / ".ready").touch()
                    new.append(target)
        compiler = sys.executable if sys.version_info[:2] == (3, 11) else shutil.which("python3.11")
        if new and compiler:  # else it happens at the first import, under Wine
            command = [compiler, "-m", "compileall", "-q", *map(str, new)]
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)

    def _install(self, target: Path, *what: str | Path) -> None:
        self._pip("install", "--no-compile", "--no-warn-script-location", "--target", target, *what)

    def _prefix(self) -> None:
        prefix = self.folder / self.prefix
        if (prefix / ".ready").exists():
            return
        shutil.rmtree(prefix, ignore_errors=True)
        self._call("wineboot", *self._inside(["wineboot", "-i"]))
        version = ["reg", "add", r"HKCU\Software\Wine", "/v", "Version", "/d", "win10", "/f"]
        self._call("wineboot", *self._inside(["wine", *version]))
        drives = prefix / "dosdevices"
        (drives / "z:").unlink(missing_ok=True)
        (drives / "w:").symlink_to(self.folder)
        (prefix / ".ready").touch()


def _apt_source() -> str:
    """Return the address of Debian in this machine's apt configuration."""
    command = ["apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)", "Created-By: Packages"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sources = [line.split()[0] for line in listed.splitlines() if line.split()[1:] == ["bookworm"]]
    if not sources:
        raise SystemExit("ci/wine.py: apt-get knows no source of Debian 12 (bookworm): run apt-get update")
    return sources[0]


def _follow(path: Path, process: subprocess.Popen[bytes], encoding: str) -> None:
    """Print the text that is added to a file until its process has ended."""
    decode = codecs.getincrementaldecoder(encoding)("replace").decode
    with path.open("rb") as output:
        while True:
            ended = process.poll() is not None
            while chunk := output.read(1 << 16):
                sys.stdout.write(decode(chunk).replace("\r", ""))
                sys.stdout.flush()
            if ended:
                return
            time.sleep(0.3)
