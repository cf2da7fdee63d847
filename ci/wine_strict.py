"""Wine as strict as a person's laptop with a German Windows; ci/wine.py runs it as a cell of its own.

==============  ======================================================================================================
python.exe      a venv's: it starts the base python.exe as its child, as on Windows since CPython 3.7.2
Encoding        no PYTHONUTF8: files and output are in the ANSI code page, cp1252
User            ``Jörg Müller``, with TEMP, APPDATA and the venv in the folder of this name; the system speaks German
``RAY_TMPDIR``  a folder with a blank: Ray does not work where the path has letters outside ASCII, as TEMP has
Adapters        loopback, and ``wlan9`` with the host name's address, in a network namespace without other routes
==============  ======================================================================================================

The adapter is away as long as the file ``W:\\remove-adapter`` exists; when it is, ``W:\\adapter-removed`` exists too.
"""

from __future__ import annotations

from wine_setup import Wine

_USER = "Jörg Müller"
_REDIRECTOR = r"""
/* python.exe of a venv, as PC/launcher.c of CPython 3.11 with VENV_REDIRECT (since 3.13 PC/venvlauncher.c). */
#include <windows.h>
#include <stdio.h>
static BOOL WINAPI ignore(DWORD key) { return key || TRUE; }
static HANDLE inherited(DWORD which) {
    HANDLE self = GetCurrentProcess(), copy = NULL;
    DuplicateHandle(self, GetStdHandle(which), self, &copy, 0, TRUE, DUPLICATE_SAME_ACCESS);
    return copy;
}
int wmain(void) {
    static wchar_t own[32768], folder[32768], home[4096], command[65536], *rest;
    static char text[4096], *at;
    GetModuleFileNameW(NULL, own, 32768);
    wcscpy(folder, own);
    for (int up = 0; up < 2; up++) *wcsrchr(folder, L'\\') = 0;
    FILE *file = _wfopen(wcscat(folder, L"\\pyvenv.cfg"), L"rb");
    if (!file || !fread(text, 1, sizeof text - 1, file) || !(at = strstr(text, "home = "))) return 106;
    MultiByteToWideChar(CP_UTF8, 0, at + 7, strcspn(at + 7, "\r\n"), home, 4095);
    for (rest = GetCommandLineW(); *rest && *rest != L' '; rest++)
        if (*rest == L'"') rest = wcschr(rest + 1, L'"');
    swprintf(command, 65536, L"\"%ls\\python.exe\"%ls", home, rest);
    SetEnvironmentVariableW(L"__PYVENV_LAUNCHER__", own);
    HANDLE job = CreateJobObjectW(NULL, NULL);
    JOBOBJECT_EXTENDED_LIMIT_INFORMATION limits = {0};
    limits.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE | JOB_OBJECT_LIMIT_SILENT_BREAKAWAY_OK;
    SetInformationJobObject(job, JobObjectExtendedLimitInformation, &limits, sizeof limits);
    STARTUPINFOW start = {.cb = sizeof start, .dwFlags = STARTF_USESTDHANDLES, .hStdInput = inherited(STD_INPUT_HANDLE),
        .hStdOutput = inherited(STD_OUTPUT_HANDLE), .hStdError = inherited(STD_ERROR_HANDLE)};
    SetConsoleCtrlHandler(ignore, TRUE);
    PROCESS_INFORMATION child;
    DWORD code;
    if (!CreateProcessW(NULL, command, NULL, NULL, TRUE, 0, NULL, NULL, &start, &child)) return 101;
    AssignProcessToJobObject(job, child.hProcess);
    WaitForSingleObject(child.hProcess, INFINITE);
    GetExitCodeProcess(child.hProcess, &code);
    return code;
}
"""
# The loop ends with the command. It must not be its child: script(1) would wait for it.
_NETWORK = r"""
named() { printf '127.0.0.1 localhost\n%s %s\n' "$1" "$HOSTNAME" > strict/hosts; }
plug() {
    ip link add wlan9 type veth peer name wlan9-end && ip link set wlan9-end addrgenmode none up
    ip addr add 10.99.0.5/24 dev wlan9; ip link set wlan9 up; named 10.99.0.5
}
ip link set lo up; plug; rm -f remove-adapter adapter-removed
(while kill -0 $$; do
    if [ -e remove-adapter ] && [ ! -e adapter-removed ]; then ip link del wlan9; named 127.0.0.1; touch adapter-removed
    elif [ ! -e remove-adapter ] && [ -e adapter-removed ]; then plug; rm adapter-removed; fi
    sleep 0.1
done > /dev/null 2>&1 &)
for file in passwd hosts; do mount --bind strict/$file root/etc/$file; done
"""


class StrictWine(Wine):
    """A second drive C: in the same folder, with what the table above lists."""

    prefix = "prefix-strict"
    executable = rf"C:\users\{_USER}\venv\Scripts\python.exe"
    encoding, language = "cp1252", "de_DE.UTF-8"
    variables = {"RAY_TMPDIR": r"W:\strict\ray files", "REMOVABLE_ADAPTER": "wlan9"}  # noqa: RUF012
    namespaces, before = ("--mount", "--net"), _NETWORK

    def _root(self) -> None:
        super()._root()
        root, strict = self.folder / "root", self.folder / "strict"
        (strict / "ray files").mkdir(parents=True, exist_ok=True)
        # Wine takes the user's name from there.
        passwd = (root / "etc/passwd").read_text(encoding="utf-8")
        (strict / "passwd").write_text(passwd.replace("root:", f"{_USER}:", 1), encoding="utf-8")
        if not (root / "usr/lib/locale/locale-archive").exists():
            install = "apt-get update -qq && apt-get install -y -qq --no-install-recommends locales"
            made = f"localedef -i de_DE -f UTF-8 {self.language}"
            self._call("wine", "chroot", root, "sh", "-c", f"{install} && {made}", DEBIAN_FRONTEND="noninteractive")

    def _prefix(self) -> None:
        super()._prefix()
        self.end()  # a later command would run in this one's network namespace
        src, venv = self.folder / "src", self.folder / self.prefix / f"drive_c/users/{_USER}/venv"
        (venv / "Scripts").mkdir(parents=True, exist_ok=True)
        (venv / "pyvenv.cfg").write_text("home = W:\\py\ninclude-system-site-packages = true\nversion = 3.11.9\n")
        (src / "redirector.c").write_text(_REDIRECTOR)
        compiler = ["x86_64-w64-mingw32-gcc", "-O2", "-s", "-municode", "-mconsole"]
        self._call("compile", *compiler, "-o", venv / "Scripts/python.exe", "redirector.c", cwd=src)
