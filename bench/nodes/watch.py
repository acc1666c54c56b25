"""python -m bench watch -- COMMAND: runs COMMAND, and when it hangs says which rank waits where.

    python -m bench watch -- torchrun --nproc-per-node 4 train.py
    python -m bench watch --folder /shared/hang -- torchrun --nnodes 2 ...       on each machine
    srun python -m bench watch --folder /shared/hang -- python train.py

COMMAND hangs if for --after seconds it printed nothing and each of its ranks was idle, at one place
of its code. Then a report says in which line each rank waits, and which one did not come to where
the others are. On several machines, each watcher writes what it sees into watch-notes/ in --folder,
and the first that sees all ranks writes the report into --folder, as hang.txt. COMMAND's output,
signals and exit code are passed on. It needs Linux and Python, and nothing in COMMAND. Exit code:
COMMAND's, or with --end, 3 after a hang.
"""

import argparse
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .hang import innermost, lines_of, report, span
from .options import make_parser, refuse
from .output import Output
from .watched.sitecustomize import ASK, FOLDER, SIGNAL

TICK = 1.0  # seconds from one look to the next
IDLE = 0.1  # of a core: a rank that uses more computes. Horovod's idle thread uses some percent.
SILENT = 5.0  # seconds without a sign of life: C code holds the GIL, or the process is stopped
LOST = 120.0  # seconds without one of another machine's watcher; NFS shows some a minute late
NOTES = 5.0  # seconds from one note for the others to the next
REPORT, NOTED = "hang.txt", "watch-notes"  # in --folder; no other name there is touched
GRACE = 10.0  # seconds from SIGTERM to SIGKILL
TICKS = os.sysconf("SC_CLK_TCK")  # of CPU time in a second
PASSED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
UNSEEN = {"beat": 0.0, "since": 0.0, "gpu": False}  # where a file lacks it
FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')


def parse(argv: list[str]) -> argparse.Namespace:
    parser = make_parser("watch", __doc__)
    add = parser.add_argument
    add("--after", type=float, default=60, help="seconds in which nothing moved [%(default)s]")
    add("--folder", type=Path, help="a folder of this run that all machines share")
    add("--end", action="store_true", help="end COMMAND after the report, with exit code 3")
    add("command", nargs="+", metavar="COMMAND", help="after --")
    args = parser.parse_args(argv)
    if args.after < 5:
        parser.error("--after must be 5 s or more")
    return args


