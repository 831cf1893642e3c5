"""Which device a learner trains on."""

import torch

from p2pdiloco.errors import UserError


def choose_device(wanted: str) -> str:
    """A torch device name; `auto` is the fastest there is. UserError if this machine lacks it."""
    available = available_devices()
    if wanted == "auto":
        return available[-1] if "cuda" not in available else "cuda"
    if wanted not in available:
        raise UserError(
            f"--device {wanted} cannot be used; this machine has: {', '.join(available)}"
        )
    return wanted


def available_devices() -> list[str]:
    """The slowest first; `cuda` is the first of several GPUs."""
    devices = ["cpu"]
    if torch.backends.mps.is_available():
        devices.append("mps")
    if torch.cuda.is_available():
        devices += ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return devices
