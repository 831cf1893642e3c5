"""This machine's word on when a sync is safe: what presses on it, what it has learnt, its policy.

The daemon measures once a second (`measured`); for each fragment that waits for a round the core
asks for a decision, which is kept for the page. A node that says "wait" asks the others for time;
`pacing.is_put_off` says whether it gets any.
"""

import random
from dataclasses import dataclass

from p2pdiloco.protocol.calibration import Answer, Forecast, LatencyModel
from p2pdiloco.protocol.policies import (
    TOKENS_FULL,
    Calibrated,
    Decision,
    Fixed,
    Load,
    Moment,
    Policy,
    Pressure,
    PressureGate,
    RandomMoment,
    Tokens,
    WorkloadAware,
    decide,
)


@dataclass(frozen=True, slots=True)
class Served:
    """What was answered on this machine in the last second, by whatever serves here.

    `load` is that of now (see `Answer`), `rate` answers were given per second; one should take at
    most `target_s`.
    """

    target_s: float
    load: float
    rate: float
    answers: tuple[Answer, ...] = ()


def policy_called(name: str, rng: random.Random, tokens: int = TOKENS_FULL) -> Policy:
    """By its name in the run spec; `tokens` are for the policy of that name."""
    match name:
        case "tokens":
            return Tokens(tokens)
        case "load":
            return Load()
        case "pressure-gate":
            return PressureGate()
        case "workload-aware":
            return WorkloadAware()
        case "calibrated":
            return Calibrated()
        case "random":
            return RandomMoment(rng)
        case "fixed":
            return Fixed()
    raise ValueError(f"no policy is called {name!r}")


class Pacer:
    """One per node."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.model = LatencyModel()
        self.pressure = Pressure()
        self.served: Served | None = None
        self.decisions: dict[int, Decision] = {}
        """Fragment -> the newest."""

    @property
    def forecast(self) -> Forecast | None:
        """Of a sync that begins now; None while nothing serves here, or too little is known."""
        if (served := self.served) is None:
            return None
        return self.model.forecast(served.load, served.rate, served.target_s)

    def measured(self, pressure: Pressure, served: Served | None) -> None:
        self.pressure, self.served = pressure, served
        for answer in served.answers if served else ():
            self.model.add(answer)
        if isinstance(self.policy, Calibrated) and (forecast := self.forecast):
            self.policy.history.add(forecast.cost)

    def decide(self, moment: Moment) -> Decision:
        decision = self.decisions[moment.fragment] = decide(self.policy, moment)
        return decision
