"""mpirun of Open MPI, and mpiexec of MPICH and its relatives: this process is one of their tasks."""

from collections.abc import Mapping

from common.errors import UserError
from common.launch.addresses import DEFAULT_MASTER_PORT, job_port, meeting
from common.launch.launched import launched_layout
from common.launch.layout import Layout
from common.launch.options import LayoutFlags
from common.launch.reading import refuse_half_set


def from_openmpi(flags: LayoutFlags, environ: Mapping[str, str]) -> Layout | None:
    """mpirun of Open MPI: this process is one of its tasks."""
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    of = "OMPI_COMM_WORLD"
    names = (f"{of}_RANK", f"{of}_SIZE", f"{of}_LOCAL_RANK", f"{of}_LOCAL_SIZE")
    refuse_half_set(environ, names, "mpirun")
    job = "".join(filter(str.isdigit, environ.get("PMIX_NAMESPACE", ""))) or "0"
    init_method = _meeting(flags, environ, names, "-x MASTER_ADDR=HOST", job_port(int(job)))
    return launched_layout(flags, environ, "Open MPI's mpirun", names, init_method=init_method, one_terminal=True)


def from_mpich(flags: LayoutFlags, environ: Mapping[str, str]) -> Layout | None:
    """mpiexec of MPICH, or of another MPI that starts tasks with Hydra, such as Intel's."""
    by_srun = "SLURM_STEP_ID" in environ and "MPI_LOCALRANKID" not in environ  # srun --mpi=pmi2
    if "PMI_RANK" not in environ or by_srun:
        return None
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    refuse_half_set(environ, names, "mpiexec")
    init_method = _meeting(flags, environ, names, "-genv MASTER_ADDR HOST", DEFAULT_MASTER_PORT)
    return launched_layout(flags, environ, "MPICH's mpiexec", names, init_method=init_method, one_terminal=True)


def _meeting(
    flags: LayoutFlags, environ: Mapping[str, str], names: tuple[str, str, str, str], option: str, port: int
) -> str:
    """MPI's launchers do not give rank 0's address. On one node it is this host; on several the user must name it."""
    alone = environ[names[3]] == environ[names[1]]
    if not (alone or flags.distributed_init_method or flags.master_addr or environ.get("MASTER_ADDR")):
        raise UserError(
            f"--master-addr is missing: {names[3]}={environ[names[3]]} of {names[1]}={environ[names[1]]} run here, "
            f"and MPI's launcher does not say where rank 0 is: add {option} to it, or --master-addr HOST here"
        )
    return meeting(flags, environ, host="127.0.0.1", port=port)
