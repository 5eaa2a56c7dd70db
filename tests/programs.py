"""Programs of the system that some tests put to work."""

from __future__ import annotations

import os
import shutil

import pytest


def program(name: str, package: str) -> str:
    """The path of a program. Skips the test where it is missing, except under CI, which installs them all."""
    found = shutil.which(name, path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(f"{name} is missing; on Debian: apt-get install {package}")
        pytest.skip(f"needs {name}; on Debian: apt-get install {package}")
    return found
