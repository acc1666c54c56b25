"""Where the nodes tell each other what they found: all of them are connected to node 0.

The packets are small, and there is one port: so it works in a network that loses large packets, or
that lets nothing else pass, and the nodes can say so. Every wait has a limit. Messages are lines of
JSON, so nobody who reaches the port can run code by it.
"""

import json
import socket
import time
from contextlib import suppress

SEGMENT = 1000  # bytes that TCP puts into one packet at most: fits any network's packets
LARGEST = 64 * 2**20  # bytes of a message


class Lost(Exception):
    """This node cannot go on with the others. kind: unknown, silent, refused, own, busy, ..."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


def plain(address: str) -> str:
    """An IPv4 address as such, even if a socket of IPv6 has it."""
    return address.removeprefix("::ffff:").partition("%")[0]


class Line:
    """A connection over which messages go: JSON values, one on each line."""

    def __init__(self, connection: socket.socket):
        self.socket, self.rest = connection, b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.here, self.there = (
            plain(name[0]) for name in (connection.getsockname(), connection.getpeername())
        )

    def send(self, value, seconds: float = 10) -> None:
        """Raises OSError if that takes longer, or nobody is there."""
        self.socket.settimeout(seconds)
        self.socket.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, seconds: float):
        """The next message. Raises OSError if it does not come in time, or nobody is there."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.rest:
            self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            if not (more := self.socket.recv(65536)) or len(self.rest) > LARGEST:
                raise ConnectionError("closed")
            self.rest += more
        line, _, self.rest = self.rest.partition(b"\n")
        try:
            return json.loads(line)
        except ValueError:
            raise ConnectionError("no message of ours") from None


