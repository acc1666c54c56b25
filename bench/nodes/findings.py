"""What the facts and probes mean: a finding says what is wrong, why it matters, and the cure."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from statistics import median

from .allreduce import by_sender
from .facts import interface_of

SHM = 2**29  # bytes: a loader's workers hand over batches there; Docker gives 64 MB
FILES = 1024  # open files, the usual limit: each batch that a worker hands over may take one
SKEW = 1.0  # seconds
C10D = 10.0  # seconds: at 15 to 20, c10d's rendezvous thinks that a node is dead
SLOW = 1 / 3  # of the others' speed

ERROR, WARNING = "error", "warning"
CORES = "srun --cpus-per-task, docker --cpus, taskset: give it all of them"
NUMBERS = "give all the same --nnodes, and each its own --node, from 0 to N - 1"
KINDS = {  # of findings: how bad, why it matters, what cures it
    # one node by itself: the others can't be reached
    "unknown": (
        ERROR,
        "no node can find the first one",
        "give --host (MASTER_ADDR) an IP address, or add the name to /etc/hosts",
    ),
    "silent": (
        ERROR,
        "a firewall drops the packets, the address is wrong, or the network is down",
        "ping HOST; on HOST: ufw allow {port}/tcp, or another --port",
    ),
    "refused": (
        ERROR,
        "the machine is there, but no node 0 on this port: not started, or another --port or HOST",
        "start node 0 at about the same time as the others, with the same --port {port}",
    ),
    "own": (
        ERROR,
        "this machine would wait for itself",
        "give --host (MASTER_ADDR) the first machine's address, the same on all",
    ),
    "busy": (
        ERROR,
        "torchrun could not listen there either",
        "ss -ltnp shows whose it is; choose another --port above 1023 (--master-port), the same on"
        " all",
    ),
    "nobody": (
        ERROR,
        "the others are not started, call another address or port, or a firewall keeps them away",
        "read what the others print; here: ufw allow {port}/tcp",
    ),
    "left": (
        ERROR,
        "a node ended or took much too long, or the network broke",
        "read what the other nodes printed",
    ),
    # who is here
    "number": (ERROR, "nodes that count differently never meet", NUMBERS),
    "missing": (
        ERROR,
        "the training would wait for it, until a timeout",
        "read what that node printed; start it, or leave it out of --nnodes",
    ),
    "same-name": (
        WARNING,
        "tools tell nodes apart by their names: logs, Slurm, TensorBoard",
        "hostnamectl set-hostname NAME on one of them",
    ),
    # what must be equal
    "torch": (ERROR, "ranks of different versions may hang or differ", "install the same"),
    "nccl_version": (ERROR, "NCCL may not connect to another version", "install the same torch"),
    "python": (WARNING, "one node may not read another's pickles", "install the same Python"),
    "gpus": (WARNING, "the slowest GPU sets the pace; a rank without one fails", "use equal nodes"),
    "cores": (WARNING, "the node with the fewest loads data slowest, and all wait for it", CORES),
    "command": (ERROR, "another flag on one node gives wrong losses or a hang", "use one command"),
    "code": (
        ERROR,
        "other code on one node gives wrong losses or a hang, mostly without an error",
        "check out the same commit on all nodes, or rsync the folder",
    ),
    "variable": (
        WARNING,
        "it changes how ranks compute or talk: they may differ, hang or be slow",
        "export {key} alike on all nodes",
    ),
    # addresses, and the network
    "address": (
        ERROR,
        "the others cannot reach that: one fails with connectFullMesh, the others wait",
        "export GLOO_SOCKET_IFNAME={interface} before torchrun; with --rdzv-backend c10d also "
        "torchrun --local-addr {address}",
    ),
    "nccl": (
        ERROR,
        "NCCL hangs or fails if the others cannot reach that interface",
        "export NCCL_SOCKET_IFNAME={interface} before torchrun",
    ),
    "nat": (
        ERROR,
        "behind address translation (a container?), nobody can reach its ranks",
        "docker run --network host",
    ),
    "ports": (
        ERROR,
        "Gloo and NCCL take ports that the system chooses: ranks would wait for minutes",
        "on {name}, let the other nodes reach all TCP ports; for instance: ufw allow from {source}",
    ),
    "mtu": (
        ERROR,
        "ranks connect, and then wait in DDP's constructor, each in another line",
        "on all nodes: ip link set dev {interface} mtu 1500, or let the switch pass larger packets;"
        " test it by ping -M do -s 8972 HOST",
    ),
    "loss": (
        ERROR,
        "ranks connect, and then wait in DDP's constructor, each in another line",
        "ask who runs the network: packets get lost whatever their size",
    ),
    "clock": (
        ERROR,
        "torchrun --rdzv-backend c10d thinks that a node is dead, and trains without it",
        "timedatectl set-ntp true (or chronyc makestep); until then, torchrun without c10d",
    ),
    "drift": (
        WARNING,
        "the times in logs cannot be compared, and the clock may drift on",
        "timedatectl set-ntp true (or chronyc makestep)",
    ),
    # a node by itself
    "shm": (
        WARNING,
        "DataLoader workers, and the ranks of a node, hand over data there: Bus error",
        "docker run --shm-size 8g, or mount -o remount,size=8g /dev/shm",
    ),
    "files": (
        WARNING,
        "sockets and DataLoader workers need many: Too many open files",
        "ulimit -n 65536 before the start",
    ),
    "memlock": (
        WARNING,
        "InfiniBand locks the memory that it sends from: NCCL fails",
        "ulimit -l unlimited before the start",
    ),
    "one-core": (WARNING, "a process and its DataLoader workers share it: slow", CORES),
    # the shared folder
    "not-shared": (
        ERROR,
        "checkpoints and data of one node are not there on the others",
        "mount the same file system there (findmnt -T FOLDER shows which it is)",
    ),
    "flock": (
        ERROR,
        "downloads and checkpoints that a lock protects would be written by two at once",
        "mount it with locks that all nodes see: Lustre -o flock, NFS without nolock",
    ),
    # the all-reduce
    "all-reduce": (
        ERROR,
        "the training would fail, too",
        "NCCL_DEBUG=INFO, or TORCH_CPP_LOG_LEVEL=INFO with Gloo, shows more",
    ),
    "wrong": (
        ERROR,
        "the gradients would be wrong, too: broken memory, network card or driver",
        "take this node out of the job",
    ),
    "slow": (
        WARNING,
        "every all-reduce is as slow as the slowest link",
        "on it, ethtool {interface} shows speed and errors; try another cable or port",
    ),
}
EQUAL = ("torch", "nccl_version", "python", "gpus", "cores", "command")
SEVERAL = {"variable", "number"}  # kinds of which a node may have more than one


@dataclass
class Finding:
    """kind: of KINDS. node: None means all of them, or none in particular."""

    kind: str
    node: int | None
    what: str
    level: str
    why: str
    cure: str

    def record(self) -> dict:
        return asdict(self)


def finding(kind: str, node: int | None, what: str, **fields) -> Finding:
    """fields: what the text of the cure names."""
    level, why, cure = KINDS[kind]
    return Finding(kind, node, what, level, why, cure.format(**fields))


@dataclass
class Seen:
    """All that is known. A list has one entry a node; None of one that is not there (any more)."""

    facts: list  # facts.gather()
    addresses: list  # by which the others reach the node
    notes: list  # of the meeting
    probes: list  # reach.reach_all(); `gloo` means: of another address, which Gloo would tell
    clocks: list  # seconds ahead of node 0, and give or take how many
    shared: list | None  # what went wrong with the shared folder
    changed: dict  # files of code that differ from node 0's, by node
    results: list | None = None  # allreduce.run()

    def name(self, node: int) -> str:
        return self.facts[node]["name"] if self.facts[node] else f"node {node}"

    def here(self) -> list[int]:
        return [node for node, facts in enumerate(self.facts) if facts]

    def interface(self, node: int) -> str:
        """The interface that the others reach; a placeholder if none has that address."""
        found = interface_of(self.facts[node], self.addresses[node])
        return found["name"] if found else "INTERFACE"

    def pairs(self, gloo: bool = False) -> Iterator[tuple[int, dict]]:
        """All probes, each with the node that made it."""
        for node in self.here():
            for each in self.probes[node] or []:
                if each["gloo"] == gloo:
                    yield node, each


def who(seen: Seen) -> Iterator[Finding]:
    for node, text in seen.notes:
        if node is None:
            yield finding("number", None, text)
        else:
            yield finding("missing", node, f"{seen.name(node)} {text}")
    named: dict[str, int] = {}
    for node in seen.here():
        name = seen.name(node)
        if name in named:
            what = f"node {named[name]} and node {node} are both called {name}"
            yield finding("same-name", node, what)
        named.setdefault(name, node)


def unusual(seen: Seen, values: dict[int, str], kind: str, what: str, **fields):
    """A finding for each node whose value is not what most have; of two nodes, what node 0 has."""
    usual = max(values.values(), key=[*values.values()].count)
    for node, value in values.items():
        if value != usual:
            text = f"{seen.name(node)}: {what} is {value or 'none'}, elsewhere {usual or 'none'}"
            yield finding(kind, node, text, **fields)


def differing(seen: Seen) -> Iterator[Finding]:
    nodes = seen.here()
    for fact in EQUAL:
        values = {node: str(seen.facts[node][fact]) for node in nodes}
        yield from unusual(seen, values, fact, fact)
    for node, files in seen.changed.items():
        few = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if files[3:] else "")
        yield finding("code", node, f"{seen.name(node)}: not the code of {seen.name(0)}: {few}")
    variables = {node: seen.facts[node]["variables"] for node in nodes}
    for key in sorted({key for each in variables.values() for key in each}):
        values = {node: each.get(key, "not set") for node, each in variables.items()}
        yield from unusual(seen, values, "variable", key, key=key)


def addresses(seen: Seen) -> Iterator[Finding]:
    """Whether Gloo and NCCL would tell the others an address that these can reach."""
    for node in seen.here():
        facts, address, name = seen.facts[node], seen.addresses[node], seen.name(node)
        if ip_address(address).is_loopback:  # all nodes are on one machine
            continue
        use, told = seen.interface(node), facts["gloo"]
        asked = [
            p["who"] for _, p in seen.pairs(gloo=True) if (p["node"], p["address"]) == (node, told)
        ]
        if told != address and (not asked or set(asked) != {node}):
            what = (
                f"its own name means {', '.join(facts['own_name']) or 'nothing'}; Gloo takes {told}"
            )
            if facts["gloo_ifname"]:
                has = f"which has {told}" if told else "and there is no such interface"
                what = f"GLOO_SOCKET_IFNAME={facts['gloo_ifname']}, {has}"
            yield finding("address", node, f"{name}: {what}", interface=use, address=address)
        if facts["gpus"] and facts["nccl"] != use and not facts["infiniband"]:
            what = f"{name}: NCCL would begin by {facts['nccl']}, the others reach it by {use}"
            yield finding("nccl", node, what, interface=use)
        if not facts["has_address"]:
            what = f"{name}: the others see it as {address}, which is none of its addresses"
            yield finding("nat", node, what)


def ports(seen: Seen) -> Iterator[Finding]:
    for node in seen.here():
        closed = {
            k: p["port"]
            for k, p in seen.pairs()
            if p["node"] == node and (p["failed"] in ("connect", "small") or p["who"] != node)
        }
        if closed:
            froms = ", ".join(f"{seen.name(k)} ({seen.addresses[k]})" for k in closed)
            first = next(iter(closed))
            what = f"{seen.name(node)}: port {closed[first]} cannot be reached from {froms}"
            yield finding("ports", node, what, name=seen.name(node), source=seen.addresses[first])


def large_messages(seen: Seen) -> Iterator[Finding]:
    """One finding for all pairs of nodes between which they get lost."""
    lossy = [(k, p) for k, p in seen.pairs() if p["failed"] in ("large", "back")]
    if not lossy:
        return
    pairs = sorted({tuple(sorted((k, p["node"]))) for k, p in lossy})
    between = ", ".join(f"{seen.name(a)} and {seen.name(b)}" for a, b in pairs[:3])
    ends = {k: interface_of(seen.facts[k], seen.addresses[k]) for pair in pairs for k in pair}
    mtus = ", ".join(f"{seen.name(k)} {each['mtu']}" for k, each in ends.items() if each)
    small = all(p["in_small_packets"] for _, p in lossy)
    what = f"between {between}: small messages pass, large ones get lost"
    what += f", but not in small packets (MTU: {mtus})" if small else f" (MTU: {mtus})"
    kind, interface = "mtu" if small else "loss", seen.interface(pairs[0][0])
    yield finding(kind, None, what, interface=interface)


def clocks(seen: Seen) -> Iterator[Finding]:
    """Offsets from the median clock, which names the one that is off; of two, from node 0's."""
    offsets = {k: each[0] for k, each in enumerate(seen.clocks or []) if each}
    middle = median(offsets.values()) if len(offsets) > 2 else 0.0
    other = "the others'" if len(offsets) > 2 else f"{seen.name(0)}'s"
    for node, offset in offsets.items():
        apart = abs(offset - middle)
        if apart - seen.clocks[node][1] > SKEW:
            direction = "ahead of" if offset > middle else "behind"
            what = f"{seen.name(node)}: its clock is {apart:.1f} s {direction} {other}"
            yield finding("clock" if apart > C10D else "drift", node, what)


