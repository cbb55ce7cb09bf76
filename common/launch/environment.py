"""Variables of torch and gloo that would end every rank with a traceback or an abort: refused before torch is loaded.

Those that name a network interface are judged where the machine's interfaces are known (common/join/interfaces.py).
"""

from collections.abc import Mapping

from common.errors import UserError
from common.launch.reading import number

WORDS = {
    "TORCH_DISTRIBUTED_DEBUG": ("OFF", "INFO", "DETAIL"),
    "GLOO_DEVICE_TRANSPORT": ("TCP", "TCP_TLS", "UV", "LINUX", "IBVERBS"),
}
WHOLE_NUMBERS = ("_SIZE", "_SEC", "_MILSEC")  # how the names of torch's numbers end


def check_environment(environ: Mapping[str, str]) -> None:
    """Raises UserError for a variable that torch cannot read."""
    for name, allowed in WORDS.items():
        value = environ.get(name)
        if value is not None and (value if name.startswith("GLOO") else value.upper()) not in allowed:
            raise UserError(f"{name} is {value!r} in the environment: give {', '.join(allowed)}, or unset it")
    for name in environ:
        if name.startswith(("TORCH_NCCL_", "TORCH_FR_")) and name.endswith(WHOLE_NUMBERS):
            number(environ, name, minimum=-(2**63))