class Meeting:
    """The nodes that came. Node 0 has a line to each of the others; they have one, to node 0.

    notes: what went wrong, as [node or None, text]. Raises Lost where this node is alone.
    """

    def __init__(self, nnodes: int, node: int, host: str, port: int, wait: float):
        self.nnodes, self.node, self.notes = nnodes, node, []
        self.lines: dict[int, Line] = {}
        (self.gather if node == 0 else self.join)(host, port, time.monotonic() + wait)

    def hello(self) -> dict:
        return {"doctor": self.node, "nnodes": self.nnodes, "name": socket.gethostname()}

    def gather(self, host: str, port: int, deadline: float) -> None:
        """Node 0: waits for the others, and tells them that all are there."""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        with socket.socket(family) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
            if family == socket.AF_INET6:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            try:
                server.bind(("", port))
            except OSError as error:
                raise Lost("busy", f"port {port}: {error.strerror}") from None
            server.listen(self.nnodes)
            while len(self.lines) + 1 < self.nnodes and time.monotonic() < deadline:
                server.settimeout(max(deadline - time.monotonic(), 0.001))
                with suppress(OSError):  # one that comes and goes is nobody
                    self.admit(Line(server.accept()[0]))
        if not self.lines:
            with suppress(OSError):
                address = socket.getaddrinfo(host, port)[0][4][0]
                if not own(address):
                    raise Lost("number", f"{host} ({address}) is another machine, not node 0")
            raise Lost("nobody", f"no other node came to port {port}")
        for k in range(1, self.nnodes):
            if k not in self.lines:
                self.notes.append([k, "did not come"])
        for k, line in [*self.lines.items()]:
            try:
                line.send({"come": sorted(self.lines)})
            except OSError:
                self.drop(k, "left at once")

    def admit(self, line: Line) -> None:
        """Takes a node that calls, unless it is none of ours: then both sides say why."""
        hello = line.receive(3)
        if not isinstance(hello, dict) or not isinstance(hello.get("doctor"), int):
            return
        k, name = hello["doctor"], hello.get("name")
        problem = None
        if hello.get("nnodes") != self.nnodes:
            problem = f"{name} says {hello.get('nnodes')} nodes, node 0 says {self.nnodes}"
        elif not 0 < k < self.nnodes:
            problem = f"{name} says that it is node {k}"
        elif k in self.lines:
            problem = f"{name} ({line.there}) says that it is node {k}, which another is"
        if problem:
            self.notes.append([None, problem])
            line.send({"refused": problem})
        else:
            self.lines[k] = line

    def join(self, host: str, port: int, deadline: float) -> None:
        """The others: call node 0 until it answers."""
        while True:
            try:
                line = self.call(host, port)
                line.send(self.hello())
                break
            except Lost:
                if time.monotonic() + 0.3 > deadline:
                    raise
                time.sleep(0.3)
            except OSError:
                time.sleep(0.3)
        try:  # node 0 answers once all are there, or it has waited long enough
            answer = line.receive(max(deadline - time.monotonic(), 0) + 20)
        except OSError:
            raise Lost("left", f"node 0, {line.there}, did not answer, or left") from None
        if "refused" in answer:
            raise Lost("number", answer["refused"])
        self.lines[0] = line

    def call(self, host: str, port: int) -> Line:
        """A line to node 0. Raises Lost: why there is none."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Lost("unknown", f"{host}: {error.strerror}") from None
        lost = None
        for family, kind, _, _, address in found:
            connection = socket.socket(family, kind)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
                connection.settimeout(3)
                connection.connect(address)
                return Line(connection)
            except OSError as error:
                connection.close()
                where = f"{host} ({address[0]}), port {port}"
                if own(address[0]):
                    lost = Lost("own", f"{host} means {address[0]}: that is this machine")
                elif isinstance(error, ConnectionRefusedError):
                    lost = Lost("refused", f"{where}: refused")
                else:
                    lost = Lost("silent", f"{where}: {error.strerror or 'no answer'}")
        raise lost

    def drop(self, k: int, text: str) -> None:
        self.lines.pop(k).socket.close()
        self.notes.append([k, text])

    def exchange(self, step: str, value, seconds: float) -> list:
        """Collective: what each node gave, by node; None of one that is not there (any more)."""
        if self.node:
            try:
                self.lines[0].send(value)
                values, self.notes = self.lines[0].receive(seconds + 15)
                return values
            except OSError:
                raise Lost("left", f"node 0 went silent: {step}") from None
        deadline = time.monotonic() + seconds
        values = [json.loads(json.dumps(value))] + [None] * (self.nnodes - 1)  # as others see it
        for k, line in [*self.lines.items()]:
            try:
                values[k] = line.receive(max(deadline - time.monotonic(), 0.01))
            except OSError:
                self.drop(k, f"went silent: {step}")
        for k, line in [*self.lines.items()]:
            try:
                line.send([values, self.notes])
            except OSError:
                self.drop(k, f"went silent: {step}")
        return values

    def clocks(self) -> list:
        """Collective: by node, how many seconds its clock is ahead of node 0's, and give or take
        how many (half of the fastest of eight round trips).
        """
        if self.node:
            with suppress(OSError):
                while self.lines[0].receive(15) == "time?":
                    self.lines[0].send(time.time())
        offsets = None if self.node else self.ask_clocks()
        return self.exchange("clocks", offsets, 5)[0]

    def ask_clocks(self) -> list:
        """Node 0's part of that."""
        offsets = [[0.0, 0.0]] + [None] * (self.nnodes - 1)
        for k, line in [*self.lines.items()]:
            try:
                trips = []
                for _ in range(8):
                    sent, begun = time.time(), time.monotonic()
                    line.send("time?")
                    there = line.receive(2)
                    half = (time.monotonic() - begun) / 2
                    trips.append((half, there - sent - half))
                half, offset = min(trips)
                offsets[k] = [offset, half]
                line.send("done")
            except OSError:
                self.drop(k, "went silent: clocks")
        return offsets


def own(address: str) -> bool:
    """Whether an address is this machine's: one can listen only on one's own."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
