"""torchrun, torch.distributed.launch, accelerate launch, and whatever else sets RANK, WORLD_SIZE and so on."""

from collections.abc import Mapping

from common.errors import UserError
from common.launch.addresses import DEFAULT_MASTER_PORT, meeting
from common.launch.launched import launched_layout
from common.launch.layout import Layout
from common.launch.options import LayoutFlags
from common.launch.reading import number, refuse_half_set


def from_torchrun(flags: LayoutFlags, environ: Mapping[str, str]) -> Layout | None:
    """The layout that these variables describe; None where neither RANK nor WORLD_SIZE is set."""
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    name = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the environment (RANK, WORLD_SIZE, ...)"
    meets_elsewhere = bool(flags.distributed_init_method or flags.master_addr)
    address = () if meets_elsewhere else ("MASTER_ADDR", "MASTER_PORT")
    refuse_half_set(environ, ("RANK", "WORLD_SIZE", "LOCAL_RANK", *address), "torchrun")
    if environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1":
        raise UserError("TORCH_ELASTIC_WORKER_IDENTICAL is 1, which hangs on uneven nodes: unset it")
    _refuse_another_rank(environ)
    return launched_layout(
        flags,
        environ,
        name,
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        node_rank=number(environ, "GROUP_RANK", default=0),
        nodes=number(environ, "GROUP_WORLD_SIZE", default=0),
        init_method=meeting(flags, environ, host="", port=DEFAULT_MASTER_PORT),
        hosts_store=meets_elsewhere or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        meeting=("MASTER_ADDR", "MASTER_PORT"),
    )


def _refuse_another_rank(environ: Mapping[str, str]) -> None:
    """Refuse a RANK that was set by hand while srun or mpirun gives this process another one."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return  # torchrun, itself started by srun or mpirun on each node
    several_tasks = environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    others = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", *["SLURM_PROCID"] * several_tasks]
    for name in others:
        if environ.get(name, environ["RANK"]) != environ["RANK"]:
            raise UserError(
                f"RANK is {environ['RANK']}, but {name} is {environ[name]}: two launchers disagree; unset RANK, "
                "WORLD_SIZE and LOCAL_RANK to take the rank that the launcher gives"
            )
