"""Logging of a daemon: one line each to stderr, ours at INFO, the libraries' at WARNING."""

import logging

OURS = ("p2pdiloco", "p2pdiloco_daemon", "p2pdiloco_bootstrap")


def configure_logging() -> None:
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING
    )
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)
