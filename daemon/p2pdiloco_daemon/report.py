"""Puts together what the page, the JSON and the metrics say, from the parts that know it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from math import isfinite
from typing import Protocol

from p2pdiloco.protocol.membership import Member
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.node import Node
from p2pdiloco.protocol.pacer import Pacer
from p2pdiloco.protocol.register import Register
from p2pdiloco.protocol.state import Condition, Post
from p2pdiloco.protocol.wire import PROTOCOL_VERSION
from p2pdiloco.spec import RunSpec
from p2pdiloco_bootstrap.serving import Traffic
from p2pdiloco_daemon.lag import LagMonitor
from p2pdiloco_daemon.learner import learner as learners
from p2pdiloco_daemon.node import NodeShell
from p2pdiloco_daemon.rl.lesson_report import LessonReport
from p2pdiloco_daemon.rollouts.report import RolloutReport
from p2pdiloco_daemon.status import view
from p2pdiloco_daemon.status.curve import Curve
from p2pdiloco_daemon.storage.holdings import Holdings

DIGEST_SHOWN = 12

STILL_S = 60.0
STILL_STEPS = 20
"""A learner that has taken no step for so long, and for the time of so many, is said to stand
still: many times what evaluations and checkpoints take."""


@dataclass
class LearnerReport:
    """What the learner's events add up to."""

    state: view.LearnerState = view.LearnerState.STARTING
    step: int = 0
    loss: float | None = None
    held_out_loss: float | None = None
    device: str | None = None
    num_parameters: int | None = None
    compute_s: float = 0.0
    compute_queued_s: float = 0.0
    stall_s: float = 0.0
    stall_queued_s: float = 0.0
    evaluation_s: float = 0.0
    restarts: int = 0
    last_error: str | None = None
    paused: bool = False
    saving: bool = False
    """Whether its process is writing the inner checkpoint."""
    stepped_at: float | None = None
    """When its process last took a step; None before the first."""
    losses: Curve = field(default_factory=Curve)
    held_out: Curve = field(default_factory=Curve)
    lessons: LessonReport = field(default_factory=LessonReport)

    def take(self, event: learners.LearnerEvent, now: float) -> None:
        match event:
            case learners.Ready():
                self.state, self.step = view.LearnerState.WAITING, event.step
                self.device, self.num_parameters = event.device, event.num_parameters
            case learners.StepsDone():
                self.state, self.step = view.LearnerState.TRAINING, event.step
                self.stepped_at = now
                self.compute_s += event.step_s
                self.compute_queued_s += event.step_queued_s
                self.stall_s += event.stall_s
                self.stall_queued_s += event.stall_queued_s
                self.loss = _smoothed(self.loss, event.loss)
                self.losses.add(event.step, event.loss)
            case learners.Evaluated():
                self.held_out_loss = event.loss
                self.evaluation_s += event.seconds
                self.held_out.add(event.step, event.loss)
            case learners.Idle():
                self.state = view.LearnerState.IDLE
            case learners.Taught() if self.state is view.LearnerState.IDLE:
                self.state, self.stepped_at = view.LearnerState.TRAINING, now
            case learners.Learned():
                self.lessons.take(event)
            case learners.Died():
                self.state, self.last_error = view.LearnerState.RESTARTING, event.reason
                self.restarts += 1
                self.saving = False
            case learners.Saving():
                self.saving = event.under_way
            case learners.CheckpointFailed():
                self.last_error = event.reason
            case _:
                pass

    def stands_still(self, now: float, step_s: float) -> bool:
        """Whether it should train and has not for long, as a process that hangs or was stopped."""
        return (
            self.state is view.LearnerState.TRAINING
            and not self.paused
            and self.stepped_at is not None
            and now - self.stepped_at > max(STILL_S, STILL_STEPS * step_s)
        )

    @property
    def stall_share(self) -> float:
        stall_s = self.stall_s - self.stall_queued_s
        total_s = self.compute_s - self.compute_queued_s + stall_s
        return stall_s / total_s if total_s > 0 else 0.0


def _smoothed(before: float | None, sample: float) -> float:
    """Begins anew after what is no number, as the loss of a step that was skipped may be."""
    if before is None or not isfinite(before):
        return sample
    return 0.9 * before + 0.1 * sample


class NetworkReport(Protocol):
    """Of a `p2pdiloco_daemon.network.Network`, what is told about it."""

    problem: str | None
    restarts: int
    last_error: str | None

    def loneliness(self) -> str | None: ...
    def reach(self) -> str | None: ...


