"""A node as a person starts it, but for its learner, which is `benchmarks.paced_learner`.

python -m benchmarks.paced_node PYTHON -m p2pdiloco_daemon.cli.main join ...
"""

import sys

from p2pdiloco_daemon.cli import main as cli
from p2pdiloco_daemon.learner.learner import Learner

if __name__ == "__main__":
    Learner.module = "benchmarks.paced_learner"
    sys.exit(cli.main(sys.argv[5:]))
