#!/usr/bin/env python3
"""Play every node of a layout on this machine: one terminal, real processes, loopback.

    play_nodes.py mnist_ddp/mnist-distributed.py -n 2 -g 3,1 --device cpu ...

starts the given command once for each node, with `-i 0`, `-i 1`, ... and a master address added, shows their
lines with the node's number in front, and ends all of them when one fails. For demos and study; on real
machines each node runs its own command.
"""

import signal
import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.launch.addresses import free_port


def main() -> int:
    command = sys.argv[1:]
    if "-g" not in command or not command[0].endswith(".py") or command.index("-g") + 1 == len(command):
        print(__doc__, file=sys.stderr)
        return 2
    gpus = command[command.index("-g") + 1]
    port = str(free_port())
    nodes = []
    for number in range(len(gpus.split(","))):
        flags = ["-i", str(number), "--master-addr", "127.0.0.1", "--master-port", port]
        # a session of its own: Ctrl-C reaches this program alone, which then ends the nodes
        node = subprocess.Popen([sys.executable, *command, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, start_new_session=True)  # fmt: skip
        threading.Thread(target=show, args=(number, node.stdout)).start()
        nodes.append(node)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `kill` ends the nodes as Ctrl-C does
    try:
        return max(node.wait() for node in nodes)
    except KeyboardInterrupt:
        for node in nodes:
            node.send_signal(signal.SIGTERM)
        for node in nodes:
            node.wait()
        return 130


def show(number: int, lines) -> None:
    for line in lines:
        print(f"node {number} | {line}", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