@dataclass
class Reporter:
    """`started` and `now` are monotonic seconds."""

    spec: RunSpec
    run_id: str
    started: float
    now: Callable[[], float]
    node: Node
    shell: NodeShell
    holdings: Holdings
    traffic: Traffic
    lag: LagMonitor
    learner: LearnerReport
    network: NetworkReport
    rollouts: RolloutReport | None = None
    dispatched: Callable[[], view.Dispatching] | None = None
    """In an rl run."""
    page_url: str | None = None
    stopping: bool = False

    def status(self) -> view.Status:
        state = self.node.state
        synchronizer, term, attempt = self._post()
        return view.Status(
            protocol_version=PROTOCOL_VERSION,
            app_version=version("p2pdiloco"),
            peer_id=state.me,
            node_name=state.config.name,
            run=view.Run(id=self.run_id, name=self.spec.name),
            state=self._state(),
            sentence=self._sentence(),
            uptime_s=self.now() - self.started,
            page_url=self.page_url,
            learner=self._learner(),
            loss_curve=self.learner.losses.points(),
            held_out_curve=self.learner.held_out.points(),
            reward_curve=self.learner.lessons.rewards.points(),
            tokens=self._tokens(),
            learning=self.learner.lessons.status() if self.spec.rl else None,
            rollouts=self.rollouts.status(self.now()) if self.rollouts else None,
            dispatching=self.dispatched() if self.dispatched else None,
            merges_total=state.merges,
            first_merge_s=self._first_merge_s(),
            term=term,
            attempt=attempt,
            synchronizer=view.Synchronizer(peer=synchronizer, is_self=synchronizer == state.me)
            if synchronizer
            else None,
            disagreement=self._disagreement(),
            rounds=self._rounds(),
            pacing=self._pacing() if state.config.times.slack_steps else None,
            fragments=[self._fragment(register) for register in state.registers],
            members=self._members(),
            traffic=self._traffic(),
            network=view.Network(
                connected=self.network.problem is None,
                restarts=self.network.restarts,
                last_error=self.network.last_error,
                reach=self.network.reach(),
            ),
            loop_lag=view.LoopLag(
                p50_ms=self.lag.percentile_ms(0.5),
                p99_ms=self.lag.percentile_ms(0.99),
                max_ms=self.lag.percentile_ms(1.0),
            ),
            refusals=dict(state.refusals),
            checkpoint=self._checkpoint(),
            events=[
                view.Event(seconds_ago=self.now() - at, text=text)
                for at, text in reversed(self.shell.notes)
            ],
        )

    # ---------------------------------------------------------------- in one word, in one sentence

    def _state(self) -> view.NodeState:
        if self.stopping:
            return view.NodeState.STOPPING
        if self.node.is_settled:
            return view.NodeState.SETTLED
        by_condition = {
            Condition.FETCHING: view.NodeState.FETCHING,
            Condition.TRAINING: view.NodeState.TRAINING,
            Condition.ISOLATED: view.NodeState.ISOLATED,
            Condition.SETTLED: view.NodeState.TRAINING,
            Condition.LEFT: view.NodeState.STOPPING,
        }
        return by_condition[self.node.condition]

    def _sentence(self) -> str:
        what = self._what()
        cut_off = self._state() in (view.NodeState.FETCHING, view.NodeState.ISOLATED)
        problem = self.network.problem or (self.network.loneliness() if cut_off else None)
        if problem:
            what += f" {problem[0].upper()}{problem[1:]}."
        if self.holdings.disk.error:
            what += " Training goes on, but the checkpoint cannot be written: "
            what += f"{self.holdings.disk.error}"
        if self.rollouts and self.rollouts.state is view.RolloutState.RESTARTING:
            what += " The rollout worker ended and is started again."
        return what

    def _what(self) -> str:
        state = self.node.state
        held = sum(r.chain is not None for r in state.registers)
        others = len(state.membership.ready(state.now))
        swarm = f"{others} other node{'s' if others != 1 else ''}"
        idle = self._why_idle()
        match self._state():
            case view.NodeState.STOPPING:
                return "Leaving: saving and saying goodbye."
            case view.NodeState.SETTLED:
                return "Training has stopped, as asked; everything that was merged has arrived."
            case view.NodeState.FETCHING:
                return f"Fetching the model: {held} of {len(state.registers)} fragments are here."
            case view.NodeState.ISOLATED if idle:
                return f"No other node can be reached; {idle}."
            case view.NodeState.ISOLATED:
                return (
                    f"No other node can be reached: training locally, {self._what_alone()}, "
                    "and looking for the others."
                )
            case _:
                pass
        if state.settling:
            return "Training has stopped, as asked; what was merged last is still on its way."
        if idle:
            return f"{idle[0].upper()}{idle[1:]}; {swarm} go on meanwhile."
        return self._how_it_trains(swarm)

    def _what_alone(self) -> str:
        quorum = self.node.state.config.times.quorum
        if self.node.gossiper:
            return "mixing with nobody"
        return "merging only with itself" if quorum == 1 else f"{quorum} are needed for a merge"

    def _how_it_trains(self, swarm: str) -> str:
        state = self.node.state
        if self.node.gossiper:
            return f"Training with {swarm}, without a synchronizer; this node learns and mixes."
        if self.node.fallback and self.node.fallback.active:
            quorum = state.config.times.quorum
            return (
                f"Training with {swarm}, fewer than the quorum of {quorum}: nothing can be merged; "
                f"until more are back, learners' values are mixed by gossip."
            )
        post = state.post(state.registers[0])[0]
        role = "is the synchronizer" if post == state.me else "contributes its progress"
        if self.learner.state is view.LearnerState.IDLE:
            return f"Training with {swarm}; this node waits for rollouts and {role}."
        return f"Training with {swarm}; this node learns and {role}."

    def _why_idle(self) -> str | None:
        """What keeps the learner from training, in words; None while it trains."""
        if self.learner.state is view.LearnerState.RESTARTING:
            return "the learner process ended and is started again"
        if not self.node.state.learner_alive or self.learner.state not in (
            view.LearnerState.TRAINING,
            view.LearnerState.IDLE,
        ):
            return "waiting for the learner to start"
        if self._stands_still():
            return (
                f"the learner has taken no step for more than {STILL_S:.0f} s: its process hangs, "
                "was stopped, or waits for the machine"
            )
        return None

    def _stands_still(self) -> bool:
        return self.learner.stands_still(self.now(), self.node.state.step_s)

    # ---------------------------------------------------------------- the parts

    def _post(self) -> Post:
        """Of the first fragment; nobody's where there is no synchronizer."""
        if self.node.gossiper:
            return None, 0, 0
        return self.node.state.post(self.node.state.registers[0])

    def _learner(self) -> view.Learner:
        state, learner = self.node.state, self.learner
        return view.Learner(
            state=view.LearnerState.PAUSED if learner.paused else learner.state,
            step=learner.step,
            tokens_per_s=(not self._stands_still() and state.tokens_per_s) or None,
            step_s=state.step_s or None,
            loss=learner.loss,
            held_out_loss=learner.held_out_loss,
            device=learner.device,
            num_parameters=learner.num_parameters,
            stall_share=learner.stall_share,
            compute_s=learner.compute_s,
            compute_queued_s=learner.compute_queued_s,
            stall_s=learner.stall_s,
            stall_queued_s=learner.stall_queued_s,
            evaluation_s=learner.evaluation_s,
            restarts=learner.restarts,
            last_error=learner.last_error,
        )

    def _disagreement(self) -> view.Disagreement | None:
        if not (self.shell.gossip and self.node.gossiper):
            return None
        distance = self.shell.gossip.mixing.distance
        parameters, share = distance or (None, None)
        return view.Disagreement(
            outputs=self.shell.gossip.output_distance,
            parameters=parameters,
            parameters_share=share,
            curve=self.shell.gossip.output_distances.points(),
        )

    def _tokens(self) -> view.TokenLedger:
        totals = self.node.state.ledger.totals()
        return view.TokenLedger(
            processed=totals.processed,
            merged=totals.merged,
            pending=totals.pending,
            rejected=totals.rejected,
            lost=totals.lost,
        )

    def _first_merge_s(self) -> float | None:
        at = self.shell.first_merge_at
        return at - self.started if at is not None else None

    def _rounds(self) -> list[view.Round]:
        return [
            view.Round(
                fragment=r.fragment,
                version=r.version,
                term=r.term,
                attempt=r.attempt,
                synchronizer=r.synchronizer,
                contributors=list(r.contributors),
                outcome=r.outcome,
                reason=r.reason,
                seconds_ago=self.now() - r.at,
                duration_s=r.duration_s,
            )
            for r in reversed(self.node.state.rounds)
        ]

    def _pacing(self) -> view.Pacing:
        state, pacer = self.node.state, self.node.state.pacer
        served, fragments = pacer.served, [self._next_sync(r) for r in state.registers]
        nearest = min(fragments, key=lambda f: f.closes - f.steps)
        quiet, syncing = (self._bound(pacer, in_flight) for in_flight in (False, True))
        return view.Pacing(
            policy=state.config.pacing,
            sentence=_sentence_of(nearest),
            pressure=asdict(pacer.pressure),
            fragments=fragments,
            target_s=served.target_s if served else None,
            quiet=quiet,
            syncing=syncing,
            answers_total=pacer.model.num_answers,
            relearned=pacer.model.relearned,
        )

    def _next_sync(self, register: Register) -> view.NextSync:
        opens, closes = self.node.state.window(register)
        decision = self.node.state.pacer.decisions.get(register.index)
        return view.NextSync(
            fragment=register.index,
            steps=self.node.state.local_steps(register),
            opens=opens,
            closes=closes,
            asks_for_time=register.asks_for_time,
            reason=decision.reason if decision else "nothing was measured yet",
        )

    @staticmethod
    def _bound(pacer: Pacer, syncing: bool) -> view.Bound | None:
        if (served := pacer.served) is None:
            return None
        return view.Bound(
            bound_s=pacer.model.bound_s(served.load, syncing),
            late=pacer.model.late(served.load, syncing, served.target_s),
            coverage=pacer.model.coverage[syncing].share,
        )

    def _fragment(self, register: Register) -> view.Fragment:
        held = self.holdings.replica.state(register.index)
        if held and held.version != register.version:
            held = None  # it has just been replaced, which the core learns in a moment
        head = register.chain.head if register.chain else None
        return view.Fragment(
            index=register.index,
            version=register.version,
            head_version=max(register.newest_seen, register.version),
            state=_sync_state(register),
            num_values=self.holdings.replica.fragments[register.index].size,
            digest=held.digest[:DIGEST_SHOWN] if held else None,
            record_digest=head.digest[:DIGEST_SHOWN] if head else None,
            local_steps=register.steps,
            merged_tokens=head.tokens_total if head else 0,
            damaged_times=register.damaged,
            mended_s_ago=self.now() - register.mended_at
            if register.mended_at is not None
            else None,
        )

    def _members(self) -> list[view.Member]:
        state = self.node.state
        posts = set[PeerId | None]()
        if not self.node.gossiper:
            posts = {state.post(register)[0] for register in state.registers}
        me = view.Member(
            peer=state.me,
            name=state.config.name,
            is_self=True,
            ready=state.ready,
            versions_behind=sum(
                max(0, r.newest_seen - r.version) for r in state.registers if r.chain
            ),
            step_s=state.step_s or None,
            tokens_per_s=state.tokens_per_s or None,
            last_heard_s=0.0,
            is_synchronizer=state.me in posts,
        )
        known = sorted(state.membership.members.items())
        return [me, *(self._member(m, peer in posts) for peer, m in known)]

    def _member(self, member: Member, is_synchronizer: bool) -> view.Member:
        state, heartbeat = self.node.state, member.heartbeat
        donors = state.config.genesis_donors
        heard = self.now() - member.last_news
        behind = None
        if heartbeat:
            heads = zip(state.registers, heartbeat.heads, strict=True)
            behind = sum(max(0, r.newest_seen - head.version) for r, head in heads)
        return view.Member(
            peer=member.peer,
            name=heartbeat.name if heartbeat else "",
            alive=member.alive(state.now) or (member.peer in donors and heartbeat is None),
            ready=bool(heartbeat and heartbeat.ready),
            role=view.Role.BOOTSTRAP if member.peer in donors else view.Role.LEARNER,
            versions_behind=behind,
            step_s=heartbeat.step_s or None if heartbeat else None,
            tokens_per_s=heartbeat.tokens_per_s or None if heartbeat else None,
            last_heard_s=heard if heard < float("inf") else None,
            is_synchronizer=is_synchronizer,
        )

    def _traffic(self) -> view.Traffic:
        up, down = self.traffic.up, self.traffic.down
        return view.Traffic(
            sent_bytes=up.total(),
            received_bytes=down.total(),
            upload_limit_bytes_per_s=self.traffic.uplink.rate,
            by_kind={
                kind: view.ByteCount(sent_bytes=up[kind], received_bytes=down[kind])
                for kind in sorted(up.keys() | down.keys())
            },
        )

    def _checkpoint(self) -> view.Checkpoint:
        saved_at = self.holdings.disk.saved_at
        return view.Checkpoint(
            last_saved_s_ago=self.now() - saved_at if saved_at is not None else None,
            error=self.holdings.disk.error,
            bytes_on_disk=self.holdings.bytes_on_disk,
        )


def _sentence_of(sync: view.NextSync) -> str:
    """For people: which sync comes next, and why it does or waits."""
    what = f"sync of fragment {sync.fragment} at step {sync.steps}"
    if sync.steps < sync.opens:
        return f"{what} of {sync.opens}"
    if sync.asks_for_time:
        return f"{what}, by step {sync.closes} at the latest, waiting because {sync.reason}"
    return f"{what}, ready because {sync.reason}"


def _sync_state(register: Register) -> view.FragmentSync:
    if register.distrusted:
        return view.FragmentSync.DIVERGED
    if register.chain is None:
        return view.FragmentSync.FETCHING if register.busy else view.FragmentSync.EMPTY
    behind = register.newest_seen > register.version
    return view.FragmentSync.BEHIND if behind else view.FragmentSync.IN_SYNC
