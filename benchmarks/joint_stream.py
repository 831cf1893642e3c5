"""Several learners' text in one batch: the data-parallel learner that they are compared with."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from p2pdiloco.learn.text import TextStream


class JointStream:
    """The streams of several learners side by side in one batch."""

    def __init__(self, streams: Sequence[TextStream]) -> None:
        self.cursor = 0
        self._streams = streams

    def next_batch(self, batch_size: int) -> npt.NDArray[np.int64]:
        share = batch_size // len(self._streams)
        self.cursor += batch_size
        return np.concatenate([stream.next_batch(share) for stream in self._streams])
