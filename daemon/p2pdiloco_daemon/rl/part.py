"""What a node of an rl run has beside the others: it serves turns and takes shares, and dispatches
when it is its turn. The composition root gives it learner and rollout worker once they are there.
"""

import random
from functools import partial

from aiohttp import ClientSession, web
from aiohttp.typedefs import Handler, Middleware

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.placement import Rules
from p2pdiloco.protocol.turns import Step
from p2pdiloco.rl.rules import limits_of, rl_of, rulebook_of, step_of, task_of
from p2pdiloco.signed_spec import SignedSpec
from p2pdiloco_bootstrap.serving import Traffic, sender
from p2pdiloco_daemon.exchange import Exchange
from p2pdiloco_daemon.learner import learner as learners
from p2pdiloco_daemon.node import NodeShell
from p2pdiloco_daemon.rl.checker import Checker
from p2pdiloco_daemon.rl.client import asking_workers
from p2pdiloco_daemon.rl.crew import Crew
from p2pdiloco_daemon.rl.dispatcher import Dispatcher
from p2pdiloco_daemon.rl.routes import RolloutRoutes
from p2pdiloco_daemon.rl.share_desk import ShareDesk
from p2pdiloco_daemon.rl.swarm_view import SwarmView
from p2pdiloco_daemon.rollouts.worker import Rollouts
from p2pdiloco_daemon.status import view


class RlPart:
    """`learner` and `rollouts` are None before they are started."""

    def __init__(self, signed: SignedSpec, shell: NodeShell, traffic: Traffic) -> None:
        """UserError if this machine lacks what the run's tasks need."""
        task_of(signed.spec)
        self.learner: learners.Learner | None = None
        self.rollouts: Rollouts | None = None
        self._spec = signed.spec
        self._run_id = signed.run_id
        self._traffic = traffic
        self._swarm = SwarmView(shell)
        rl = rl_of(signed.spec)
        self._checker = Checker(
            own=lambda: self.rollouts,
            rulebook_of=partial(rulebook_of, signed.spec, signed.run_id),
            replayed_share=rl.replayed_share,
            rng=random.SystemRandom(),
        )
        self._desk = ShareDesk(self._swarm, rl.group_size, self._checker, lambda: self.learner)
        self._routes = RolloutRoutes(lambda: self.rollouts, traffic, lambda: self._swarm.dispatcher)
        self._dispatcher: Dispatcher | None = None

    def add_to(self, app: web.Application) -> None:
        app.middlewares.append(self._noticing())
        self._routes.add_to(app)
        self._desk.add_to(app.router)

    def on_learner(self, event: learners.LearnerEvent) -> None:
        if isinstance(event, learners.Ready):
            self._desk.learner_started()

    async def dispatch(self, exchange: Exchange, session: ClientSession) -> None:
        """Whenever it is this node's turn, for ever."""
        limits = limits_of(self._spec)
        async with asking_workers(session, self._traffic) as workers:
            self._dispatcher = Dispatcher(
                self._swarm,
                Crew(self._swarm.me, lambda: self.rollouts, workers),
                self._desk,
                exchange,
                self._step,
                Rules(turns_max=limits.turns_max, tokens_max=limits.tokens_max),
                self._spec.sync.inner_steps,
                self._checker,
            )
            await self._dispatcher.run()

    def status(self) -> view.Dispatching:
        """Of what this node dispatches."""
        return self._dispatcher.status() if self._dispatcher else view.Dispatching()

    def _noticing(self) -> Middleware:
        """Whoever dispatches is heard of in this way; see `waiting`."""

        @web.middleware
        async def notice(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self._dispatcher and request.path.startswith("/v1/rollouts/"):
                self._dispatcher.heard(PeerId(sender()))
            return await handler(request)

        return notice

    def _step(self, version: int) -> Step:
        return step_of(rulebook_of(self._spec, self._run_id, version))