def processes() -> dict[int, tuple[str, int, int]]:
    """All processes that live: state, parent, and clock ticks of CPU time, by itself and by its
    children that ended; used, or waited for while others had the cores.
    """
    found: dict[int, tuple[str, int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            words = path.read_text(errors="replace").rpartition(")")[2].split()
            if words[0] not in "ZX":
                used = sum(map(int, words[11:15]))
                with suppress(OSError, IndexError):  # a kernel without it
                    waited = path.with_name("schedstat").read_text().split()[1]  # nanoseconds
                    used += int(waited) * TICKS // 10**9
                found[int(path.parent.name)] = words[0], int(words[1]), used
    return found


def with_children(pid: int, known: dict) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for each in found:
        found += [child for child, (_, parent, _) in known.items() if parent == each]
    return found


class Watch:
    """What is known of the command's ranks on this machine, and of the others' watchers."""

    def __init__(self, args: argparse.Namespace, place: Path):
        self.args, self.place, self.child = args, place, None
        self.host, self.name = socket.gethostname(), f"{socket.gethostname()}-{os.getpid()}.json"
        self.marks: dict[int, tuple[float, int]] = {}  # pid: when it moved last, its CPU then
        self.outputs = [Output(1), Output(2)]
        self.stuck, self.told, self.since, self.mine = [], False, 0.0, {}
        self.noted, self.text, self.whole, self.warned = 0.0, "", True, set()
        if args.folder:
            self.shared = args.folder / NOTED
            try:
                self.shared.mkdir(parents=True, exist_ok=True)
                self.note("busy", [])
                self.clean()
            except OSError as error:
                text = f"--folder {args.folder}: {error.strerror}: give one that you may write to"
                refuse("watch", text)

    def clean(self) -> None:
        """Removes what an earlier run has left in the folder."""
        newest = (self.shared / self.name).stat().st_mtime
        (self.args.folder / REPORT).unlink(missing_ok=True)
        for path in self.shared.glob("*.json"):
            with suppress(OSError, ValueError):
                old = newest - path.stat().st_mtime > LOST
                if old or '"state": "told"' in path.read_text():
                    path.unlink()

    def start(self) -> None:
        """Starts the command in a process group of its own, which gets no signal but by us."""
        paths = [str(Path(__file__).parent / "watched"), os.environ.get("PYTHONPATH")]
        env = os.environ | {FOLDER: str(self.place), "PYTHONPATH": ":".join(filter(None, paths))}
        usual = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED | {signal.SIGCHLD})
        system = ctypes.CDLL(None)
        stdin = subprocess.DEVNULL if os.isatty(0) else None  # a background group may not read it

        def prepare():  # in the command's process
            signal.pthread_sigmask(signal.SIG_SETMASK, usual)
            system.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: it gets that if the watcher dies

        try:
            self.child = subprocess.Popen(
                self.args.command,
                stdin=stdin,
                stdout=self.outputs[0].given,
                stderr=self.outputs[1].given,
                env=env,
                process_group=0,
                preexec_fn=prepare,
            )
        except OSError as error:
            refuse("watch", f"{self.args.command[0]}: {error.strerror}")
        for output in self.outputs:
            output.start()

    def run(self) -> int:
        """Until the command ends; returns the exit code."""
        self.start()
        hung = False
        while not hung and self.child.poll() is None:
            got = signal.sigtimedwait(PASSED | {signal.SIGCHLD}, TICK)
            if got and got.si_signo == signal.SIGINT:  # a terminal sends it to the whole group
                self.safely(os.killpg, self.child.pid, signal.SIGINT)
            elif got and got.si_signo in PASSED:
                self.safely(self.child.send_signal, got.si_signo)
            elif not got:
                hung = bool(self.safely(self.look))
        ended = time.monotonic()
        self.safely(self.leave, hung)
        while any(output.on_its_way(ended) for output in self.outputs):
            late = hung and time.monotonic() - ended > 2
            if late or signal.sigtimedwait(PASSED, 0.1):
                break
        if hung or (self.args.end and self.told_all()):
            return 3  # another machine's watcher was faster: this one's ranks have lost theirs
        code = self.child.returncode
        if code < 0:  # it was killed, and did not end its ranks
            self.safely(lambda: self.end(processes()))
        return 128 - code if code < 0 else code

    def safely(self, what: Callable, *args) -> object:
        """What it returns; or None and, once, a warning: no fault of ours may end the command."""
        try:
            return what(*args)
        except Exception as error:
            text = f"watch: {type(error).__name__}: {error}: the command goes on, but it may be "
            text += "that no hang is reported"
            if type(error) not in self.warned:
                self.warned.add(type(error))
                self.say(text)
        return None

    def told_all(self) -> bool:
        """Whether there is a report for all machines."""
        return bool(self.args.folder and self.safely((self.args.folder / REPORT).exists))

    def leave(self, hung: bool) -> None:
        """The last note: what has become of the ranks. After a report, they are of no use to the
        folder's next run.
        """
        known, state = processes(), "told" if self.told_all() else "ended"
        ranks = self.stuck if hung else [self.seen(each, known) for each in self.ranks(known)]
        self.note(state, ranks)

    # this machine's ranks

    def ranks(self, known: dict) -> list[dict]:
        """Each rank here: its process's last file, and what has become of it. Without any rank,
        the command's other Python processes.
        """
        found: dict[int, dict] = {}
        for path in self.place.glob("*.json"):
            with suppress(OSError, ValueError):
                state = UNSEEN | json.loads(path.read_text()) | {"pid": int(path.stem)}
                alive = state["pid"] in known
                state["how"] = "alive" if alive else "ended" if "ended" in state else "gone"
                state["rank"], state["world"] = state.get("rank") or (None, None)
                key = -state["pid"] if state["rank"] is None else state["rank"]
                # The first of those that live: later ones are its helpers. Else the last one.
                order = (alive, -state["began"] if alive else state["began"])
                if key not in found or order > found[key]["order"]:
                    found[key] = state | {"order": order, "host": self.host}
        some = [found[key] for key in sorted(found) if key >= 0]
        return some or [each for each in found.values() if each["how"] == "alive"]

    def idle(self, state: dict, known: dict, now: float) -> float:
        """For how many seconds a rank has been idle at one place."""
        pid = state["pid"]
        used = sum(known[each][2] for each in with_children(pid, known))
        since, then = self.marks.get(pid, (now, used))
        computes = used < then or (used - then) / TICKS > IDLE * (now - since) + 0.3  # or one ended
        computes = computes and not state["gpu"]
        if pid not in self.marks or state["since"] > since or computes:
            since, then = now, used
        self.marks[pid] = since, then
        return now - since

    def look(self) -> bool:
        """What a tick does; whether the command hung and has been ended."""
        now, known = time.monotonic(), processes()
        ranks = self.ranks(known)
        idle = [self.idle(each, known, now) for each in ranks if each["how"] == "alive"]
        quiet = [now - output.quiet_since() for output in self.outputs if not self.stuck]
        least = min(idle + quiet) if idle else 0.0
        if least > self.args.after - 3 * TICK:
            (self.place / ASK).touch()
        if least < self.args.after:
            if self.told and idle:
                self.say("watch: it moves again")
                if self.args.folder:
                    (self.args.folder / REPORT).unlink(missing_ok=True)
            self.stuck, self.told = [], False
            return self.note("busy", [{"rank": r["rank"], "world": r["world"]} for r in ranks])
        if not self.stuck:
            self.since, self.stuck = now, [self.seen(each, known) for each in ranks]
        self.note("waits", self.stuck)
        self.told = self.told or self.report(now)
        return self.told and self.whole and self.args.end and self.end(known)

    def seen(self, state: dict, known: dict) -> dict:
        """A rank as the report shows it."""
        stack, how = state.pop("stack", []), state["how"]
        if how == "alive":
            how = "stopped" if known[state["pid"]][0] == "T" else "waits"
            if how == "waits" and time.monotonic() - state["beat"] > SILENT:
                left = [] if "ended" in state else stack  # it waits after its program's end
                stack = self.by_signal(state["pid"]) or left
        state |= {"how": how, "lines": lines_of(stack), "in": innermost(stack)}
        return state

    def by_signal(self, pid: int) -> list | None:
        """The stack that faulthandler writes, if the process still has its handler."""
        file = self.place / f"{pid}.stack"
        with suppress(OSError, ValueError):
            caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
            if int(caught, 16) >> SIGNAL - 1 & 1:
                os.kill(pid, SIGNAL)
                time.sleep(0.5)
                main = file.read_text().rstrip().split("\n\n")[-1]  # threads, the newest first
                return [[name, int(n), where] for name, n, where in FRAME.findall(main)]
        return None

    # all machines

    def note(self, state: str, ranks: list[dict]) -> bool:
        """Says to the other watchers what is seen here; False."""
        now = time.monotonic()
        if state == self.mine.get("state") and now - self.noted < NOTES:
            return False
        self.noted, self.mine = now, {"host": self.host, "state": state, "ranks": ranks}
        if self.args.folder:
            part = self.shared / f"{self.name}.part"
            part.write_text(json.dumps(self.mine))
            part.replace(self.shared / self.name)
        return False

    def notes(self) -> list[dict]:
        """What all watchers say, the newest last. One that has been silent for long is lost."""
        if not self.args.folder:
            return [self.mine]
        found, newest = [], (self.shared / self.name).stat().st_mtime
        for path in self.shared.glob("*.json"):
            # It is just being replaced, or is no note.
            with suppress(OSError, ValueError, KeyError, TypeError):
                note, then = json.loads(path.read_text()), path.stat().st_mtime
                if note["state"] not in ("ended", "told") and newest - then > LOST:
                    lost = {"how": "lost", "host": note["host"]}
                    note |= {"state": "lost", "ranks": [r | lost for r in note["ranks"]]}
                found.append((then, note))
        return [note for _, note in sorted(found, key=lambda each: each[0])]

    def report(self, now: float) -> bool:
        """Writes the report, once all machines' ranks are known to wait; whether there is one.

        Ranks that no watcher has seen get --after seconds more.
        """
        notes, ranks = self.notes(), {}
        for rank in (rank for note in notes for rank in note["ranks"]):
            has = rank["rank"] is not None
            ranks[(0, rank["rank"]) if has else (1, len(ranks))] = rank
        world = max((rank["world"] or 0 for rank in ranks.values()), default=0)
        missing = sorted({(0, rank) for rank in range(world)} - {*ranks})
        waited = now - self.since >= self.args.after or not self.args.folder
        if any(note["state"] == "busy" for note in notes) or (missing and not waited):
            return False
        missing, self.whole = [rank for _, rank in missing], bool(self.args.folder) or not missing
        text = report([ranks[key] for key in sorted(ranks)], missing * self.whole, self.args.after)
        if not self.whole:
            text += f"\nRanks {span(missing)} are on other machines: --folder brings them together"
        if self.args.folder:
            text = self.safely(self.publish, text) or text
        self.say(text)
        self.text = text
        return True

    def publish(self, text: str) -> str:
        """Writes the report for all, if no other watcher has; what is left to say here."""
        part, path = self.shared / f"{self.name}.report", self.args.folder / REPORT
        part.write_text(f"{text}\n")
        try:
            os.link(part, path)
        except FileExistsError:
            text = f"watch: it hangs: read {path}"
        except OSError:  # a file system without hard links: the last one's report stays
            part.replace(path)
        part.unlink(missing_ok=True)
        return text

    def say(self, text: str) -> None:
        with suppress(OSError):  # nobody reads it, or its disk is full
            print(text, file=sys.stderr, flush=True)

    def end(self, known: dict) -> bool:
        """Ends the command's processes, and ranks that have lost it; True."""
        roots = {each["pid"] for each in self.ranks(known) if each["how"] == "alive"}
        roots |= {self.child.pid} if self.child.poll() is None else set()
        pids = {each for pid in roots for each in with_children(pid, known)}
        for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 1.0)):
            deadline = time.monotonic() + seconds
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):  # it ended, or is not ours
                    os.kill(pid, number)
            while pids & {*processes()} and time.monotonic() < deadline:
                self.child.poll()
                time.sleep(0.1)
        if "\n" in self.text:  # the report's end again, below what the command said
            self.say("\n".join(self.text.splitlines()[-2:]))
        return True


def main(argv: list[str]) -> int:
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="watch-", ignore_cleanup_errors=True) as place:
        return Watch(args, Path(place)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
