"""Wine as strict as a person's laptop: a venv, a German Windows, letters outside ASCII in the user's name, an adapter that goes away.

==================  ==================================================================================================
python.exe          a venv's, compiled here: it starts the base python.exe as its child, as CPython's does since 3.7.2
Encoding            no PYTHONUTF8, so files and output have the ANSI code page, cp1252
Language            German: the texts of system errors, the dates, the numbers
User                ``Jörg Müller``: the venv, TEMP and APPDATA are in his folder
Ray's own files     in ``RAY_TMPDIR``, with a blank: Ray 2.60 does not start below a folder with letters outside ASCII
Adapters            loopback and ``wlan9``, to which the host name resolves, in a network namespace without a route
==================  ==================================================================================================

While the file ``W:\\remove-adapter`` exists, the adapter is away; ``W:\\adapter-removed`` says so.
"""

from __future__ import annotations

import shlex
import socket

from wine_setup import Wine

_USER = "Jörg Müller"
_ADAPTER = "wlan9"
_REDIRECTOR = r"""
/* A venv's python.exe, as PC/launcher.c of CPython 3.11 with VENV_REDIRECT; PC/venvlauncher.c since 3.13. */
#include <windows.h>
#include <stdio.h>
static BOOL WINAPI ignore(DWORD key) { return key || TRUE; }
static HANDLE inherited(DWORD which) {
    HANDLE self = GetCurrentProcess(), copy = NULL;
    DuplicateHandle(self, GetStdHandle(which), self, &copy, 0, TRUE, DUPLICATE_SAME_ACCESS);
    return copy;
}
int wmain(void) {
    static wchar_t own[32768], folder[32768], home[4096], command[65536], *tail;
    static char text[4096], *at;
    GetModuleFileNameW(NULL, own, 32768);
    wcscpy(folder, own);
    for (int up = 0; up < 2; up++) *wcsrchr(folder, L'\\') = 0;
    FILE *file = _wfopen(wcscat(folder, L"\\pyvenv.cfg"), L"rb");
    if (!file || !fread(text, 1, sizeof text - 1, file) || !(at = strstr(text, "home = "))) return 106;
    fclose(file);
    MultiByteToWideChar(CP_UTF8, 0, at + 7, strcspn(at + 7, "\r\n"), home, 4095);
    for (tail = GetCommandLineW(); *tail && *tail != L' '; tail++)
        if (*tail == L'"') tail = wcschr(tail + 1, L'"');
    swprintf(command, 65536, L"\"%ls\\python.exe\"%ls", home, tail);
    SetEnvironmentVariableW(L"__PYVENV_LAUNCHER__", own);
    HANDLE job = CreateJobObjectW(NULL, NULL);
    JOBOBJECT_EXTENDED_LIMIT_INFORMATION limits = {0};
    limits.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE | JOB_OBJECT_LIMIT_SILENT_BREAKAWAY_OK;
    SetInformationJobObject(job, JobObjectExtendedLimitInformation, &limits, sizeof limits);
    STARTUPINFOW start = {.cb = sizeof start, .dwFlags = STARTF_USESTDHANDLES};
    start.hStdInput = inherited(STD_INPUT_HANDLE);
    start.hStdOutput = inherited(STD_OUTPUT_HANDLE);
    start.hStdError = inherited(STD_ERROR_HANDLE);
    SetConsoleCtrlHandler(ignore, TRUE);
    PROCESS_INFORMATION child;
    DWORD code = 101;
    if (!CreateProcessW(NULL, command, NULL, NULL, TRUE, 0, NULL, NULL, &start, &child)) return code;
    AssignProcessToJobObject(job, child.hProcess);
    WaitForSingleObject(child.hProcess, INFINITE);
    GetExitCodeProcess(child.hProcess, &code);
    return code;
}
"""
# The loop ends with the command, whose child it must not be: script(1) waits for all of its own. Linux shows the other end of the
# cable as an adapter too, without an address.
_NETWORK = r"""
hosts() { printf '127.0.0.1 localhost\n%s %s\n' "$1" "$name" > "$folder/strict/hosts"; }
plug() {
    ip link add "$adapter" type veth peer name "$adapter-end" && ip link set "$adapter-end" addrgenmode none up
    ip addr add 10.99.0.5/24 dev "$adapter"; ip link set "$adapter" up; hosts 10.99.0.5
}
unplug() { ip link del "$adapter"; hosts 127.0.0.1; }
rm -f "$folder/remove-adapter" "$folder/adapter-removed"
ip link set lo up; plug
(while kill -0 $$; do
    if [ -e "$folder/remove-adapter" ]; then
        [ -e "$folder/adapter-removed" ] || { unplug; touch "$folder/adapter-removed"; }
    elif [ -e "$folder/adapter-removed" ]; then plug; rm "$folder/adapter-removed"; fi
    sleep 0.1
done > /dev/null 2>&1 &)
"""


class StrictWine(Wine):
    """A second Wine in the same folder, with what the table above lists."""

    prefix = "prefix-strict"
    executable = rf"C:\users\{_USER}\venv\Scripts\python.exe"
    encoding = "cp1252"
    language = "de_DE.UTF-8"
    variables = {"RAY_TMPDIR": r"W:\strict\ray files", "REMOVABLE_ADAPTER": _ADAPTER}  # noqa: RUF012
    namespaces = ("--mount", "--net")

    def _before(self) -> str:
        folder, root = shlex.quote(str(self.folder)), shlex.quote(str(self.folder / "root"))
        names = f"folder={folder} adapter={_ADAPTER} name={shlex.quote(socket.gethostname())}"
        mounts = "".join(f"mount --bind {folder}/strict/{name} {root}/etc/{name}\n" for name in ("passwd", "hosts"))
        return f"{names}\n{_NETWORK}{mounts}"

    def _root(self) -> None:
        super()._root()
        root, strict = self.folder / "root", self.folder / "strict"
        (strict / "ray files").mkdir(parents=True, exist_ok=True)
        # Wine takes the user's name from there.
        passwd = (root / "etc/passwd").read_text(encoding="utf-8")
        (strict / "passwd").write_text(passwd.replace("root:", f"{_USER}:", 1), encoding="utf-8")
        (strict / "hosts").touch()
        if not (root / ".ready-german").exists():
            install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "locales"]
            self._call("wine", "chroot", root, "apt-get", "update", "-qq")
            self._call("wine", "chroot", root, *install, DEBIAN_FRONTEND="noninteractive")
            self._call("wine", "chroot", root, "localedef", "-i", "de_DE", "-f", "UTF-8", self.language)
            (root / ".ready-german").touch()

    def _prefix(self) -> None:
        super()._prefix()
        self.end()  # else the next command joins this one's network namespace
        src, venv = self.folder / "src", self.folder / self.prefix / f"drive_c/users/{_USER}/venv"
        for name in ("Scripts", "Lib/site-packages"):
            (venv / name).mkdir(parents=True, exist_ok=True)
        lines = ("home = W:\\py", "include-system-site-packages = true", "version = 3.11.9")
        (venv / "pyvenv.cfg").write_text("".join(f"{line}\n" for line in lines))
        (src / "redirector.c").write_text(_REDIRECTOR)
        compiler = ["x86_64-w64-mingw32-gcc", "-O2", "-s", "-municode", "-mconsole"]
        self._call("compile", *compiler, "-o", venv / "Scripts/python.exe", "redirector.c", cwd=src)
