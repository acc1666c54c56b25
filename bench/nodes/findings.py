"""What the facts and probes mean: a finding says what is wrong, why it matters, and the cure."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median

from .allreduce import by_sender
from .facts import interface_of

ERROR, WARNING = "error", "warning"
SHM = 2**29  # bytes: a loader's workers hand over batches there; Docker gives 64 MB
FILES = 1024  # open files, the usual limit: each batch that a worker hands over may take one
SKEW = 1.0  # seconds
C10D = 10.0  # seconds: c10d's rendezvous thinks at 15 to 20 s that a node is dead
SEVERAL = {"variable", "number"}  # kinds of which a node may have more than one
SLOW = 1 / 3  # of the median speed


@dataclass
class Finding:
    """kind: a word for programs. node: None means all of them, or none in particular."""

    kind: str
    level: str
    node: int | None
    what: str
    why: str
    cure: str

    def record(self) -> dict:
        return asdict(self)


@dataclass
class Seen:
    """All that is known. A list has one entry a node; None of one that is not there (any more)."""

    facts: list  # facts.gather()
    addresses: list  # by which the others reach the node; facts has_address: if it is its own
    notes: list  # of the meeting
    probes: list  # probe.reach_all(), each with `gloo`: of the address that Gloo would tell
    clocks: list  # seconds ahead of node 0, and give or take how many
    shared: list | None  # what went wrong with the shared folder
    changed: dict  # files of code that differ from node 0's, by node
    results: list | None = None  # allreduce.run()

    def name(self, node: int) -> str:
        return self.facts[node]["name"] if self.facts[node] else f"node {node}"

    def here(self) -> list[int]:
        return [node for node, facts in enumerate(self.facts) if facts]

    def interface(self, node: int) -> str:
        """The interface that the others reach; a placeholder if its address is of none."""
        found = interface_of(self.facts[node], self.addresses[node])
        return found["name"] if found else "INTERFACE"


def missing(seen: Seen) -> Iterator[Finding]:
    for node, text in seen.notes:
        who = (
            "" if node is None else f"{seen.name(node)}: " if seen.facts[node] else f"node {node} "
        )
        if node is None:
            yield Finding(
                "number",
                ERROR,
                None,
                text,
                "nodes of one number, or that wait for different numbers of nodes, never meet",
                "give all the same --nnodes, and each its own --node, from 0 to N - 1",
            )
        else:
            yield Finding(
                "missing",
                ERROR,
                node,
                who + text,
                "the training would wait for it, until a timeout",
                "read what that node printed; start it, or leave it out of --nnodes",
            )


# What must be equal on all nodes: the fact, its level, why, and the cure.
EQUAL = {
    "torch": (ERROR, "ranks of different versions may hang or compute differently", "install one"),
    "nccl_version": (
        ERROR,
        "NCCL of different versions refuses to connect, or hangs",
        "install one",
    ),
    "cuda": (WARNING, "torch was built for different CUDA versions", "install the same build"),
    "python": (WARNING, "checkpoints and pickles may not be readable on all nodes", "install one"),
    "gpus": (WARNING, "the slowest GPU sets the pace; a rank without one fails", "use equal nodes"),
    "cores": (WARNING, "the node with fewer cores loads slower, and all wait for it", None),
    "command": (ERROR, "another flag on one node gives wrong losses or a hang", "use one command"),
}


def differing(seen: Seen) -> Iterator[Finding]:
    """Facts that are not what most nodes have: of two nodes, not what node 0 has."""
    nodes = seen.here()
    for fact, (level, why, cure) in EQUAL.items():
        values = [str(seen.facts[node][fact]) for node in nodes]
        usual = max(values, key=values.count)
        for node, value in zip(nodes, values, strict=True):
            if value != usual:
                cure_here = cure or "srun --cpus-per-task, docker --cpus, taskset: give it all"
                what = (
                    f"{seen.name(node)}: {fact} is {value or 'none'}, elsewhere {usual or 'none'}"
                )
                yield Finding(fact, level, node, what, why, cure_here)
    for node, files in seen.changed.items():
        few = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if files[3:] else "")
        yield Finding(
            "code",
            ERROR,
            node,
            f"{seen.name(node)}: other code than on {seen.name(0)}: {few}",
            "other code on one node gives wrong losses or a hang, and mostly no error",
            "check out the same commit on all nodes (or rsync the folder)",
        )
    everything = [seen.facts[node]["variables"] for node in nodes]
    for key in sorted({key for each in everything for key in each}):
        values = [each.get(key, "not set") for each in everything]
        usual = max(values, key=values.count)
        for node, value in zip(nodes, values, strict=True):
            if value != usual:
                what = f"{seen.name(node)}: {key} is {value}, elsewhere {usual}"
                why = "it changes how ranks compute or talk, so they may differ, hang or be slow"
                yield Finding("variable", WARNING, node, what, why, f"export {key} alike on all")


def names(seen: Seen) -> Iterator[Finding]:
    """Whether Gloo and NCCL would tell the others an address that these can reach."""
    for node in seen.here():
        facts, address, name = seen.facts[node], seen.addresses[node], seen.name(node)
        if address.startswith("127."):  # all nodes are on one machine
            continue
        use = seen.interface(node)
        told = facts["gloo"]
        others = [p for other in seen.here() for p in (seen.probes[other] or []) if p["gloo"]]
        asked = [p for p in others if p["node"] == node and p["address"] == told]
        fine = told == address or (asked and all(p["who"] == node for p in asked))
        if not fine:
            if facts["gloo_ifname"]:
                what = f"GLOO_SOCKET_IFNAME={facts['gloo_ifname']}, "
                what += f"which has {told}" if told else "and there is no such interface"
            elif not facts["own_name"]:
                what = "its own name has no address, so Gloo takes 127.0.0.1"
            elif all(":" in each for each in facts["own_name"]):
                what = f"its own name has only IPv6 addresses; Gloo takes {told}"
            else:
                what = f"its own name means {', '.join(facts['own_name'])}; Gloo takes {told}"
            cure = f"export GLOO_SOCKET_IFNAME={use} before torchrun"
            if told and told.startswith("127."):
                cure += f"; with --rdzv-backend c10d also torchrun --local-addr {address}"
            why = "the others cannot reach that: one fails with connectFullMesh, the others wait"
            yield Finding("address", ERROR, node, f"{name}: {what}", why, cure)
        if facts["gpus"] and facts["nccl"] != use and not facts["infiniband"]:
            what = f"{name}: NCCL would begin by {facts['nccl']}, the others reach it by {use}"
            why = "NCCL hangs or fails if the others cannot reach that interface"
            yield Finding("nccl", ERROR, node, what, why, f"export NCCL_SOCKET_IFNAME={use}")
        if not facts["has_address"]:
            what = f"{name}: the others see it as {address}, which is none of its addresses"
            why = "behind address translation (a container?), nobody can reach its ranks"
            yield Finding("nat", ERROR, node, what, why, "docker run --network host")


def ports(seen: Seen) -> Iterator[Finding]:
    """Ports that are closed."""
    for node in seen.here():
        probes = {
            other: p
            for other in seen.here()
            for p in (seen.probes[other] or [])
            if p["node"] == node and not p["gloo"]
        }
        closed = [
            k for k, p in probes.items() if p["failed"] in ("connect", "small") or p["who"] != node
        ]
        if closed:
            froms = ", ".join(f"{seen.name(k)} ({seen.addresses[k]})" for k in closed)
            ports = ", ".join(str(probes[k]["port"]) for k in closed[:1])
            yield Finding(
                "ports",
                ERROR,
                node,
                f"{seen.name(node)}: port {ports} cannot be reached from {froms}",
                "Gloo and NCCL take ports that the system chooses: ranks would wait for minutes",
                f"on {seen.name(node)}, let the other nodes reach all TCP ports; for instance: "
                f"ufw allow from {seen.addresses[closed[0]]}",
            )


def large_messages(seen: Seen) -> Iterator[Finding]:
    """One finding for all pairs of nodes between which they get lost."""
    lossy = [
        (k, p["node"], p["in_small_packets"])
        for k in seen.here()
        for p in (seen.probes[k] or [])
        if p["failed"] in ("large", "back") and not p["gloo"]
    ]
    if not lossy:
        return
    pairs = sorted({tuple(sorted((k, other))) for k, other, _ in lossy})
    who = ", ".join(f"{seen.name(a)} and {seen.name(b)}" for a, b in pairs[:3])
    ends = {k: interface_of(seen.facts[k], seen.addresses[k]) for pair in pairs for k in pair}
    mtus = ", ".join(f"{seen.name(k)} {each['mtu']}" for k, each in ends.items() if each)
    small = all(passed for *_, passed in lossy)
    what = f"between {who}: small messages pass, large ones get lost"
    what += f", but not in small packets (MTU: {mtus})" if small else f" (MTU: {mtus})"
    cure = (
        f"on all nodes: ip link set dev {seen.interface(pairs[0][0])} mtu 1500, or let the switch "
    )
    cure += "pass larger packets; test it by ping -M do -s 8972 HOST"
    why = "ranks connect, and then wait in DDP's constructor, each in another line"
    other = "ask who runs the network: packets get lost whatever their size"
    yield Finding("mtu" if small else "loss", ERROR, None, what, why, cure if small else other)


def clocks(seen: Seen) -> Iterator[Finding]:
    """Offsets from the median clock, so that one node that is off is the one named."""
    offsets = {k: each[0] for k, each in enumerate(seen.clocks or []) if each}
    if not offsets:
        return
    middle = 0.0 if len(offsets) == 2 else median(offsets.values())
    for node, offset in offsets.items():
        apart = offset - middle
        give = seen.clocks[node][1]
        if abs(apart) - give <= SKEW:
            continue
        direction = "ahead of" if apart > 0 else "behind"
        other = seen.name(0) if len(offsets) == 2 else "the others"
        c10d = abs(apart) > C10D
        why = "torchrun --rdzv-backend c10d thinks that a node is dead, and trains without it"
        yield Finding(
            "clock",
            ERROR if c10d else WARNING,
            node,
            f"{seen.name(node)}: its clock is {abs(apart):.1f} s {direction} {other}'s",
            why if c10d else "the times of logs cannot be compared, and it may drift on",
            "timedatectl set-ntp true (or chronyc makestep), or torchrun without c10d",
        )


def host(seen: Seen) -> Iterator[Finding]:
    """What is wrong on a node by itself."""
    named: dict[str, int] = {}
    for node in seen.here():
        facts, name = seen.facts[node], seen.name(node)
        if name in named:
            what = f"node {named[name]} and node {node} are both called {name}"
            why = "tools tell nodes apart by their names: NCCL's logs, Slurm, TensorBoard"
            yield Finding("same-name", WARNING, node, what, why, "hostnamectl set-hostname NAME")
        named.setdefault(name, node)
        if facts["shm_free"] is None or facts["shm_free"] < SHM:
            free = (
                "no"
                if facts["shm_free"] is None
                else f"only {facts['shm_free'] / 1e6:.0f} MB free in"
            )
            yield Finding(
                "shm",
                WARNING,
                node,
                f"{name}: {free} /dev/shm",
                "workers of a DataLoader, and ranks of one node, hand over data there: Bus error",
                "docker run --shm-size 8g, or mount -o remount,size=8g /dev/shm",
            )
        if 0 <= facts["open_files"] < FILES:
            what = f"{name}: only {facts['open_files']} open files are allowed"
            why = "sockets and DataLoader workers need many: Too many open files"
            yield Finding("files", WARNING, node, what, why, "ulimit -n 65536 before the start")
        if facts["infiniband"] and facts["memlock"] not in (-1,) and facts["memlock"] < 2**32:
            what = f"{name}: only {facts['memlock'] / 1e6:.0f} MB of memory may be locked"
            why = "InfiniBand locks the memory that it sends from: NCCL fails"
            yield Finding("memlock", WARNING, node, what, why, "ulimit -l unlimited")
        if facts["cores"] < 2 <= facts["all_cores"]:
            what = f"{name}: {facts['cores']:g} of its {facts['all_cores']} cores may be used"
            why = "a process and its DataLoader workers share that one: slow"
            cure = "srun --cpus-per-task, docker --cpus, taskset: give it more"
            yield Finding("cores", WARNING, node, what, why, cure)


def shared(seen: Seen) -> Iterator[Finding]:
    for node, problem in enumerate(seen.shared or []):
        if problem == ("held" if node else None) or not seen.facts[node]:
            continue
        if problem == "not there":
            what = "does not see the file that node 0 wrote to the shared folder"
            why = "checkpoints and data of one node are not there on the others"
            cure = "mount the same file system there (findmnt -T FOLDER shows which it is)"
            kind = "not-shared"
        else:
            what = problem or "it got a lock that node 0 held"
            what = f"the shared folder: {what}"
            why = "downloads and checkpoints that a lock protects would be written by two at once"
            cure = "mount it with locks that all nodes see: Lustre -o flock, NFS without nolock"
            kind = "flock"
        yield Finding(kind, ERROR, node, f"{seen.name(node)}: {what}", why, cure)


def speed(seen: Seen) -> Iterator[Finding]:
    """The all-reduce: failed, wrong, or one node much slower than the others."""
    results = [each for each in seen.results or [] if each]
    failed = [
        (k, each["error"]) for k, each in enumerate(seen.results or []) if each and "error" in each
    ]
    for node, error in failed:
        cure = (
            "NCCL_DEBUG=INFO shows more" if seen.facts[node]["gpus"] else "read docs/howto/hangs.md"
        )
        what = f"{seen.name(node)}: the all-reduce failed: {error}"
        yield Finding("all-reduce", ERROR, node, what, "the training would, too", cure)
    if failed or not results:
        return
    for node, each in enumerate(seen.results):
        if not each:
            continue
        wrong = [row["bytes"] for row in each["sizes"] if not row["right"]]
        if wrong:
            what = f"{seen.name(node)}: the sum of {wrong[0]} bytes is wrong"
            why = "so would the gradients be: broken memory, network card or driver"
            yield Finding("wrong", ERROR, node, what, why, "take this node out of the job")
    speeds = by_sender(results)
    for node, value in speeds.items():
        others = [each for k, each in speeds.items() if k != node]
        if value < SLOW * median(others):
            what = f"{seen.name(node)} sends {value / 1e6:.1f} MB/s, "
            what += f"the others {median(others) / 1e6:.1f} MB/s"
            why = "every all-reduce goes as fast as the slowest link"
            cure = f"ethtool {seen.interface(node)} on it (speed, errors); another cable or port"
            yield Finding("slow", WARNING, node, what, why, cure)


def judge(seen: Seen) -> list[Finding]:
    """All findings, the errors first; of a kind, one a node."""
    parts = (missing, differing, names, ports, large_messages, clocks, host, shared, speed)
    found: dict[tuple, Finding] = {}
    for part in parts:
        for finding in part(seen):
            key = finding.kind, finding.node
            found.setdefault((*key, finding.what) if finding.kind in SEVERAL else key, finding)
    return sorted(found.values(), key=lambda finding: finding.level != ERROR)
