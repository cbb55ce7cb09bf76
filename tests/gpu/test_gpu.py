"""`make test-gpu`: every path that a GPU takes and a CPU does not, on one GPU, in minutes.

On a machine without one, what a CPU can do of it runs on the CPU, and the rest is skipped. Ranks share the GPU over
gloo (--oversubscribe); NCCL takes one rank a GPU. References are runs of one process on the CPU, in float64.
"""

import json
import signal
import statistics
import time
from pathlib import Path
from pydoc_data import topics

import psutil
import pytest
import torch

from common.errors import Interrupted
from common.join.waiting import poll
from common.uneven.options.timer import StepTimer
from tests.harness import BERT, FINETUNE, MNIST, ROOT, Result, largest_difference, losses, rows, run, start, weights
from tests.small_bert import save_model, save_ner

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
PLAY = ROOT / "launch_scripts" / "play_nodes.py"
SHARED = ("--oversubscribe", "--backend", "gloo") if HAS_GPU else ()
LIMIT_SECONDS = 240
alone = pytest.mark.alone
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no GPU")

DIGITS = ("--dataset", "digits", "--global-batch", 60)
EXACT = ("--precision", "fp64")


def train(script: Path, gpus: tuple[int, ...], folder: Path, *flags: object, device: str = DEVICE) -> Result:
    """A run on this layout, as typed. Fails with its output where it fails."""
    where = ("--device", device, "--out-dir", folder)
    if gpus == (1,):
        result = run("python", script, "-g", 1, *where, *flags, timeout=LIMIT_SECONDS)
    else:
        layout = ("-n", len(gpus), "-g", ",".join(map(str, gpus)), *(SHARED if device == DEVICE else ()))
        result = run("python", PLAY, script, *layout, *where, *flags, timeout=LIMIT_SECONDS)
    assert result.code == 0, result.output
    return result


# --- the same curve on the GPU as on the CPU -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    """name -> (script, flags) of a short run in float64."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("\n\n".join(topics.topics.values())[:40_000])
    text = ("--corpus", folder / "text.txt", "--cache-dir", folder / "cache", "--dropout", 0, "--vocab-size", 400)
    small = ("--preset", "tiny", "--sequence-length", 32, "--global-batch", 50, "--micro-batch", 9)
    model, data = save_model(folder / "model"), save_ner(folder / "ner")
    ner = ("--task", "ner", "--model", model, "--data", data, "--global-batch", 16, "--dropout", 0)
    return {
        "mnist": (MNIST, (*DIGITS, *EXACT, "--max-steps", 40, "--micro-batch", 9)),
        "bert": (BERT, (*text, *small, *EXACT, "--max-steps", 12, "--lr", "1e-3")),
        "finetune": (FINETUNE, (*ner, *EXACT, "--max-steps", 10, "--lr", "3e-3")),
    }


@pytest.fixture(scope="module")
def references(subjects, tmp_path_factory):
    """name -> a run in one process on the CPU, made when it is asked for."""
    made: dict[str, Path] = {}

    def reference(name: str) -> Path:
        if name not in made:
            script, flags = subjects[name]
            made[name] = tmp_path_factory.mktemp(name) / "run"
            train(script, (1,), made[name], *flags, device="cpu")
        return made[name]

    return reference


def same_run(found: Path, wanted: Path) -> None:
    assert losses(found) == pytest.approx(losses(wanted), abs=1e-9)
    assert largest_difference(weights(found), weights(wanted)) < 1e-8


@pytest.mark.parametrize("name", ["mnist", "bert", "finetune"])
def test_four_ranks_that_share_the_gpu_are_one_process_on_the_cpu(name, subjects, references, tmp_path):
    script, flags = subjects[name]
    train(script, (3, 1), tmp_path / "run", *flags)
    same_run(tmp_path / "run", references(name))


@needs_gpu
@pytest.mark.parametrize("name", ["mnist", "bert", "finetune"])
def test_one_rank_over_nccl_is_one_process_on_the_cpu(name, subjects, references, tmp_path):
    script, flags = subjects[name]
    said = train(script, (1,), tmp_path / "run", *flags, "--backend", "nccl").output
    assert "nccl" in said
    same_run(tmp_path / "run", references(name))


@pytest.mark.parametrize("first, then", [("cpu", DEVICE), (DEVICE, "cpu")])
def test_a_checkpoint_goes_on_on_another_device(first, then, subjects, references, tmp_path):
    script, flags = subjects["mnist"]
    half = [20 if flag == 40 else flag for flag in flags]
    train(script, (2, 1), tmp_path / "run", *half, "--save-every", 20, device=first)
    train(script, (1,), tmp_path / "run", *flags, "--resume", device=then)
    same_run(tmp_path / "run", references("mnist"))


