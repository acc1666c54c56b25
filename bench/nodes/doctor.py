"""python -m bench doctor: before a training on several machines, what would make it fail.

Start it on every machine at about the same time, as you would start torchrun:

    python -m bench doctor --host HOST --nnodes 2 --node 0 [-- SCRIPT FLAGS]    on the first
    python -m bench doctor --host HOST --nnodes 2 --node 1 [-- SCRIPT FLAGS]    on the second
    python -m bench doctor --nodes hosta,hostb [-- SCRIPT FLAGS]                on each of them
    srun --ntasks-per-node=1 python -m bench doctor [-- SCRIPT FLAGS]           in a Slurm job
    torchrun --nnodes 2 --node-rank 0 --master-addr HOST -m bench doctor        and 1 on the second

It ends within a minute, whatever is wrong. It compares versions, code and flags, tries all ports in
both directions, large messages, clocks, locks in a shared folder, and at last a real all-reduce. A
finding says what is wrong, why that matters, and what cures it. Exit code: 0 nothing found,
1 warnings, 2 errors. Without any of these, `python -m bench doctor` shows what one machine has.
"""

import argparse
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from statistics import median

# c10d warns of names without need; it reads this when torch is imported
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from . import allreduce, facts, findings, reach
from .findings import ERROR, Finding, Seen, finding
from .meeting import Lost, Meeting, own
from .options import make_parser

