"""Whether a bf16 matmul survives on this CPU, tried in a fork so that it may die.

Some virtual machines advertise AMX and then refuse it: oneDNN picks its AMX kernel and SIGILL ends the
process (seen with torch 2.13 under Firecracker on a Sapphire Rapids Xeon, for any bf16 matmul of 64 or more).
Telling oneDNN to stop below AMX mends it, if it is told before its first kernel is chosen.
"""

from __future__ import annotations

import faulthandler
import os
import resource
from collections.abc import Callable

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
# oneDNN's names, fastest first; the empty one leaves the choice to oneDNN.
_ISA_LIMITS = ("", "AVX512_CORE_FP16", "AVX2")


def limit_isa_for_bf16() -> str | None:
    """Set oneDNN's limit in this process where bf16 needs one.

    Returns the limit, "" where none is needed, None where bf16 does not run under any. Call before any
    tensor op: forking is safe only while no thread pool runs.
    """
    if os.environ.get(ISA_VARIABLE):
        limit = os.environ[ISA_VARIABLE]
        return limit if survives(_multiply_bf16) else None
    for limit in _ISA_LIMITS:
        if limit:
            os.environ[ISA_VARIABLE] = limit
        if survives(_multiply_bf16):
            return limit
    del os.environ[ISA_VARIABLE]
    return None


def survives(op: Callable[[], None]) -> bool:
    """Run `op` in a fork; False if it raises or a signal ends it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            faulthandler.disable()  # dying here is an answer, not a crash to report
            op()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


def _multiply_bf16() -> None:
    import torch

    ones = torch.ones(128, 128, dtype=torch.bfloat16)
    torch.mm(ones, ones)