def host(seen: Seen) -> Iterator[Finding]:
    """What is wrong on a node by itself."""
    for node in seen.here():
        facts, name = seen.facts[node], seen.name(node)
        if (facts["shm_free"] or 0) < SHM:
            what = f"{name}: {(facts['shm_free'] or 0) / 1e6:.0f} MB free in /dev/shm"
            yield finding("shm", node, what)
        if 0 <= facts["open_files"] < FILES:
            yield finding("files", node, f"{name}: {facts['open_files']} open files are allowed")
        if facts["infiniband"] and 0 <= facts["memlock"] < 2**32:
            what = f"{name}: {facts['memlock'] / 1e6:.0f} MB of memory may be locked"
            yield finding("memlock", node, what)
        alike = len({seen.facts[k]["cores"] for k in seen.here()}) == 1  # else it is said already
        if alike and facts["cores"] < 2 <= facts["all_cores"]:
            what = f"{name}: {facts['cores']:g} of its {facts['all_cores']} cores may be used"
            yield finding("one-core", node, what)


def shared(seen: Seen) -> Iterator[Finding]:
    for node, problem in enumerate(seen.shared or []):
        if problem == ("held" if node else None) or not seen.facts[node]:
            continue
        if problem == "not there":
            what = f"{seen.name(node)} does not see the file that node 0 wrote to the shared folder"
            yield finding("not-shared", node, what)
        elif problem or not seen.shared[0]:  # where node 0 has no lock, all others get it
            problem = problem or "a lock that node 0 held was free"
            yield finding("flock", node, f"{seen.name(node)}: the shared folder: {problem}")


