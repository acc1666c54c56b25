"""Plants a fault on two hosts, runs doctor on them, says whether it was found, and cured.

    python tests/plant.py                 every fault once, and ten sound runs
    python tests/plant.py --seed 7 --count 20 --sound 0
    python tests/plant.py mtu clock-behind

Found means: the finding of the right kind names the right host and the right cure. Cured means:
with that cure, doctor finds nothing. What cannot be planted here is left out with the reason.
"""

import argparse
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from hosts import Lab, Start, build_shim, lab, lacking

FIREWALL = """nft -f - <<END
table inet ladder {{ chain input {{ type filter hook input priority 0; policy drop;
ct state established accept; iif lo accept; {}; }}; }}
END"""
NO_FIREWALL = "nft delete table inet ladder"


@dataclass
class Fault:
    """plant: changes the lab, and returns how the two hosts start doctor.

    cure: does what the text of the cure says, to the same; a pattern of that text is `says`.
    """

    kind: str
    node: int | None
    says: str
    plant: Callable[[Lab], list[Start]]
    cure: Callable[[Lab, list[Start]], list[Start]] | None
    alone: bool = False  # the nodes cannot meet: each says so by itself
    needs: str = "ip"


def both() -> list[Start]:
    return [Start(), Start()]


def on_b(**changes) -> Callable:
    """host b starts in another way, or (with host=0) host a."""

    def plant(lab: Lab) -> list[Start]:
        starts, host = both(), changes.get("host", 1)
        starts[host] = replace(Start(), **{k: v for k, v in changes.items() if k != "host"})
        return starts

    return plant


def sound(lab: Lab, starts: list[Start]) -> list[Start]:
    """The cure of what is a host's way to start."""
    return both()


def after(act: Callable[[Lab], None], then: Callable = lambda: both()) -> Callable:
    """Changes the lab, and starts as usual."""

    def plant(lab: Lab) -> list[Start]:
        act(lab)
        return then()

    return plant


def cured(host: str, text: str) -> Callable:
    def cure(lab: Lab, starts: list[Start]) -> list[Start]:
        lab.sh(host, text)
        return starts

    return cure


def shim(host: int = 1, **variables) -> Callable:
    def plant(lab: Lab) -> list[Start]:
        library = {"LD_PRELOAD": str(build_shim(lab.folder))}
        return on_b(host=host, env=library | variables)(lab)

    return plant


def named(host: str, text: str) -> Callable:
    return after(lambda lab: lab.names(host, text))


def ipv6(lab: Lab, interface: str, text: str) -> None:
    """Host b has an IPv6 address, too, and names by which it may be found."""
    lab.names("hostb", text)
    lab.ip("hostb", f"addr add fd77::2/64 dev {interface} nodad")


def ipv6_host(lab: Lab) -> list[Start]:
    """They meet by IPv6; what Gloo would tell of host b is docker0's address."""
    ipv6(lab, "eth0", "172.17.0.1 hostb\nfd77::1 hosta\n")
    lab.ip("hosta", "addr add fd77::1/64 dev eth0 nodad")
    return [Start(flags={"host": "fd77::1"}) for _ in both()]


def address_of(node: int, plant: Callable) -> Fault:
    """Gloo would tell the others an address of this node by which they do not reach it."""

    def cure(lab: Lab, starts: list[Start]) -> list[Start]:
        starts[node].env = starts[node].env | {"GLOO_SOCKET_IFNAME": "eth0"}
        return starts

    text = rf"GLOO_SOCKET_IFNAME=eth0 .*--local-addr [\w.:]+{node + 1}$"
    return Fault("address", node, text, plant, cure)


def black_hole(lab: Lab) -> None:
    """Hosts that send 9,000 bytes, a switch that drops what is over 1,500."""
    for host in lab.hosts():
        lab.ip(host, "link set dev eth0 mtu 9000 gso_max_segs 1")
        lab.ip("switch", f"link set {host} mtu 1500")


def small_mtu(lab: Lab, starts: list[Start]) -> list[Start]:
    for host in lab.hosts():
        lab.ip(host, "link set dev eth0 mtu 1500")
    return starts


def other_code(lab: Lab) -> None:
    (lab.folder / "hostb/train.py").write_text("print('other training')\n")


def same_code(lab: Lab, starts: list[Start]) -> list[Start]:
    shutil.copy(lab.folder / "hosta/train.py", lab.folder / "hostb/train.py")
    return starts


def slow_link(lab: Lab) -> None:
    command = (
        f"tc -n {lab.name}-hostb qdisc add dev eth0 root tbf rate 20mbit burst 64kb latency 50ms"
    )
    subprocess.run(command.split(), check=True, timeout=20)


def cut(lab: Lab) -> None:
    lab.ip("switch", "link set hostb down")


