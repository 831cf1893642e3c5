"""`python -m p2pdiloco.simulation SEED [gossip]` tells the history of one trial."""

import sys

from p2pdiloco.simulation.trial import run_gossip_trial, run_trial


def main(seed: str, strategy: str = "quorum") -> None:
    run = run_gossip_trial if strategy == "gossip" else run_trial
    world = run(int(seed), trace=_tell)
    sys.stdout.write(f"{world.num_events} events, history {world.history()}\n")


def _tell(now: float, who: str, text: str) -> None:
    sys.stdout.write(f"{now:8.3f} {who}: {text}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
