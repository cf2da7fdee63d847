"""Lines of ``ray-fracbackend doctor`` about failed checks: imports and drivers that fail, crash or hang. Pure."""

from __future__ import annotations

from ray_fracbackend.cli.doctor.report import Check, Failure, MachineInfo

INSTALL_RAY, INSTALL_TORCH = "'ray[train]>=2.40'", "'torch>=2.4'"
# Stages of child.py, without the imports.
_SUBJECTS = ("host name", "interfaces", "driver", "CUDA devices", "NCCL", "ipc", "staged", "Gloo")
_IMPORTS = ("ray", "torch", "ray.train")


def failed_imports(machine: MachineInfo) -> list[Check]:
    """Return a line for each package that cannot be imported."""
    return [
        Check("versions", "problem", *_import_failure(name, machine.failures[name]))
        for name in _IMPORTS
        if name in machine.failures
    ]


def _import_failure(name: str, failure: Failure) -> tuple[str, str]:
    """Return cause and fix of an import that failed."""
    package = {"ray": INSTALL_RAY, "ray.train": INSTALL_RAY, "torch": INSTALL_TORCH}[name]
    if failure.kind == "timeout":
        text = f"the import of {name} did not end within {failure.text} s"
        return text, "check the file system that Python's packages are on, or raise --timeout-s"
    if failure.kind == "crash":
        return f"the import of {name} ends the process: {failure.text}", f"{_reinstall(package)}"
    if failure.missing == name:
        return f"{name} is not installed for this Python", f"pip install {package}"
    text = f"{name} cannot be imported: {failure.text}"
    if failure.missing:
        return text, f"pip install {package}, which installs {failure.missing}"
    if name == "torch" and ".so" in failure.text:
        return (
            text,
            f"{_reinstall(package)}, in a build for this driver; unset LD_LIBRARY_PATH if it has other CUDA libraries",
        )
    return text, _reinstall(package)


def _reinstall(package: str) -> str:
    return f"pip install --force-reinstall {package}"


def failed_subjects(machine: MachineInfo) -> list[Check]:
    """Return a line for each other stage that failed."""
    found = []
    for name in _SUBJECTS:
        if name not in machine.failures:
            continue
        failure = machine.failures[name]
        call = {"driver": "nvmlInit", "CUDA devices": "torch.cuda"}.get(name)
        if failure.missing:
            text, fix = f"{failure.missing} is not installed", f"pip install {failure.missing}"
        elif call and failure.kind == "timeout":
            text = f"the driver did not answer within {failure.text} s ({call})"
            fix = "run nvidia-smi to confirm that it hangs too; reload the driver or reboot the machine"
        elif call and failure.kind == "crash":
            text, fix = f"the driver ends the process ({call}): {failure.text}", "run nvidia-smi; reinstall the driver"
        elif failure.kind == "timeout":
            text, fix = f"no answer within {failure.text} s", "check the machine's load, or raise --timeout-s"
        else:
            text, fix = f"the check failed: {failure.text}", "report this with the block below"
        found.append(Check("CUDA devices" if call else name, "problem", text, fix))
    return found


def not_checked(machine: MachineInfo) -> list[Check]:
    """Return a line that names the stages without a result and without a failure."""
    has_line = {*machine.failures, *(["CUDA devices"] if "driver" in machine.failures else [])}
    names = [name for name in ("ray", "torch", *_SUBJECTS) if name in machine.not_done - has_line]
    if not names:
        return []
    if not machine.failures:
        return [Check("not checked", "problem", f"no time was left for {', '.join(names)}", "raise --timeout-s")]
    return [Check("not checked", "warning", ", ".join(names), "first fix the problems above")]
