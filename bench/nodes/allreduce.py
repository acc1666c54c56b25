"""A real all-reduce over the nodes, one rank a node: is it right, and which node is slow?"""

import multiprocessing
import os
import time
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from . import comm

SIZES = [2**10, 2**16, 2**20, 2**23]  # bytes: 1 KB, 64 KB, 1 MB, 8 MB
PIECE = 2**20  # bytes that a node sends another to see how fast that is
MOST = 7  # other nodes that a node sends to at most
TURNS, TURN = 3, 0.2  # how often, and for how many seconds a node sends another
PATIENCE = 0.5  # seconds: a size of which one all-reduce would take longer is left out


def run(backend: str, rank: int, nodes: int, store: tuple[str, int], env: dict, seconds: float):
    """Runs measure() in a process of its own, ended after so many seconds; {"error": ...} if it
    fails. env: variables that it gets.
    """
    context = multiprocessing.get_context("fork")  # torch is imported; CUDA has not begun
    ours, theirs = context.Pipe(duplex=False)
    arguments = theirs, backend, rank, nodes, store, env, seconds
    process = context.Process(target=child, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return {"error": f"not done after {seconds:.0f} s"}
        return ours.recv()
    except EOFError:
        return {"error": "its process died"}
    finally:
        process.kill()
        process.join()


def child(pipe, backend, rank, nodes, store, env, seconds) -> None:
    os.environ.update(env)
    try:
        pipe.send(measure(backend, rank, nodes, store, seconds))
    except Exception as error:
        pipe.send({"error": str(error).strip().splitlines()[0]})
    os._exit(0)  # no wait for others, which may hang


def measure(backend: str, rank: int, nodes: int, store: tuple[str, int], seconds: float) -> dict:
    """Seconds of each size's all-reduce, and from which node bytes/s came how fast."""
    limit = timedelta(seconds=seconds)
    meeting = dist.TCPStore(*store, nodes, rank == 0, timeout=limit)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=nodes, timeout=limit)
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    sizes, per_byte = [], 0.0
    received: dict[int, list[float]] = {}  # bytes/s in each turn, by the node that sent
    for size in SIZES:
        if size * per_byte > PATIENCE:
            break
        sizes.append(comm.measure("all_reduce", size, device))
        per_byte = median(sizes[-1]["seconds"]) / size
    # Turns that lie apart: programs that use the cores may spoil one of them.
    for shift in TURNS * [*range(1, min(nodes, MOST + 1))]:
        speed = passed(shift, rank, nodes, device)
        received.setdefault((rank - shift) % nodes, []).append(speed)
    dist.barrier()
    return {"sizes": sizes, "received": received}


def passed(shift: int, rank: int, nodes: int, device: torch.device) -> float:
    """Bytes/s from the rank that is `shift` before this one, which sends a piece when it is asked:
    so none is under way before the clock starts. First the even ranks send, then the odd ones: on a
    slow link, what comes back would wait behind what is sent.
    """
    source, target = (rank - shift) % nodes, (rank + shift) % nodes
    ours, theirs = torch.zeros(2, PIECE // 4, device=device)
    question, asked = torch.zeros(2, 1, device=device)
    spent = []

    def once(gives: bool, takes: bool) -> float:
        begun, works = time.perf_counter(), []
        if takes:
            works.append(dist.isend(question, source))
        if gives:
            dist.recv(asked, target)
            works.append(dist.isend(ours, target))
        if takes:
            dist.recv(theirs, source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - begun
        for work in works:
            work.wait()
        return took

    for parity in (0, 1):
        gives, takes = rank % 2 == parity, source % 2 == parity
        begun, times = time.perf_counter(), []
        # Each time all begin together, so no node waits for another's slow link.
        while not times or comm.largest([time.perf_counter() - begun], device)[0] < TURN:
            times.append(once(gives, takes))
        if takes:
            spent = times
    return PIECE / sorted(spent)[len(spent) // 5]  # not the fastest, which may have been lucky


def by_sender(results: list[dict]) -> dict[int, tuple[float, float]]:
    """Of each node, how fast the others received from it, in bytes/s: in the median turn, and in
    the best one.
    """
    turns: dict[int, list[list[float]]] = {}
    for result in results:
        for source, speeds in result["received"].items():
            turns.setdefault(int(source), []).append(speeds)
    return {
        node: (median(map(median, found)), median(map(max, found)))
        for node, found in sorted(turns.items())
    }
