"""Ranks on this machine."""

import os
import signal
import socket
import sys
from collections.abc import Callable

import torch


def start(count: int, main: Callable, argv: list[str]) -> int:
    """Runs main(argv) on so many ranks, which end with this process; the exit code of one that
    fails.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # ends the ranks, too
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with socket.socket() as free:
        free.bind(("", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    try:
        torch.multiprocessing.spawn(one_rank, (count, main, argv), count, daemon=True)
    except torch.multiprocessing.ProcessExitedException as error:
        if error.exit_code > 0:  # it has said why
            return error.exit_code
        print(f"comm: {error}", file=sys.stderr)
        return 128 - error.exit_code
    except torch.multiprocessing.ProcessRaisedException as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def one_rank(rank: int, count: int, main: Callable, argv: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    sys.exit(main(argv))