# --- precision, compilation, memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"] if HAS_GPU else ["bf16"])
def test_half_precision_learns_on_uneven_ranks(precision, tmp_path):
    train(MNIST, (2, 1), tmp_path / "run", *DIGITS, "--precision", precision, "--epochs", 4)
    assert rows(tmp_path / "run", "eval")[-1]["accuracy"] > 0.9


@needs_gpu
def test_a_step_that_the_scaler_skips_is_skipped_on_all_ranks_alike(tmp_path):
    """Scaled by 65,536 the first gradients of so large a loss overflow: no rank may take the step alone, and the ranks
    compare their weights at each checkpoint."""
    flags = ("--precision", "fp16", "--epochs", 2, "--save-every", 5, "--lr", "0.01")
    said = train(MNIST, (2, 1), tmp_path / "run", *DIGITS, *flags).output
    assert "differ" not in said
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path / "run").values())


def test_a_compiled_model_takes_an_empty_part(tmp_path):
    flags = ("--compile", "--shares", "4,0,2", "--max-steps", 12)
    train(MNIST, (2, 1), tmp_path / "compiled", *DIGITS, *flags)
    train(MNIST, (1,), tmp_path / "plain", *DIGITS, "--max-steps", 12, device="cpu")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=2e-2)


def test_recomputed_activations_give_the_same_losses(subjects, references, tmp_path):
    script, flags = subjects["bert"]
    train(script, (1,), tmp_path / "run", *flags, "--checkpoint-activations")
    same_run(tmp_path / "run", references("bert"))


@alone
@needs_gpu
def test_too_little_memory_is_said_with_the_rank_and_what_to_change(subjects, tmp_path):
    script, flags = subjects["bert"]
    large = ("--precision", "fp32", "--preset", "base", "--global-batch", 250, "--micro-batch", 250)
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - 6 * 2**30, dtype=torch.uint8, device="cuda")
    result = run("python", script, "-g", 1, "--device", "cuda", *flags, *large, "--out-dir", tmp_path / "run")
    del held
    torch.cuda.empty_cache()
    assert result.code == 2, result.output
    assert "[0] error: " in result.output and "give a smaller --micro-batch" in result.output
    assert "Traceback" not in result.output


@alone
@needs_gpu
def test_the_largest_micro_batch_is_found_beside_what_others_hold(tmp_path):
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - 6 * 2**30, dtype=torch.uint8, device="cuda")
    said = train(MNIST, (1,), tmp_path / "run", *DIGITS, "--micro-batch", "auto", "--max-steps", 20).output
    del held
    torch.cuda.empty_cache()
    assert "micro-batches of at most" in said


