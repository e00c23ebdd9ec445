"""Kernels run by Triton's interpreter, which must be chosen before Triton is imported: in another process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run_interpreted(call: str, *flags: str) -> None:
    """`call`: `module:function`, called with "cpu"; `flags`: of the interpreter of Python."""
    pytest.importorskip("triton")
    module, _, function = call.partition(":")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = f"import {module} as tests; tests.{function}('cpu')"
    subprocess.run([sys.executable, *flags, "-c", code], check=True, env=environment, timeout=240)
