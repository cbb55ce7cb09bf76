"""The MNIST trainer, and the command that an installation makes of it.

The name of a program has a dash, so no import statement can name its file.
"""

from importlib import import_module


def mnist_distributed() -> None:
    """The command mnist-distributed.py."""
    import_module("mnist_ddp.mnist-distributed").main()
