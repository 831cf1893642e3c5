"""Processes that end with the one that started them, whatever happens to either.

    python -P -m p2pdiloco_daemon.children.bound PARENT_PID MODULE ARGUMENTS...

runs a module as `python -m` does. It binds itself first: to import torch takes seconds of a core,
minutes on a busy machine, in which nothing else would tell it that its parent was killed. On Linux
the kernel then ends it in the middle of anything; elsewhere the module itself must look.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def bound_command(module: str, *arguments: str) -> list[str]:
    """What a process executes to have `module` run in a child that does not outlive it.

    The thread that starts the child must live as long as the child: the kernel goes by threads.
    """
    return [
        sys.executable,
        "-P",  # a torch.py in the working directory is not torch
        *("-m", "p2pdiloco_daemon.children.bound", str(os.getpid())),
        *(module, *arguments),
    ]


def bind_to(parent: int) -> bool:
    """This process to its parent; False if that was gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


def unbind() -> None:
    """For a process that notices by itself that its parent is gone, and then has things to do."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def main() -> None:
    parent, module, *arguments = sys.argv[1:]
    if bind_to(int(parent)):
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
