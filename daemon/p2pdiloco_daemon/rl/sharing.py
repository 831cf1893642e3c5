"""Hands the shares of a step that is rolled out to the members that learn: `Dealing` decides, this
sends, for as long as the step lasts.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from p2pdiloco.errors import P2PDilocoError
from p2pdiloco.protocol.dealing import (
    Dealing,
    Event,
    Learner,
    LearnersSeen,
    SendShare,
    ShareFailed,
    ShareTaken,
)
from p2pdiloco.protocol.naming import PeerId

LOOK_S = 1.0
TAKEN_S = 5.0
"""For members to say what they took of an earlier dispatcher."""

Expected = (OSError, TimeoutError, P2PDilocoError)
Send = Callable[[PeerId, Sequence[bytes]], Awaitable[None]]
"""Returns once the member has taken these episodes; what it raises is `Expected`."""
AskTaken = Callable[[PeerId], Awaitable[Collection[int] | None]]
"""The groups that the member took of this step; None if it took nothing."""

logger = logging.getLogger(__name__)


class Sharing:
    """`run` never returns."""

    def __init__(
        self,
        groups: Mapping[int, Sequence[bytes]],
        inner_steps: int,
        learners: Callable[[], Mapping[PeerId, Learner]],
        ask_taken: AskTaken,
        send: Send,
    ) -> None:
        """`groups` are the episodes of each, `learners` those who are there at the time."""
        self._groups = groups
        self._inner_steps = inner_steps
        self._learners = learners
        self._ask_taken = ask_taken
        self._send = send
        self.dealing: Dealing | None = None
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        """Bounded by the shares on their way: one for each member."""

    async def run(self) -> None:
        taken = await self._taken()
        self.dealing = dealing = Dealing(self._groups, self._inner_steps, taken)
        loop = asyncio.get_running_loop()
        look_at = loop.time()
        async with asyncio.TaskGroup() as tasks:
            while True:
                event: Event
                try:
                    async with asyncio.timeout_at(look_at):
                        event = await self._inbox.get()
                except TimeoutError:
                    event = LearnersSeen(self._learners())
                    look_at = loop.time() + LOOK_S
                for share in dealing.handle(event, loop.time()):
                    tasks.create_task(self._give(share), name=f"share for {share.peer}")

    async def _give(self, share: SendShare) -> None:
        episodes = [episode for group in share.groups for episode in self._groups[group]]
        try:
            await self._send(share.peer, episodes)
        except Expected as error:
            logger.info("%s has not taken its share: %s", share.peer[-8:], error)
            self._inbox.put_nowait(ShareFailed(share.peer))
        else:
            self._inbox.put_nowait(ShareTaken(share.peer, share.groups))

    async def _taken(self) -> dict[PeerId, Collection[int]]:
        taken: dict[PeerId, Collection[int]] = {}

        async def ask(peer: PeerId) -> None:
            try:
                async with asyncio.timeout(TAKEN_S):
                    groups = await self._ask_taken(peer)
            except Expected as error:
                logger.debug("%s does not say what it took: %s", peer, error)
                return
            if groups is not None:
                taken[peer] = groups

        async with asyncio.TaskGroup() as tasks:
            for peer in sorted(self._learners()):
                tasks.create_task(ask(peer))
        return taken
