"""The node as contributor: it answers open rounds with outer gradients, and keeps the ledger of its
tokens.

A fragment has at most one offer, for the newest round that asked:

    waiting for the learner to stand on the version --> preparing --> ready --> settled when the
    learner receives the next version
"""

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol import election, events
from p2pdiloco.protocol.actions import DropContribution, InstallFragment, PrepareContribution
from p2pdiloco.protocol.ledger import BRANCH, NOT_ASKED
from p2pdiloco.protocol.lineage import Record
from p2pdiloco.protocol.naming import PeerId, RoundId, sentence
from p2pdiloco.protocol.register import Offer, Register
from p2pdiloco.protocol.state import NodeState
from p2pdiloco.protocol.wire import ContributionReady, RoundDeclined, RoundOpened

NOT_IN_TIME = "ready, but not before the round closed"
LEARNER_DIED = "the learner died before they were merged"
OLD_FENCE = "an old term or attempt"
ATTEMPT_LEAP_MAX = 2**24
"""A swarm that waits for a quorum takes years to count so far, an attempt with each patience that
it loses, and who is started anew begins at 0; larger leaps would use the numbers up.
"""


def round_opened(node: NodeState, sender: PeerId, message: RoundOpened) -> ContributionReady | None:
    """Returns the report at once if the outer gradient for this round lies ready already."""
    register, round_id = node.registers[message.round.fragment], message.round
    if round_id.term != election.term_of(round_id.version, node.config.term_merges):
        raise PeerError("it opened a round under a term that its version does not belong to")
    if round_id.attempt > register.attempt_in(round_id.term) + ATTEMPT_LEAP_MAX:
        raise PeerError("it opened a round under an attempt far ahead of any seen")
    reason = _why_not(node, register, sender, message)
    offer = register.offer
    if reason:
        decline(node, sender, round_id, reason)
        return None
    if offer and offer.round == round_id:
        return offer.report
    register.fence = round_id.fence
    if offer:
        node.do(DropContribution(register.index))
    register.offer = Offer(round_id, sender)
    prepare_if_possible(node, register)
    return None


def _why_not(
    node: NodeState, register: Register, sender: PeerId, message: RoundOpened
) -> str | None:
    round_id, chain = message.round, register.chain
    if not node.ready or chain is None:
        return "not taking part at the moment"
    if not node.cooled_down(sender):
        return "cooling down after wrong bytes"
    if register.distrusted:
        return "its own state is being replaced"
    if round_id.version <= chain.version:
        node.tell_head(sender, register)
        return f"already at v{chain.version}"
    if round_id.version > chain.version + 1:
        return f"still at v{chain.version}"
    if message.parent != chain.digest:
        node.tell_head(sender, register)
        return "on another lineage"
    if round_id.fence < register.fence:
        node.refuse(OLD_FENCE)
        return f"{OLD_FENCE}: {round_id.fence} is before {register.fence}"
    offer = register.offer
    if offer and offer.synchronizer != sender and _holds(node, offer, sender, round_id):
        return f"already in {offer.round} of {offer.synchronizer[-8:]}"
    if not node.learner_alive:
        return "the learner is not running"
    return None


def _holds(node: NodeState, offer: Offer, sender: PeerId, round_id: RoundId) -> bool:
    """Whether our offer to another synchronizer stands: nobody takes it over out of turn."""
    if offer.round == round_id:
        return True
    due = offer.round.version == round_id.version and node.is_alive(offer.synchronizer)
    return due and not node.is_turn_of(sender, round_id)


def decline(node: NodeState, synchronizer: PeerId, round_id: RoundId, reason: str) -> None:
    register = node.registers[round_id.fragment]
    if synchronizer != node.me:
        attempt = register.attempt_in(round_id.term)
        node.send(synchronizer, RoundDeclined(round_id, sentence(reason), attempt))
    elif register.round and register.round.id == round_id:
        register.round.decline(node.me, sentence(reason))


def prepare_if_possible(node: NodeState, register: Register) -> None:
    """A learner that has not received the round's base yet receives it first."""
    offer = register.offer
    if offer and not offer.preparing and register.installed == offer.round.version - 1:
        offer.preparing = True
        node.do(PrepareContribution(offer.round, hold=node.config.blocks))


def prepared(node: NodeState, event: events.ContributionPrepared) -> ContributionReady | None:
    """Returns the report for the synchronizer if it still wants one."""
    register = node.registers[event.round.fragment]
    offer = register.offer
    if not offer or offer.round != event.round:
        return None
    offer.report = ContributionReady(
        event.round, event.steps, event.tokens, event.num_bytes, node.step_s
    )
    return offer.report


