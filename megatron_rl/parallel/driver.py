# SPDX-License-Identifier: Apache-2.0
"""Detection of GPUs that torch cannot use, so that a run does not silently train on the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess

import torch

from megatron_rl.types import UserError

# CUDA major version -> oldest driver that supports it.
OLDEST_DRIVERS = {"11": "450", "12": "525", "13": "580"}


def list_gpus() -> list[tuple[str, str]]:
    """Return driver version and name of each GPU that nvidia-smi lists."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = result.stdout.splitlines() if result.returncode == 0 else []
    return [(version.strip(), name.strip()) for version, found, name in (x.partition(",") for x in lines) if found]


def explain_unusable_gpus() -> UserError | None:
    """Return an error if this machine has GPUs but torch sees none of them, else `None`.

    A CPU build of torch, or CUDA_VISIBLE_DEVICES that hides all GPUs, is not an error.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    if torch.cuda.is_available() or torch.version.cuda is None or hidden.strip() in ("", "-1"):
        return None
    gpus = list_gpus()
    if not gpus:
        return None
    driver, name = gpus[0]
    wanted = OLDEST_DRIVERS.get(torch.version.cuda.partition(".")[0])
    major = driver.partition(".")[0]  # "[N/A]" if the driver does not respond
    is_old = wanted is not None and major.isdigit() and int(major) < int(wanted)
    return UserError(
        f"nvidia-smi lists {len(gpus)} GPUs ({name}, driver {driver}), and torch {torch.__version__} sees none",
        source="the NVIDIA driver" if is_old else "CUDA on this machine",
        expected=f"driver {wanted} or newer for CUDA {torch.version.cuda}" if wanted else "a driver for this torch",
        hint=("update the driver" if is_old else "python -c 'import torch; torch.cuda.init()' says why")
        + "; to run on the CPU all the same, set CUDA_VISIBLE_DEVICES= (empty)",
    )
