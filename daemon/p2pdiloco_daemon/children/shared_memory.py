"""The memory that the daemon shares with a process of its own.

One anonymous memory file with two areas of float32, each with one flat vector per fragment:
`incoming` (written by the daemon, installed by the process) and `outgoing` (written by the process,
copied away by the daemon). It has no lock: messages say who may touch which vector.
"""

import mmap
import os
import tempfile
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


class SharedTensors:
    """Both areas of the memory file behind `fd`, one float32 vector per fragment in each."""

    def __init__(self, fd: int, fragment_sizes: Sequence[int]) -> None:
        memory = mmap.mmap(fd, memory_bytes(fragment_sizes))
        values = np.frombuffer(memory, dtype="<f4")
        bounds = np.cumsum([*fragment_sizes, *fragment_sizes])[:-1].tolist()
        vectors = np.split(values, bounds)
        self.incoming: tuple[Vector, ...] = tuple(vectors[: len(fragment_sizes)])
        self.outgoing: tuple[Vector, ...] = tuple(vectors[len(fragment_sizes) :])


def memory_bytes(fragment_sizes: Sequence[int]) -> int:
    """Size of the memory file."""
    return 2 * 4 * sum(fragment_sizes)


def open_memory_file(num_bytes: int) -> int:
    """Descriptor of `num_bytes` zeros that no directory names and that end with their users."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("p2pdiloco-learner")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd
