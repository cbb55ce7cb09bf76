"""Python with torch and the trainers imported already, for launchers that start one process for each rank.

`warm-python SCRIPT FLAGS` stands in a launcher's command where `python SCRIPT FLAGS` would. It asks the server of its
host, which this module is, to fork a process that runs the script with the launcher's environment, folder and terminal,
and ends with that process's exit code. So a rank starts in a tenth of a second, not in four. The rank's environment,
sockets and host are the launcher's; only its parent is another one.

    python -m tests.cluster.warm SOCKET        the server: one on each host, for the whole run
"""

import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading

MODULES = ("torch._dynamo", "mnist_ddp.train", "bert_ddp.pretrain.train", "common.doctor.examination")
LOOK_SECONDS = 0.02  # for children that have ended


def serve(path: str) -> None:
    """Fork a process for each client until this one is terminated. A client that goes away takes its process along."""
    for module in MODULES:
        importlib.import_module(module)
    assert threading.active_count() == 1  # a process that has threads must not fork
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    clients: dict[int, socket.socket] = {}  # pid -> its client
    while True:
        for key, _ in selector.select(LOOK_SECONDS):
            if key.fileobj is listener:
                client, _ = listener.accept()
                message, files, _, _ = socket.recv_fds(client, 1 << 20, 3)
                while not message.endswith(b"\n"):
                    message += client.recv(1 << 20)
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    listener.close()
                    be(files, **json.loads(message))
                for file in files:
                    os.close(file)
                with contextlib.suppress(OSError):  # the client was killed
                    client.sendall(f"{pid}\n".encode())
                clients[pid] = client
                selector.register(client, selectors.EVENT_READ)
            else:  # the client sends nothing more: it has been killed
                pid = next(pid for pid, client in clients.items() if client is key.fileobj)
                os.kill(pid, signal.SIGKILL)
        while clients and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            client = clients.pop(ended[0])
            selector.unregister(client)
            code = os.waitstatus_to_exitcode(ended[1])
            with contextlib.suppress(OSError):  # the client was killed
                client.sendall(f"{code}\n".encode())
            client.close()


def be(files: list[int], argv: list[str], folder: str, environ: dict[str, str]) -> None:
    """What `python ARGV` does."""
    code = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = argv[argv[0] == "-m" :]
        if argv[0] == "-m":
            sys.path.insert(0, folder)
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))  # noqa: PTH100, PTH120
            runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
