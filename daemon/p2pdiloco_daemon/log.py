"""Logging of a daemon: one line each to stderr, ours at INFO, the libraries' at WARNING."""

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

OURS = ("p2pdiloco", "p2pdiloco_daemon", "p2pdiloco_bootstrap")


def configure_logging() -> None:
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING
    )
    logging.getLogger("aiohttp.server").addFilter(is_no_stranger_s_mistake)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)


def is_no_stranger_s_mistake(record: logging.LogRecord) -> bool:
    """False for a request that is no HTTP, whose body cannot be decoded, or whose sender went
    before all of it had come: whoever can send it could fill the log with tracebacks.
    """
    error = record.exc_info[1] if record.exc_info else None
    strange = (HttpProcessingError, web.RequestPayloadError, ConnectionResetError)
    return not isinstance(error, strange)
