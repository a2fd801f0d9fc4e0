"""What works on this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.metadata import distribution
from pathlib import Path
from typing import Any


def tool() -> str:
    """The command-line tool ``gdasync``, which the wheel has installed."""
    installed = [file.locate() for file in distribution("gdasync").files or [] if file.parts[-2:] == ("bin", "gdasync")]
    # Below the packages, for `pip install --target`.
    beside = Path(__file__).parents[1] / "bin" / "gdasync"
    found = next((str(path) for path in [*installed, beside] if Path(str(path)).exists()), shutil.which("gdasync"))
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
