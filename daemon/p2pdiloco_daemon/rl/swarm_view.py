"""What the dispatcher of rollouts asks the core: whose step it is, and who is there.

In an rl run the model is one fragment, so a step is a version of it: whoever makes the next version
dispatches the rollouts for it.
"""

from p2pdiloco.protocol import events
from p2pdiloco.protocol.dealing import Learner
from p2pdiloco.protocol.membership import Member
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.state import NUM_DEPUTIES
from p2pdiloco_daemon.node import NodeShell


class SwarmView:
    """Of the core of an rl run."""

    def __init__(self, shell: NodeShell) -> None:
        self._shell = shell
        self._state = shell.node.state
        self._register = shell.node.state.registers[0]

    @property
    def me(self) -> PeerId:
        return self._state.me

    @property
    def version(self) -> int:
        """That we hold; below 0 if none."""
        return self._register.version

    @property
    def head(self) -> str | None:
        """Names our state of this version, and no other; None if we hold none."""
        return self._register.chain.digest if self._register.chain else None

    @property
    def dispatcher(self) -> PeerId | None:
        """Of the step of our version, unless its version is another state than ours."""
        if not self._register.chain:
            return None
        peer = self._state.post(self._register)[0]
        member = self._state.membership.members.get(peer) if peer else None
        return peer if member is None or self._may_stand_here(member) else None

    def may_dispatch(self, peer: PeerId) -> bool:
        """Whether it dispatches in our attempt or in one next to it. Members that lost patience
        with a slow round at different moments disagree about the attempt until the next one; the
        share of another attempt's dispatcher is as good, since it is checked."""
        state, register = self._state, self._register
        post, term, attempt = state.post(register)
        member = state.membership.members.get(peer)
        if not register.chain or (member and not self._may_stand_here(member)):
            return False
        near = range(max(0, attempt - NUM_DEPUTIES), attempt + NUM_DEPUTIES + 1)
        drawn = (state.drawing(register.index, term, each).first for each in near)
        return peer == post or peer in drawn

    def workers(self) -> list[PeerId]:
        """The living that may be asked, this node first."""
        state = self._state
        alive = state.membership.alive(state.now)
        others = (member.peer for member in alive if self._may_stand_here(member))
        return [state.me, *filter(state.cooled_down, others)]

    def learners(self) -> dict[PeerId, Learner]:
        """The living that can contribute to the next version."""
        state, version = self._state, self.version
        learners = {
            member.peer: Learner(
                heartbeat.incarnation,
                heartbeat.local_steps[0] if heartbeat.heads[0].version == version else 0,
                heartbeat.step_s > 0,
            )
            for member, heartbeat in state.membership.ready(state.now)
            if state.cooled_down(member.peer) and self._may_stand_here(member)
        }
        if state.ready:
            steps = state.local_steps(self._register)
            learners[state.me] = Learner(state.config.incarnation, steps, state.step_s > 0)
        return learners

    def _may_stand_here(self, member: Member) -> bool:
        """Not with another state of the same version, on another lineage: what it generates would
        look untrue here, and it is no liar."""
        head = member.heartbeat.heads[0] if member.heartbeat else None
        chain = self._register.chain
        if head is None or chain is None or head.version != chain.version:
            return True
        return head.digest == chain.digest

    def blame(self, peer: PeerId, reason: str) -> None:
        """The peer sent what is not true: it is left alone for a while, and another dispatches."""
        self._shell.post(events.WrongBytes(peer, reason))

    def pass_over(self, reason: str) -> None:
        """Another is to dispatch."""
        self._shell.post(events.DispatcherIdle(reason))

    def note(self, text: str) -> None:
        self._shell.tell(text)
