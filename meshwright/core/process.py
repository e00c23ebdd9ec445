"""Start a module as a child process that imports nothing from the working folder by accident and dies with its parent.

`python -m` looks for modules in the working folder before the standard library, so a `random.py` there would run.
A child is started with `-P` instead, through this file (which therefore imports nothing of the package at the top): it
asks the kernel for the death signal before anything large is imported, takes `meshwright` from where the parent has it,
and appends the rest of the parent's `sys.path` behind the standard library and the installed packages. No torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PATH_NAME, _PARENT_NAME = "MESHWRIGHT_PATH", "MESHWRIGHT_PARENT"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def child_command(module: str, *arguments: str) -> list[str]:
    """The words that run `module`; to be started with `child_environment`, by the thread that outlives the child."""
    return [sys.executable, "-P", __file__, module, *arguments]


def child_environment() -> dict[str, str]:
    """What the child needs to know, beside the caller's own variables."""
    entries = dict.fromkeys(os.path.abspath(entry) for entry in sys.path)
    return {_PATH_NAME: os.pathsep.join(entries), _PARENT_NAME: str(os.getpid())}


def die_with_process(parent_pid: int) -> None:
    """Tie our life to our parent's (to be exact: to the thread of it that started us)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the line above, so no signal will ever come
        os._exit(1)


def _main() -> None:
    die_with_process(int(os.environ.pop(_PARENT_NAME)))
    import importlib.util
    import runpy

    sys.path += [entry for entry in os.environ.pop(_PATH_NAME).split(os.pathsep) if entry not in sys.path]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # By its place, not by `sys.path`: the parent may run from a checkout while another version is installed.
    spec = importlib.util.spec_from_file_location("meshwright", os.path.join(root, "__init__.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules["meshwright"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
