"""The listening socket: bound before anything else, so that a port in use is the first thing a user hears of."""

from __future__ import annotations

import ipaddress
import socket
import sys

from pegainfer_core.errors import ConfigError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that already queues connections. Raises ConfigError if the address cannot be had; port 0 takes a free one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {host}: no such address ({error})") from error
    family, kind, protocol, _, address = min(
        found, key=lambda entry: entry[0] != socket.AF_INET
    )  # IPv4 if there is one
    listener = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":  # there it would let two servers share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # :: serves IPv4 too
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Base URL of a listening socket; for an address that means all interfaces, the loopback one."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "127.0.0.1"
    elif address.version == 6:
        host = f"[{host}]"
    return f"{scheme}://{host}:{port}"


def is_public(listener: socket.socket) -> bool:
    """Whether other machines may reach it."""
    return not ipaddress.ip_address(listener.getsockname()[0]).is_loopback