LIMIT = 55  # seconds: all of it
BLOCKERS = {"missing", "number", "ports", "mtu", "loss", "nat"}  # an all-reduce would hang


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags; what they leave out is Slurm's, or found by this machine's name."""
    parser = make_parser("doctor", __doc__)
    add = parser.add_argument
    add("--host", help="name or address of the first machine, as for --master-addr")
    add("--port", type=int, help="where it listens, as --master-port [29500; in Slurm by the job]")
    add("--nnodes", type=int, help="number of machines")
    add("--node", type=int, help="number of this one, from 0, as --node-rank")
    add("--nodes", help="all machines' names or addresses, instead: A,B,C")
    add("--code", type=Path, default=Path(), help="folder of the code to compare [this one]")
    add("--shared", type=Path, help="a folder that all machines should share")
    add("--wait", type=float, default=20, help="seconds to wait for the others [20]")
    add("--json", type=Path, help="write all that was found to this file")
    add("command", nargs="*", metavar="SCRIPT FLAGS", help="after --: what must be equal on all")
    args = parser.parse_args(argv)
    if args.nodes:
        names = args.nodes.split(",")
        args.host, args.nnodes = names[0], len(names)
        if args.node is None:
            mine = [k for k, name in enumerate(names) if is_this(name)]
            if len(mine) != 1:
                parser.error(f"--nodes: none of {args.nodes} is this machine: give --node, too")
            args.node = mine[0]
    elif under_torchrun():
        args.nnodes = args.nnodes or int(os.environ["GROUP_WORLD_SIZE"])
        args.node = int(os.environ["GROUP_RANK"]) if args.node is None else args.node
        args.host = args.host or os.environ["MASTER_ADDR"]
        args.port = args.port or int(os.environ["MASTER_PORT"]) + 1  # that one is torchrun's
    elif slurm():
        if os.environ.get("SLURM_LOCALID", "0") != "0":
            parser.error("one task a node is enough: srun --ntasks-per-node=1")
        args.nnodes = args.nnodes or int(os.environ["SLURM_STEP_NUM_NODES"])
        args.node = int(os.environ["SLURM_NODEID"]) if args.node is None else args.node
        host, port = facts.slurms_choice()
        args.host, args.port = args.host or host, args.port or port
    if not args.host or args.nnodes is None or args.node is None:
        parser.error("give --host, --nnodes and --node, or --nodes A,B, or start it with srun")
    if args.nnodes < 2 or not 0 <= args.node < args.nnodes:
        parser.error("--nnodes must be 2 or more, and --node from 0 to --nnodes - 1")
    if not 0 < args.wait <= 30:
        parser.error("--wait must be at most 30 s")
    args.port = args.port or 29500
    return args


def under_torchrun() -> bool:
    return "GROUP_WORLD_SIZE" in os.environ


def slurm() -> bool:
    return "SLURM_STEP_NODELIST" in os.environ


def several(argv: list[str]) -> bool:
    """Whether several machines are meant: by flags, by torchrun or by srun."""
    nodes = "GROUP_WORLD_SIZE" if under_torchrun() else "SLURM_STEP_NUM_NODES"
    return bool(argv) or int(os.environ.get(nodes, 1)) > 1


def is_this(name: str) -> bool:
    if name.split(".")[0] == socket.gethostname().split(".")[0]:
        return True
    with suppress(OSError):
        return own(socket.getaddrinfo(name, None)[0][4][0])
    return False


def look(meeting: Meeting, own_facts: dict, files: dict, shared: Path | None) -> Seen:
    """Collective: all that can be seen without a process group."""
    server = reach.Server(meeting.node)
    seats = {k: line.there for k, line in meeting.lines.items()}
    everyone = meeting.exchange("facts", own_facts | {"port": server.port, "seats": seats}, 10)
    addresses = [everyone[0]["seats"].get(str(k)) for k in range(meeting.nnodes)]
    line = next(iter(meeting.lines.values()), None)
    reached = meeting.exchange("addresses", line and line.there, 5)
    addresses[0] = next(filter(None, reached[1:]), None)
    if not addresses[0]:
        raise Lost("left", "no other node answers any more")
    has = meeting.exchange("addresses", own(addresses[meeting.node]), 5)
    for each, mine in zip(everyone, has, strict=True):
        if each:
            each["has_address"] = mine
    changed = {}
    if len({each["code"] for each in everyone if each}) > 1:
        listed = meeting.exchange("code", files, 10)
        first = listed[0] or {}
        for k, theirs in enumerate(listed[1:], 1):
            if theirs is not None and theirs != first:
                names = first.keys() | theirs.keys()
                changed[k] = sorted(n for n in names if first.get(n) != theirs.get(n))
    targets = [
        (k, address, each["port"])
        for k, each in enumerate(everyone)
        if each and k != meeting.node
        for address in {addresses[k], each["gloo"]}
        if address and not ip_address(address).is_loopback
    ]
    found = reach.reach_all(targets)
    for each in found:
        each["gloo"] = each["address"] != addresses[each["node"]]
    probes = meeting.exchange("ports", found, 12)
    clocks = meeting.clocks()
    locks = lock(meeting, shared) if shared else None
    return Seen(everyone, addresses, meeting.notes, probes, clocks, locks, changed)


def lock(meeting: Meeting, folder: Path) -> list:
    """Collective: what went wrong with a lock in the shared folder, by node."""
    token = meeting.exchange("shared folder", f"{os.getpid()}-{time.time_ns()}", 5)[0]
    file = reach.Shared(folder, token)
    first = file.make() if meeting.node == 0 else None
    first = meeting.exchange("shared folder", first, 5)[0]
    mine = first if meeting.node == 0 else file.look()
    problems = meeting.exchange("shared folder", mine, 10)
    file.close(meeting.node)
    return problems


def reduce(meeting: Meeting, seen: Seen, found: list[Finding]) -> tuple[list, dict]:
    """Collective: the all-reduce of each backend, with the cures of what was found by then."""
    address = {each.node for each in found if each.kind == "address"}
    env = {}
    if meeting.node in address:
        env["GLOO_SOCKET_IFNAME"] = seen.interface(meeting.node)
    if meeting.node in {each.node for each in found if each.kind == "nccl"}:
        env["NCCL_SOCKET_IFNAME"] = seen.interface(meeting.node)
    backends = ["gloo", "nccl"] if all(each["gpus"] for each in seen.facts) else ["gloo"]
    by_backend = {}
    for backend in backends:
        with socket.socket() as free:
            free.bind(("", 0))
            port = meeting.exchange("a free port", free.getsockname()[1], 5)[0]
        store = (seen.addresses[0], port)
        result = allreduce.run(backend, meeting.node, meeting.nnodes, store, env, 15)
        by_backend[backend] = meeting.exchange("all-reduce", result, 17)
    return by_backend[backends[-1]], by_backend


def alone(lost: Lost, args: argparse.Namespace, own_facts: dict) -> list[Finding]:
    """What one node can say by itself."""
    facts_of = [own_facts if k == args.node else None for k in range(args.nnodes)]
    nothing = [None] * args.nnodes
    seen = Seen(facts_of, nothing, [], nothing, nothing, None, {})
    times = f"{own_facts['started']} to {time.strftime('%X')}"
    what = f"{own_facts['name']} (node {args.node}) is alone, from {times}: {lost}"
    return [finding(lost.kind, args.node, what, port=args.port), *findings.host(seen)]


def describe(seen: Seen) -> list[str]:
    """A line for each node, and one for each size of the all-reduce."""
    lines = []
    for node, each in enumerate(seen.facts):
        if each:
            gpus = f"{len(each['gpus'])} x {each['gpus'][0]}" if each["gpus"] else "no GPU"
            lines.append(
                f"node {node}  {each['name']}  {seen.addresses[node]} on {seen.interface(node)}  "
                f"torch {each['torch']}, Python {each['python']}  {gpus}  {each['cores']:g} cores"
            )
    return lines


def show(lines: list[str], found: list[Finding], seconds: float) -> None:
    for line in lines:
        print(line)
    for each in found:
        print(f"\n{each.level.upper()}: {each.what}\n  why:  {each.why}\n  cure: {each.cure}")
    errors = sum(each.level == ERROR for each in found)
    count = f"{errors} errors, {len(found) - errors} warnings" if found else "nothing found"
    print(f"\ndoctor: {count}, in {seconds:.0f} s", flush=True)


def check(args: argparse.Namespace, files: dict, own_facts: dict) -> tuple[dict, list[Finding]]:
    """All of it: the report, and the findings. Raises Lost where this node is alone."""
    meeting = Meeting(args.nnodes, args.node, args.host, args.port, args.wait)
    seen = look(meeting, own_facts, files, args.shared)
    found, by_backend, lines = findings.judge(seen), {}, describe(seen)
    if BLOCKERS & {each.kind for each in found}:
        lines.append("all-reduce: not tried, it would wait in vain")
    else:
        seen.results, by_backend = reduce(meeting, seen, found)
        seen.notes = meeting.notes
        found = findings.judge(seen)
        for backend, results in by_backend.items():
            rows = results[0].get("sizes", []) if results[0] else []
            times = [(row["bytes"] // 1024, 1e3 * median(row["seconds"])) for row in rows]
            texts = [f"{size} KB {milliseconds:.3g} ms" for size, milliseconds in times]
            lines.append(f"all-reduce by {backend}: {', '.join(texts) or 'failed'}")
    report = {"nodes": seen.facts, "addresses": seen.addresses, "clocks": seen.clocks}
    return report | {"probes": seen.probes, "all_reduce": by_backend, "lines": lines}, found


def late(*_) -> None:
    raise Lost("left", f"not done after {LIMIT} s")


def main(argv: list[str]) -> int:
    begun = time.monotonic()
    if under_torchrun() and os.environ["LOCAL_RANK"] != "0":
        return 0  # one process a node is enough
    args = parse(argv)
    files = facts.digests(args.code)
    own_facts = facts.gather(files, args.command)
    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    try:
        report, found = check(args, files, own_facts)
    except Lost as lost:
        report, found = {"nodes": [own_facts], "lines": []}, alone(lost, args, own_facts)
        own_facts["slurm"] = False  # then each node speaks for itself
    signal.alarm(0)
    seconds = time.monotonic() - begun
    if args.node == 0 or not own_facts["slurm"]:
        show(report["lines"], found, seconds)
    if args.json:
        report |= {"findings": [each.record() for each in found], "seconds": seconds}
        part = args.json.with_name(f"{args.json.name}.part{args.node}")
        part.write_text(json.dumps(report, indent=1) + "\n")
        os.replace(part, args.json)
    return 2 if any(each.level == ERROR for each in found) else 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