def speed(seen: Seen) -> Iterator[Finding]:
    """The all-reduce: failed, wrong, or one node much slower than the others."""
    results = {node: each for node, each in enumerate(seen.results or []) if each}
    failed = {node: each["error"] for node, each in results.items() if "error" in each}
    for node, error in failed.items():
        yield finding("all-reduce", node, f"{seen.name(node)}: the all-reduce failed: {error}")
    if failed:
        return
    for node, each in results.items():
        for size in [row["bytes"] for row in each["sizes"] if not row["right"]][:1]:
            yield finding("wrong", node, f"{seen.name(node)}: the sum of {size} bytes is wrong")
    speeds = by_sender([*results.values()])
    for node, (_, best) in speeds.items():
        others = [middle for k, (middle, _) in speeds.items() if k != node]
        if others and best < SLOW * (usual := median(others)):  # slow in every turn
            what = f"{seen.name(node)} sends {best / 1e6:.1f} MB/s, the others {usual / 1e6:.1f}"
            yield finding("slow", node, what, interface=seen.interface(node))


def judge(seen: Seen) -> list[Finding]:
    """All findings, the errors first; of a kind, one a node."""
    found: dict[tuple, Finding] = {}
    for part in (who, differing, addresses, ports, large_messages, clocks, host, shared, speed):
        for each in part(seen):
            key = each.kind, each.node
            found.setdefault((*key, each.what) if each.kind in SEVERAL else key, each)
    return sorted(found.values(), key=lambda each: each.level != ERROR)
