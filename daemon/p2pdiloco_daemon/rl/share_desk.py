"""Where a member's share of a step arrives: checked, and passed to its learner.

    POST /v1/rollouts/share/{step}   {"episodes": [...]} in msgpack -> 204 taken, by now or before;
                                     409 refused; 422 the policy would not have chosen one of its
                                     tokens: look through it again; 503 not yet: ask again; 413
    GET  /v1/rollouts/share/{step}   {"groups": [...]} in msgpack: what was taken of this step; 404

Only the synchronizer, as seen from here or nearly so, hands out shares, and only of the version
held here. An episode counts once, whoever brings it. If the learner is started again, it gets its
share again.

A share with another story than its tasks' is its giver's fault, who has looked at all of it. Of the
tokens it has looked at a sample: one that it missed is first told to it, then held against it.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypeVar

import msgpack
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from p2pdiloco.errors import P2PDilocoError, PeerError
from p2pdiloco.protocol.naming import PeerId, sentence
from p2pdiloco.rl.episodes import EPISODE_BYTES_MAX, unpack
from p2pdiloco_bootstrap.serving import sender
from p2pdiloco_daemon.rl.checker import Checker

SHARE_PATH = r"/v1/rollouts/share/{step:\d{1,16}}"
SHARE_BYTES_MAX = 64 << 20
"""Of a share on its way; bounds what a peer can make us keep."""
EPISODES_MAX = 4096
GROUPS_BYTES_MAX = 16 * EPISODES_MAX
BODY_S = 120.0
"""For a share to arrive whole."""
DOUBTED = 422
CHECK_S = 60.0
"""For the checks; a share that is not checked by then comes again."""


class NotYet(P2PDilocoError):
    """A share that may be taken later."""


class ShareRefused(P2PDilocoError):
    """A share that will not be taken."""


class ShareDoubted(ShareRefused):
    """A share in which a token is wrong that its giver may have missed."""


class Standpoint(Protocol):
    """Of a `swarm_view.SwarmView`, what is asked here."""

    @property
    def me(self) -> PeerId: ...
    @property
    def version(self) -> int: ...
    @property
    def head(self) -> str | None: ...
    @property
    def dispatcher(self) -> PeerId | None: ...
    def may_dispatch(self, peer: PeerId) -> bool: ...
    def blame(self, peer: PeerId, reason: str) -> None: ...


class Learns(Protocol):
    """Of a `p2pdiloco_daemon.learner.learner.Learner`, what is asked here."""

    def learn(self, step: int, episodes: Sequence[bytes]) -> bool: ...


@dataclass(slots=True)
class Share:
    """What was taken of one step, rolled out with the state `head`, part by part."""

    step: int
    head: str | None
    parts: list[tuple[bytes, ...]] = field(default_factory=list)
    trajectories: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Lie:
    reason: str
    is_token: bool
    """Else it is in the story."""


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    episodes: list[Annotated[bytes, Field(max_length=EPISODE_BYTES_MAX)]] = Field(
        max_length=EPISODES_MAX
    )


class _WireGroups(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    groups: list[Annotated[int, Field(ge=0, lt=1 << 32)]] = Field(max_length=EPISODES_MAX)


class ShareDesk:
    """The handlers, and `take` for what does not come over the network."""

    def __init__(
        self,
        swarm: Standpoint,
        group_size: int,
        checker: Checker,
        learner: Callable[[], Learns | None],
    ) -> None:
        """`learner` is this node's, None while there is none."""
        self._swarm = swarm
        self._group_size = group_size
        self._checker = checker
        self._learner = learner
        self._share: Share | None = None
        self._taking = asyncio.Lock()
        self._handing: set[PeerId] = set()
        """Whose share is on its way or looked through: one at a time, as it may be large."""
        self._doubted: tuple[PeerId, int] | None = None
        """Whose share was doubted last, and of which step."""
        self._looked_at: tuple[tuple[int, str | None] | None, dict[int, bytes]] = (None, {})
        """Step and state, and by trajectory what was right so far of shares not taken yet."""

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_post(SHARE_PATH, self._post)
        router.add_get(SHARE_PATH, self._get)

    def groups(self, step: int) -> Collection[int] | None:
        """Of which episodes were taken in this step; None if no share was."""
        share = self._of(step)
        if share is None:
            return None
        return {trajectory // self._group_size for trajectory in share.trajectories}

    def learner_started(self) -> None:
        """What the learner of an earlier life was given is lost."""
        if share := self._of(self._swarm.version):
            for part in share.parts:
                self._teach(share.step, part)

    async def take(self, giver: PeerId, step: int, episodes: Sequence[bytes]) -> None:
        """NotYet or ShareRefused if this cannot be; nothing if it is there already."""
        async with self._taking:
            self._require_turn(giver, step)
            share = self._of(step) or Share(step, self._swarm.head)
            new = await asyncio.to_thread(_new, step, episodes, share.trajectories)
            if share is self._share and not new:
                return
            if giver != self._swarm.me:
                await self._require_truth(giver, share, new)
                self._require_turn(giver, step)
            part = tuple(new.values())
            share.parts.append(part)
            share.trajectories.update(new)
            self._share = share
            self._looked_at = (None, {})
            self._teach(step, part)

    def _of(self, step: int) -> Share | None:
        """What was taken of the step, unless we have come to another lineage since."""
        share = self._share
        if share is None or share.step != step:
            return None
        is_past = step != self._swarm.version
        return share if is_past or share.head == self._swarm.head else None

    def _require_turn(self, giver: PeerId, step: int) -> None:
        version, dispatcher = self._swarm.version, self._swarm.dispatcher
        if step > version:
            raise NotYet(f"a share of step {step}; this node is at {version} still")
        if step < version:
            raise ShareRefused(f"a share of step {step}; this node is at {version} already")
        if not self._swarm.may_dispatch(giver):
            raise ShareRefused(f"step {step} is dispatched by {dispatcher} as seen from here")

    async def _require_truth(
        self, giver: PeerId, share: Share, episodes: Mapping[int, bytes]
    ) -> None:
        step = share.step
        try:
            async with asyncio.timeout(CHECK_S):
                wrong = await self._first_lie(share, episodes)
        except TimeoutError as error:
            raise NotYet(f"the checks of a share took more than {CHECK_S:.0f} s") from error
        if self._swarm.version == step and self._swarm.head != share.head:
            raise NotYet("this node has come to another lineage while it looked through a share")
        if wrong is None:
            return
        text = f"an episode in the share of {giver[-8:]} is not true: {wrong.reason}"
        if not wrong.is_token or self._doubted == (giver, step):
            raise PeerError(text)
        self._doubted = (giver, step)
        raise ShareDoubted(text)

    async def _first_lie(self, share: Share, episodes: Mapping[int, bytes]) -> _Lie | None:
        """What was looked at when the time was over is not looked at again."""
        looked_at = self._looked_at_of(share)
        left = {t: data for t, data in episodes.items() if looked_at.get(t) != data}
        if story := await self._first_refusal(share.step, list(left.values()), ()):
            return _Lie(story, is_token=False)
        for trajectory, data in left.items():
            is_drawn = self._checker.draw()
            if is_drawn and (token := await self._first_refusal(share.step, [data], (0,))):
                return _Lie(token, is_token=True)
            looked_at[trajectory] = data
        return None

    def _looked_at_of(self, share: Share) -> dict[int, bytes]:
        state = (share.step, share.head)
        if self._looked_at[0] != state:
            self._looked_at = (state, {})
        return self._looked_at[1]

    async def _first_refusal(
        self, step: int, episodes: Sequence[bytes], replayed: Collection[int]
    ) -> str | None:
        refusals = await self._checker.refusals(step, episodes, replayed, ended=True)
        return next((refusal for refusal in refusals if refusal is not None), None)

    def _teach(self, step: int, part: Sequence[bytes]) -> None:
        if learner := self._learner():
            learner.learn(step, part)  # one that starts asks for it by itself

    # ---------------------------------------------------------------- over the network

    async def _post(self, request: web.Request) -> web.StreamResponse:
        giver = PeerId(sender())
        step = int(request.match_info["step"])
        try:
            self._require_turn(giver, step)
            with self._place(giver):
                await self.take(giver, step, unpack_share(await _read(request)))
        except NotYet as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from error
        except ShareDoubted as error:
            raise web.HTTPUnprocessableEntity(text=str(error)) from error
        except ShareRefused as error:
            raise web.HTTPConflict(text=str(error)) from error
        except PeerError as error:
            self._swarm.blame(giver, str(error))
            raise web.HTTPConflict(text=str(error)) from error
        return web.Response(status=204)

    @contextmanager
    def _place(self, giver: PeerId) -> Iterator[None]:
        """For a share; NotYet if another one of the giver has it."""
        if giver in self._handing:
            raise NotYet("another share of yours is on its way")
        self._handing.add(giver)
        try:
            yield
        finally:
            self._handing.discard(giver)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        groups = self.groups(int(request.match_info["step"]))
        if groups is None:
            raise web.HTTPNotFound(text="no share was taken here")
        return web.Response(body=pack_groups(groups))


def share_path(step: int) -> str:
    return f"/v1/rollouts/share/{step}"


def pack_share(episodes: Sequence[bytes]) -> bytes:
    return bytes(msgpack.packb({"episodes": list(episodes)}))


def unpack_share(body: bytes) -> list[bytes]:
    """PeerError for anything else."""
    return _unpacked(_Wire, body).episodes


def pack_groups(groups: Collection[int]) -> bytes:
    return bytes(msgpack.packb({"groups": sorted(groups)}))


def unpack_groups(body: bytes | bytearray) -> list[int]:
    """PeerError for anything else."""
    return _unpacked(_WireGroups, body).groups


def _new(step: int, episodes: Sequence[bytes], known: Collection[int]) -> dict[int, bytes]:
    """By trajectory, those that are not known yet. PeerError for what is none of the step, or is
    there twice."""
    new: dict[int, bytes] = {}
    for data in episodes:
        episode = unpack(data)
        if episode.step != step or episode.trajectory in new:
            raise PeerError(
                f"trajectory {episode.trajectory} of step {episode.step} twice, or in a share"
                f" of step {step}"
            )
        if episode.trajectory not in known:
            new[episode.trajectory] = data
    return new


async def _read(request: web.Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > SHARE_BYTES_MAX:
                    raise web.HTTPRequestEntityTooLarge(SHARE_BYTES_MAX, len(body))
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    return bytes(body)


M = TypeVar("M", bound=BaseModel)


def _unpacked(form: type[M], body: bytes | bytearray) -> M:
    try:
        return form.model_validate(
            msgpack.unpackb(body, max_map_len=1, max_array_len=EPISODES_MAX, list_hook=_flat)
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PeerError(sentence(f"a malformed share: {where}: {first['msg']}")) from error
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise PeerError(sentence(f"a malformed share: {error}")) from error


def _flat(items: list[object]) -> list[object]:
    """Refuses lists of anything larger than bytes, of which a small body could hold many."""
    if any(isinstance(item, list | dict) for item in items):
        raise ValueError("a list in which there are more of them")
    return items
