"""`python -m p2pdiloco.simulation SEED` tells the history of one trial."""

import sys

from p2pdiloco.simulation.trial import run_trial


def main(seed: str) -> None:
    world = run_trial(int(seed), trace=_tell)
    sys.stdout.write(f"{world.num_events} events, history {world.history()}\n")


def _tell(now: float, who: str, text: str) -> None:
    sys.stdout.write(f"{now:8.3f} {who}: {text}\n")


if __name__ == "__main__":
    main(sys.argv[1])
