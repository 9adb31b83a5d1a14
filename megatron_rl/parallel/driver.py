# SPDX-License-Identifier: Apache-2.0
"""GPUs that are there and that torch cannot use: without a word a run would train on the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess

import torch

from megatron_rl.types import UserError

# The oldest driver that runs programs of a CUDA release, by its major version.
OLDEST_DRIVERS = {"11": "450", "12": "525", "13": "580"}


def list_gpus() -> list[tuple[str, str]]:
    """Driver version and name of each GPU that nvidia-smi lists, whatever torch sees."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = result.stdout.splitlines() if result.returncode == 0 else []
    return [(version.strip(), name.strip()) for version, found, name in (x.partition(",") for x in lines) if found]


def explain_unusable_gpus() -> UserError | None:
    """Why torch sees none of the GPUs here; None where there are none, or where nobody wants them.

    A CPU build of torch is a choice, and so is a CUDA_VISIBLE_DEVICES that names none.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    if torch.cuda.is_available() or torch.version.cuda is None or hidden.strip() in ("", "-1"):
        return None
    gpus = list_gpus()
    if not gpus:
        return None
    driver, name = gpus[0]
    wanted = OLDEST_DRIVERS.get(torch.version.cuda.partition(".")[0])
    major = driver.partition(".")[0]  # "[N/A]" where the driver does not answer
    is_old = wanted is not None and major.isdigit() and int(major) < int(wanted)
    return UserError(
        f"nvidia-smi lists {len(gpus)} GPUs ({name}, driver {driver}), and torch {torch.__version__} sees none",
        source="the NVIDIA driver" if is_old else "CUDA on this machine",
        expected=f"driver {wanted} or newer for CUDA {torch.version.cuda}" if wanted else "a driver for this torch",
        hint=("update the driver" if is_old else "python -c 'import torch; torch.cuda.init()' says why")
        + "; to run on the CPU all the same, set CUDA_VISIBLE_DEVICES= (empty)",
    )
