"""What a forked daemon runs: `python -m forked_daemon FD`, with what `forked` has written there."""

import json
import os
import sys

from p2pdiloco_daemon.cli.main import main

if __name__ == "__main__":
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with open(int(sys.argv[1])) as told:
        arguments, environment = json.load(told)
    os.environ.update(environment)
    sys.exit(main(arguments))
