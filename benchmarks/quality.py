"""What merging is worth: M learners with the real merge, one alone, and data parallel.

    python -m benchmarks.quality sweep     short runs over outer settings
    python -m benchmarks.quality final     1,000 steps, several seeds, against both baselines
    python -m benchmarks.quality long      4,000 steps against data parallel
    python -m benchmarks.quality merge     radial-directional against plain averaging
    python -m benchmarks.quality wire      what quantized outer gradients cost
    python -m benchmarks.quality spread    who is waited for when learners differ in speed
    python -m benchmarks.quality report    the tables and the picture from what is stored

Results are stored after every evaluation; a finished run is not repeated. Same text, model, batch
per learner and inner optimizer everywhere; the data-parallel baseline sees exactly the swarm's
tokens, in one batch of M times the size.
"""

import argparse
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.quality_outcomes import Outcome, Store
from benchmarks.quality_report import write_report
from benchmarks.quality_runs import Bench, SwarmRun, train_single
from benchmarks.quality_settings import STUDIES, Setting

RESULTS = Path(__file__).parent / "results"


def carry_out(bench: Bench, store: Store, settings: Iterable[Setting], num_steps: int) -> None:
    """Runs what is not stored yet, and prints each result."""
    for setting in settings:
        if store.find(setting, num_steps) is None:
            begun = time.process_time()

            def record(outcome: Outcome, setting: Setting = setting, begun: float = begun) -> None:
                outcome.cpu_s = round(time.process_time() - begun, 1)
                known = store.get(setting)
                if known is None or len(outcome.curve) > len(known.curve):
                    store.put(setting, outcome)

            if setting.swarm:
                SwarmRun(bench, setting, num_steps, record).run()
            else:
                train_single(bench, setting, num_steps, record)
        print(f"{store.find(setting, num_steps):.4f}  {setting}", flush=True)


def main() -> None:
    """Parses the command line and runs one study, or reports on what is stored."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", choices=[*STUDIES, "report"])
    parser.add_argument("--steps", type=int, help="of the median learner, a multiple of 100")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--only", choices=["alone", "swarm", "parallel"], help="one kind of run")
    parser.add_argument("--results", type=Path, default=RESULTS / "quality.json")
    parser.add_argument("--compile", action="store_true", help="torch.compile: a fifth faster")
    args = parser.parse_args()
    store = Store(args.results)
    if args.study == "report":
        write_report(store, args.results.parent)
        return
    torch.set_num_threads(1)
    settings, num_steps, seeds = STUDIES[args.study]
    runs = [run for run in settings(args.seeds or seeds) if args.only in (None, run.kind)]
    carry_out(Bench(args.compile), store, runs, args.steps or num_steps)


if __name__ == "__main__":
    main()