def failed(node: NodeState, event: events.ContributionFailed) -> None:
    register = node.registers[event.round.fragment]
    offer = register.offer
    if offer and offer.round == event.round:
        register.offer = None
        decline(node, offer.synchronizer, event.round, event.reason)


def steps_done(node: NodeState, event: events.StepsDone) -> None:
    for register in node.registers:
        if register.installed is not None:
            register.steps += event.steps
            node.ledger.step(register.index, event.tokens)


def learner_started(node: NodeState) -> None:
    node.learner_alive = True
    for register in node.registers:
        if register.chain and not register.pursuit:
            hand_over(node, register)


def hand_over(node: NodeState, register: Register) -> None:
    """Gives the learner, if it runs, the state that we hold; not twice, which would cost it the
    steps between.
    """
    assert register.chain
    if register.distrusted:
        return
    if node.learner_alive and register.handed != register.chain.digest:
        register.handed = register.chain.digest
        node.do(InstallFragment(register.index, register.version))


def learner_stopped(node: NodeState, reason: str) -> None:
    node.learner_alive, node.step_s, node.tokens_per_s = False, 0.0, 0.0
    node.note(f"the learner stopped: {reason}")
    for register in node.registers:
        if register.installed is not None:
            _settle(node, register, register.installed + 1, LEARNER_DIED)
        register.installed, register.handed, register.steps = None, None, 0


def installed(node: NodeState, event: events.FragmentInstalled) -> None:
    """The learner moved on: whatever it had trained on the version before is settled."""
    register = node.registers[event.fragment]
    pending = node.ledger.pending[register.index]
    assert event.tokens == pending, f"the learner counted {event.tokens} tokens, we {pending}"
    if register.installed is not None:
        _settle(node, register, register.installed + 1, NOT_ASKED)
    register.installed, register.steps = event.version, 0
    register.installed_at, register.loss_then = node.now, node.loss
    register.asks_for_time = False
    prepare_if_possible(node, register)


def version_reached(node: NodeState, register: Register) -> None:
    """The replica moved to a new version: an offer for it, or for one before, is over once the
    learner receives it.
    """
    if register.chain and register.chain.head:
        _revise(node, register, register.chain.head)
    if register.offer and register.offer.round.version <= register.version:
        node.do(DropContribution(register.index))


def lineage_changed(node: NodeState, register: Register) -> None:
    """After a fork: what was merged on the losing branch is lost, and the page says so. An outer
    gradient that lies ready there is of no use here.
    """
    chain, offer = register.chain, register.offer
    assert chain
    if offer:
        node.do(DropContribution(register.index))
        if offer.round.version - 1 != register.installed:
            register.offer = None
    for version in range(chain.base + 1, chain.version + 1):
        record = chain.record(version)
        assert record
        _revise(node, register, record)


def _revise(node: NodeState, register: Register, record: Record) -> None:
    """What the record says of us; tokens that are still pending are settled on receipt."""
    if register.installed is None or record.version != register.installed + 1:
        node.ledger.revise(register.index, record.version, record.tokens_of(node.me))


def branch_lost(node: NodeState, register: Register, first: int, last: int) -> None:
    """Versions `first` to `last` of our chain are abandoned."""
    before = node.ledger.totals().lost.get(BRANCH, 0)
    for version in range(first, last + 1):
        node.ledger.revise(register.index, version, 0)
    lost = node.ledger.totals().lost.get(BRANCH, 0) - before
    node.note(
        f"fragment {register.index}: another lineage has more merged tokens; "
        f"{last - first + 1} of our versions and {lost} tokens are lost"
    )


def _settle(node: NodeState, register: Register, version: int, otherwise: str) -> None:
    record = register.chain.record(version) if register.chain else None
    offer = register.offer
    if offer and offer.round.version <= version:
        register.offer = None
    offered = offer.tokens if offer and offer.round.version == version else 0
    refusal = record.refusal_of(node.me) if record else None
    node.ledger.settle(
        register.index,
        version,
        merged=record.tokens_of(node.me) if record else 0,
        offered=offered if record else 0,
        kind="rejected" if offered and record else "lost",
        reason=(refusal or NOT_IN_TIME) if offered and record else otherwise,
    )
    if offer and not register.offer and not record:
        node.do(DropContribution(register.index))
