"""A real all-reduce over the nodes, one rank a node: is it right, and which node is slow?"""

import multiprocessing
import os
import time
from datetime import timedelta
from statistics import median

SIZES = [2**10, 2**16, 2**20, 2**23]  # bytes: 1 KB, 64 KB, 1 MB, 8 MB
PIECE = 2**20  # bytes that a node sends another to see how fast that is
ROUNDS = 7  # other nodes that a node sends to at most
PATIENCE = 3.0  # seconds: a size that would take longer is left out


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
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=seconds)
    meeting = dist.TCPStore(*store, nodes, rank == 0, timeout=limit)
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=nodes, timeout=limit)
    result = {"sizes": [], "received": {}}

    def timed(operation) -> float:
        """Seconds that the slowest rank took, after all were there."""
        dist.all_reduce(torch.zeros(1, device=device))
        begun = time.perf_counter()
        operation()
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent = torch.tensor([time.perf_counter() - begun], device=device)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        return spent.item()

    for size in SIZES:
        count = size // 4
        mine = (torch.arange(count, device=device) % 1000 + rank).float()
        total = nodes * (torch.arange(count, device=device) % 1000) + nodes * (nodes - 1) // 2
        summed = mine.clone()
        times = [timed(lambda summed=summed: dist.all_reduce(summed))]
        right = bool(summed.equal(total.float()))
        while sum(times) < 0.3 and len(times) < 20:
            times.append(timed(lambda mine=mine: dist.all_reduce(mine.clone())))
        result["sizes"].append({"bytes": size, "seconds": min(times), "right": right})
        if min(times) * 8 > PATIENCE:
            break
    buffer = torch.zeros(PIECE // 4, device=device)
    for shift in range(1, min(nodes, ROUNDS + 1)):
        source = (rank - shift) % nodes
        times = []
        for _ in range(4):  # the first one connects
            dist.all_reduce(torch.zeros(1, device=device))
            begun = time.perf_counter()
            sending = dist.isend(torch.zeros_like(buffer), (rank + shift) % nodes)
            dist.recv(buffer, source)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
            sending.wait()
        result["received"][source] = PIECE / min(times[1:])
    dist.barrier()
    return result


def by_sender(results: list[dict]) -> dict[int, float]:
    """Of each node the median speed, in bytes/s, at which the others received from it."""
    speeds: dict[int, list[float]] = {}
    for result in results:
        for source, speed in result["received"].items():
            speeds.setdefault(int(source), []).append(speed)
    return {node: median(values) for node, values in sorted(speeds.items())}
