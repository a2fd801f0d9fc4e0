"""What works on this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.metadata import distribution
from typing import Any


def tool() -> str:
    """The command-line tool ``gdasync``, which the wheel has installed."""
    for file in distribution("gdasync").files or []:
        if file.name == "gdasync" and file.parent.name == "bin":
            return str(file.locate())
    found = shutil.which("gdasync")
    if found is None:
        raise FileNotFoundError("there is no gdasync on the PATH: install the wheel that python/build makes")
    return found


def doctor() -> dict[str, Any]:
    """Probes the machine, as ``gdasync doctor``: ``probes`` with status, finding and fix, and a ``conclusion``."""
    done = subprocess.run([tool(), "doctor", "--json"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr.strip())
    report: dict[str, Any] = json.loads(done.stdout)
    return report