def mac(lab: Lab, host: str) -> str:
    """The hardware address of its eth0."""
    return lab.script("ip", host, "-br", "link", "show", "dev", "eth0").stdout.split()[2]


def translated(lab: Lab) -> None:
    """Host b's packets leave under another address, as a container's do."""
    lab.ip("hosta", "neigh replace 10.77.0.98 dev eth0 lladdr " + mac(lab, "hostb"))
    lab.sh(
        "hostb",
        "nft -f - <<END\ntable ip ladder { chain out { type nat hook postrouting priority 100;"
        " oif eth0 ip saddr 10.77.0.2 snat to 10.77.0.98; }; }\nEND",
    )


BUSY = """python3 -c 'import socket, time
server = socket.create_server(("", 29500))
time.sleep(60)' >/dev/null 2>&1 &
sleep 1"""
OPEN = FIREWALL.format("tcp dport 29500 accept")
SHUT = FIREWALL.format("counter")
NAMES = {  # what a host's own name means there
    "loopback-name": "127.0.1.1",
    "docker-name": "172.17.0.1",
    "stale-name": "10.77.0.77",
}

FAULTS = {
    **{
        name: address_of(1, named("hostb", f"{address} hostb\n10.77.0.1 hosta\n"))
        for name, address in NAMES.items()
    },
    "clock-behind": Fault("clock", 1, "ntp", shim(CLOCK_OFFSET="-25"), sound, needs="cc"),
    "clock-ahead": Fault("clock", 1, "ntp", shim(CLOCK_OFFSET="40"), sound, needs="cc"),
    "clock-3s": Fault("drift", 1, "ntp", shim(CLOCK_OFFSET="-3"), sound, needs="cc"),
    "mtu": Fault("mtu", None, r"ip link set dev eth0 mtu 1500", after(black_hole), small_mtu),
    "firewall-a": Fault(
        "ports",
        0,
        r"on hosta.* all TCP ports.*10\.77\.0\.2",
        after(lambda lab: lab.sh("hosta", OPEN)),
        cured("hosta", NO_FIREWALL),
        needs="nft",
    ),
    "firewall-b": Fault(
        "ports",
        1,
        r"on hostb.* all TCP ports.*10\.77\.0\.1",
        after(lambda lab: lab.sh("hostb", SHUT)),
        cured("hostb", NO_FIREWALL),
        needs="nft",
    ),
    "firewall-all": Fault(
        "silent",
        1,
        r"ufw allow 29500/tcp",
        after(lambda lab: lab.sh("hosta", SHUT)),
        cured("hosta", NO_FIREWALL),
        alone=True,
        needs="nft",
    ),
    "no-name": address_of(0, named("hosta", "10.77.0.2 hostb\n")),
    "ipv6-name": address_of(
        1, after(lambda lab: ipv6(lab, "lo", "fd77::2 hostb\n10.77.0.1 hosta\n"))
    ),
    "ipv6-host": address_of(1, ipv6_host),
    "decoy-interface": address_of(1, on_b(env={"GLOO_SOCKET_IFNAME": "docker0"})),
    "no-interface": address_of(0, on_b(env={"GLOO_SOCKET_IFNAME": "eth9"}, host=0)),
    "code": Fault("code", 1, "same commit", after(other_code), same_code),
    "flags": Fault("command", 1, "one command", on_b(command="train.py --lr 0.2"), sound),
    "variable": Fault("variable", 1, "export NCCL_ALGO", on_b(env={"NCCL_ALGO": "Ring"}), sound),
    "open-files": Fault("files", 1, r"ulimit -n 65536", on_b(shell="ulimit -n 256"), sound),
    "shm": Fault(
        "shm", 1, r"--shm-size", on_b(shell="mount -t tmpfs -o size=64m shm /dev/shm"), sound
    ),
    "one-core": Fault(
        "cores", 1, r"--cpus-per-task", on_b(prefix="taskset -c 0"), sound, needs="taskset"
    ),
    "no-flock": Fault("flock", 1, "-o flock", shim(NO_FLOCK="1"), sound, needs="cc"),
    "no-flock-a": Fault("flock", 0, "-o flock", shim(host=0, NO_FLOCK="1"), sound, needs="cc"),
    "not-shared": Fault(
        "not-shared",
        1,
        "mount the same",
        lambda lab: on_b(shell=f"mount -t tmpfs t {lab.folder}/shared")(lab),
        sound,
    ),
    "slow-link": Fault(
        "slow",
        1,
        "ethtool eth0",
        after(slow_link),
        cured("hostb", "tc qdisc del dev eth0 root"),
    ),
    "translated": Fault(
        "nat",
        1,
        "--network host",
        after(translated),
        cured("hostb", "nft flush ruleset"),
        needs="nft",
    ),
    "same-name": Fault("same-name", 1, "hostnamectl", on_b(shell="hostname hosta"), sound),
    "own-address": Fault(
        "own", 1, "first machine's address", on_b(flags={"host": "10.77.0.2"}), sound, alone=True
    ),
    "unknown-host": Fault(
        "unknown", 1, "IP address", on_b(flags={"host": "nowhere.invalid"}), sound, alone=True
    ),
    "wrong-port": Fault("refused", 1, "--port", on_b(flags={"port": 29600}), sound, alone=True),
    "busy-port": Fault(
        "busy",
        0,
        "another --port",
        on_b(host=0, shell=BUSY),
        lambda lab, starts: [Start(flags={"port": 29501}) for _ in starts],
        alone=True,
    ),
    "cut": Fault(
        "silent",
        1,
        "ping",
        after(cut),
        lambda lab, starts: (lab.ip("switch", "link set hostb up"), starts)[1],
        alone=True,
    ),
    "not-started": Fault(
        "nobody", 0, "read what the others", on_b(starts=False), sound, alone=True
    ),
    "same-number": Fault("number", 0, "own --node", on_b(flags={"node": 0}), sound, alone=True),
    "other-count": Fault(
        "number", 1, "same --nnodes", on_b(flags={"nnodes": 3}), sound, alone=True
    ),
}