@alone
@needs_gpu
def test_memory_of_the_gpu_is_flat_over_two_thousand_steps(tmp_path):
    flags = ("--device", "cuda", *DIGITS, "--epochs", 100, "--max-steps", 2000, "--out-dir", tmp_path / "run")
    training, seen = start("python", MNIST, "-g", 1, *flags), []
    while training.process.poll() is None:
        seen.append(torch.cuda.mem_get_info()[0])
        time.sleep(0.2)
    assert training.result().code == 0, training.result().output
    middle, late = seen[len(seen) // 2 : -len(seen) // 4], seen[-len(seen) // 4 : -2]
    assert statistics.median(middle) - min(late) < 64 * 2**20


# --- times ---------------------------------------------------------------------------------------------------------


@needs_gpu
def test_the_times_of_a_step_are_those_of_the_gpu_and_not_of_its_queue():
    """Kernels that wait for known times, which the host hands over in microseconds."""
    device = torch.device("cuda")
    rate = cycles_per_ms()
    timer = StepTimer(device)
    for _ in range(3):
        for name, ms in (("begin", 0), ("loaded", 5), ("ready", 20), ("reduced", 10), ("end", 0)):
            timer.mark(name) if name != "end" else timer.end_step()
            torch.cuda._sleep(int(rate * ms))
    for times in timer.take():
        assert times.passes == pytest.approx(5, rel=0.2)
        assert times.exchange == pytest.approx(20, rel=0.2)
        assert times.update == pytest.approx(10, rel=0.2)


def cycles_per_ms() -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    began.record()
    torch.cuda._sleep(50_000_000)
    ended.record()
    torch.cuda.synchronize()
    return 50_000_000 / began.elapsed_time(ended)


def test_a_trace_has_the_kernels_of_every_rank(tmp_path):
    train(MNIST, (2, 1), tmp_path / "run", *DIGITS, "--epochs", 1, "--trace", 5)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    for rank in range(3):
        mine = [one for one in events if one["ph"] == "X" and one["pid"] == rank]
        assert sum(one["name"] == "optimizer" for one in mine) == 5
        kernels = [one for one in mine if one["tid"] == 1]
        assert bool(kernels) == HAS_GPU
        steps = [one for one in mine if one["name"].startswith("step ")]
        first, last = min(one["ts"] for one in steps), max(one["ts"] + one["dur"] for one in steps)
        assert all(first - 5e3 <= one["ts"] <= last + 5e3 for one in kernels)  # on one clock


def test_the_doctor_examines_the_device():
    result = run("python", "-m", "common.doctor", "-g", 1, "--device", DEVICE, "--json", timeout=LIMIT_SECONDS)
    report = json.loads(result.output[result.output.index("{") :])
    assert result.code == 0, result.output
    assert len(report["ranks"]) == 1


# --- what may happen to a run --------------------------------------------------------------------------------------


def test_a_signal_saves_and_the_run_goes_on_to_the_same_end(subjects, references, tmp_path):
    script, flags = subjects["mnist"]
    where = ("--device", DEVICE, "--out-dir", tmp_path / "run")  # on a GPU, one rank is over NCCL
    training = start("python", script, "-g", 1, *where, *flags)
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert poll(lambda: metrics.exists() and '"train"' in metrics.read_text(), LIMIT_SECONDS)
    training.process.send_signal(signal.SIGTERM)
    assert training.result().code in (0, Interrupted.exit_code), training.result().output
    train(script, (1,), tmp_path / "run", *flags, "--resume")
    same_run(tmp_path / "run", references("mnist"))


def test_the_others_go_on_on_the_same_curve_when_a_rank_dies(tmp_path):
    flags = (*DIGITS, *EXACT, "--epochs", 20, "--lr", "1e-3")
    train(MNIST, (1,), tmp_path / "wanted", *flags, device="cpu")
    layout = ("-n", 2, "-g", "2,1", *SHARED, "--device", DEVICE)
    played = start("python", PLAY, MNIST, *layout, *flags, "--elastic", 1, "--out-dir", tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert poll(lambda: metrics.exists() and '"train"' in metrics.read_text(), LIMIT_SECONDS)
    for one in psutil.Process(played.process.pid).children(recursive=True):
        if " rank 2 of 3" in " ".join(one.cmdline()):
            one.kill()
    result = played.result(LIMIT_SECONDS)
    assert result.code == 0, result.output
    assert "lost rank 2" in result.output
    same_run(tmp_path / "run", tmp_path / "wanted")


def test_nothing_is_left_on_the_gpu_when_a_run_is_killed(tmp_path):
    layout = ("-n", 2, "-g", "2,1", *SHARED, "--device", DEVICE)
    played = start("python", PLAY, MNIST, *layout, *DIGITS, "--epochs", 500, "--out-dir", tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert poll(lambda: metrics.exists() and '"train"' in metrics.read_text(), LIMIT_SECONDS)
    processes = psutil.Process(played.process.pid).children(recursive=True)
    played.process.kill()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


def test_shares_follow_the_speed_of_ranks_on_the_gpu(tmp_path):
    layout = ("-n", 2, "-g", "1,1", *SHARED, "--device", DEVICE)
    flags = ("--dataset", "digits", "--global-batch", 700, "--epochs", 40, "--balance", "auto")
    result = run(
        "python", PLAY, "--slow", "1=0.3", MNIST, *layout, *flags, "--out-dir", tmp_path / "run", timeout=LIMIT_SECONDS
    )
    assert result.code == 0, result.output
    fast, slow = rows(tmp_path / "run", "ranks")[-1]["shares"]
    assert slow < fast


def test_compressed_gradients_train_on_the_gpu(tmp_path):
    train(MNIST, (2, 1), tmp_path / "run", *DIGITS, "--compress", "bf16", "--epochs", 4)
    assert rows(tmp_path / "run", "eval")[-1]["accuracy"] > 0.9


def test_nodes_that_train_by_themselves_meet_again_on_the_gpu(tmp_path):
    train(MNIST, (2, 1), tmp_path / "run", *DIGITS, "--sync-every", 10, "--epochs", 4)
    assert rows(tmp_path / "run", "eval")[-1]["accuracy"] > 0.9
