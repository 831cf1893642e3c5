"""TCP ports that a person names, and whether they are free."""

import argparse
import socket

from p2pdiloco.errors import UserError

STATUS_PORT = 8700
"""Of the status page, always on loopback."""
PORT_MAX = 65535


def port_number(text: str) -> int:
    """argparse type: 0 (any free one) to 65535."""
    try:
        port = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a port number, got {text!r}") from None
    if not 0 <= port <= PORT_MAX:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to {PORT_MAX}, got {port}")
    return port


def host_and_port(text: str) -> tuple[str, int]:
    """argparse type: HOST:PORT, for example 0.0.0.0:4001 or [::]:4001."""
    host, separator, port = text.rpartition(":")
    if not separator or not host:
        raise argparse.ArgumentTypeError(
            f"expected HOST:PORT, for example 0.0.0.0:4001, got {text!r}"
        )
    return host.removeprefix("[").removesuffix("]"), port_number(port)


def require_free(host: str, port: int, option: str) -> None:
    """UserError naming the port and the option that chooses another, if it is in use, or, counted
    up from the one that was named, there is none."""
    if port > PORT_MAX:
        raise UserError(f"there is no port {port}; choose a lower one with {option}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # as the server will: a port left by a stopped node in TIME_WAIT is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise UserError(
            f"port {port} on {host} cannot be used ({error.strerror}); stop the program that "
            f"holds it, or choose another port with {option}"
        ) from error