def verdict(fault: Fault, reports: list) -> str:
    """found, or what was seen instead; what else was said, too."""
    asked = reports if fault.alone else reports[:1]
    seen = [each for report in asked for each in report.findings]
    right = [
        each
        for each in seen
        if each["kind"] == fault.kind
        and each["node"] == fault.node
        and re.search(fault.says, each["cure"])
    ]
    said = ", ".join(f"{each['kind']} of {each['node']}" for each in seen) or "nothing"
    codes = [report.code for report in reports if report.data]
    if not right:
        return f"MISSED, said: {said}"
    if not all(codes):
        return f"found, but exit codes {codes}"
    others = [each for each in seen if each not in right and not fault.alone]
    return f"found{', also: ' + said if others else ''}"


def one(name: str, fault: Fault, args: argparse.Namespace) -> tuple[str, str, float]:
    """Plants a fault; what doctor made of it, what of its cure, and how long it took."""
    with lab() as hosts:
        starts = fault.plant(hosts)
        begun = time.monotonic()
        reports = hosts.doctor(*starts)
        seconds = time.monotonic() - begun
        if args.show:
            print(*(report.out for report in reports), sep="\n---\n")
        result = verdict(fault, reports)
        if not result.startswith("found") or args.no_cure:
            return result, "-", seconds
        again = hosts.doctor(*fault.cure(hosts, starts))
        left = [each["what"] for report in again for each in report.findings]
    return result, f"still: {left}" if left else "cured", seconds


def possible(fault: Fault) -> bool:
    return bool(shutil.which(fault.needs, path="/usr/sbin:/sbin:/usr/bin:/bin:/usr/local/bin"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", choices=[*FAULTS, []], help="[all of them]")
    add("--seed", type=int, help="choose at random")
    add("--count", type=int, default=20, help="how many, with --seed [20]")
    add("--sound", type=int, default=10, help="runs without a fault [10]")
    add("--no-cure", action="store_true", help="do not try the cures")
    add("--show", action="store_true", help="print what doctor printed")
    args = parser.parse_args()
    if reason := lacking():
        print(f"plant.py: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts are taken down
    names = args.names or [*FAULTS]
    if args.seed is not None:
        names = random.Random(args.seed).sample(names, min(args.count, len(names)))
    found = healed = tried = slowest = false = 0
    for name in names:
        if not possible(FAULTS[name]):
            print(f"{name:16} left out: needs {FAULTS[name].needs}")
            continue
        result, cure, seconds = one(name, FAULTS[name], args)
        tried += 1
        found, healed = found + (result[:5] == "found"), healed + (cure == "cured")
        slowest = max(slowest, seconds)
        print(f"{name:16} {seconds:5.1f} s  {result}; {cure}", flush=True)
    for k in range(args.sound):
        with lab() as hosts:
            reports = hosts.doctor(*both())
        said = [each["what"] for report in reports for each in report.findings]
        false += bool(said) or any(report.code for report in reports)
        print(f"sound {k + 1:2}: {said or 'nothing found'}", flush=True)
    cures = "not tried" if args.no_cure else f"{healed} cured"
    print(f"found {found} of {tried}, {cures}; slowest {slowest:.0f} s; ", end="")
    print(f"false findings in {false} of {args.sound} sound runs")
    return found < tried or bool(false)


if __name__ == "__main__":
    sys.exit(main())
