"""Whether a node reaches another on any port, by small and by large messages; shared files."""

import errno
import fcntl
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from .meeting import SEGMENT

LARGE = 2**18  # bytes: some hundred packets of 1,500
SECONDS = 3.0  # that each part of a probe may take


class Server:
    """Answers probes on a port that the system chose, as it does for Gloo and NCCL."""

    def __init__(self, node: int):
        self.node, family = node, socket.AF_INET
        if socket.has_dualstack_ipv6():
            family = socket.AF_INET6
        self.socket = socket.create_server(
            ("", 0), family=family, backlog=256, dualstack_ipv6=family == socket.AF_INET6
        )
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):  # once it is closed
            while True:
                connection, _ = self.socket.accept()
                threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        """Says which node this is, takes a large message, says so, and sends one back."""
        with connection, suppress(OSError):
            connection.settimeout(3 * SECONDS)
            connection.sendall(b"%6d" % self.node)
            take(connection, LARGE)
            connection.sendall(b"got it")
            connection.sendall(bytes(LARGE))


def take(connection: socket.socket, count: int) -> bytes:
    """The next bytes. Raises OSError if they do not come."""
    parts = []
    while count:
        if not (part := connection.recv(min(count, 65536))):
            raise ConnectionError("closed")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def reach(address: str, port: int, segment: int | None = None) -> dict:
    """What happened: `failed` is None, or connect, small, large (there) or back (from there).

    `who` is the node that answered. segment: of how many bytes a packet is at most.
    """
    result = {"failed": "connect", "why": None, "who": None}
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        if segment:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
        connection.settimeout(SECONDS)
        try:
            connection.connect((address, port))
            result["failed"] = "small"
            result["who"] = int(take(connection, 6))
            result["failed"] = "large"
            connection.sendall(bytes(LARGE))
            take(connection, 6)
            result["failed"] = "back"
            take(connection, LARGE)
            result["failed"] = None
        except (OSError, ValueError) as error:
            result["why"] = getattr(error, "strerror", None) or str(error)
    return result


def reach_all(targets: list[tuple[int, str, int]]) -> list[dict]:
    """Reaches all of (node, address, port) at once; where large messages get lost, also in small
    packets.
    """

    def one(target):
        node, address, port = target
        result = {"node": node, "address": address, "port": port, **reach(address, port)}
        if result["failed"] in ("large", "back"):
            result["in_small_packets"] = reach(address, port, SEGMENT)["failed"] is None
        return result

    with ThreadPoolExecutor(max(1, min(len(targets), 128))) as pool:
        return [*pool.map(one, targets)]


class Shared:
    """A folder that all nodes should see, and whether a lock in it holds on all of them."""

    def __init__(self, folder: Path, token: str):
        self.path, self.file = folder / f".doctor-{token}", None

    def make(self) -> str | None:
        """Node 0: writes a file and locks it. Returns what went wrong."""
        try:
            self.file = open(self.path, "w")
            self.file.write("shared")
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            return f"write: {error.strerror}"
        return self.lock()

    def lock(self) -> str | None:
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return "held" if error.errno == errno.EWOULDBLOCK else f"flock: {error.strerror}"
        return None

    def look(self) -> str | None:
        """The others: `held` is right, None means that two nodes had the lock at once."""
        for _ in range(50):  # a network file system may show a new file late
            with suppress(OSError):
                self.file = open(self.path, "r+")
                return self.lock()
            time.sleep(0.1)
        return "not there"

    def close(self, node: int) -> None:
        if self.file:
            self.file.close()
        if node == 0:
            self.path.unlink(missing_ok=True)
