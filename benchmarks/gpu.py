"""BERT pretraining on one GPU, ours and transformers.Trainer's: tokens/s, FLOP utilisation, peak memory.

    gpu.py [--tiny] [--preset base|large] [--only ours|peer] [--lengths 128,512] [--seconds 30]

Rows are random words, because speed does not depend on them. Utilisation is the model's FLOPs a second, as they are
counted for a model that computes every position (PaLM, appendix B), over what this card reaches in a large bf16
matrix product, measured first. What the forward pass here leaves out counts as not computed (`done` below).
"""

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from bert_ddp.model.optimizer import decay_groups
from bert_ddp.pretrain import model as bert
from bert_ddp.pretrain.rows import MaskedRows, Masking
from common.uneven.batches import move
from common.uneven.loading import part_loader

WORDS = 30_522
ROWS = {128: 256, 512: 64}  # a step
SPECIAL = {"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103}


class RandomRows:
    """A table of random words in memory, read as a `datasets.Dataset` in numpy format is."""

    def __init__(self, rows: int, length: int):
        random = np.random.default_rng(0)
        ids = random.integers(1000, WORDS, (rows, length))
        ids[:, 0], ids[:, -1] = SPECIAL["cls"], SPECIAL["sep"]
        full = np.full(rows, length)
        self.columns = {"input_ids": ids, "length": full, "second": full, "maskable": full - 2, "next_label": 0 * full}

    def __getitem__(self, which):
        return (
            self.columns[which]
            if isinstance(which, str)
            else {name: part[which] for name, part in self.columns.items()}
        )


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matrix_rate(device: torch.device, size: int) -> float:
    """FLOP/s of a product of two size x size matrices, in bf16 on a GPU and fp32 on a CPU: the best of some runs."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        wait(device)
        began = time.perf_counter()
        for _ in range(10):
            a @ b
        wait(device)
        best = min(best, (time.perf_counter() - began) / 10)
    return 2 * size**3 / best


def build(preset: str, length: int):
    args = SimpleNamespace(objective="mlm", init_from=None, config_file=None, dropout=None, preset=preset)
    args.checkpoint_activations = False
    return bert.build(args, {"vocab_size": WORDS, "sequence_length": length, "special": SPECIAL})


def flops_a_row(config, length: int, masked: float) -> tuple[float, float]:
    """(FLOPs of a model that computes the head at masked tokens only, FLOPs of what is done here): forward and
    backward, 6 for each weight and token and 12 x layers x width x length for each token's attention."""
    width, layers = config.hidden_size, config.num_hidden_layers
    layer = 4 * width**2 + 2 * width * config.intermediate_size
    head = masked * length * (width * config.vocab_size + width**2)
    full = length * layers * (6 * layer + 12 * width * length) + 6 * head
    keys_and_values = 2 * width**2
    last = length * 6 * keys_and_values + masked * length * (6 * (layer - keys_and_values) + 12 * width * length)
    return full, length * (layers - 1) * (6 * layer + 12 * width * length) + last + 6 * head


def ours(device: torch.device, preset: str, length: int, rows: int, seconds: float, compiled: bool) -> float:
    """Tokens per second of the trainer's own step, data and masks included."""
    torch.manual_seed(0)
    net = build(preset, length).to(device)
    optimizer = torch.optim.AdamW(decay_groups(net, 0.01), 1e-4, fused=True)
    meta = {"sequence_length": length, "vocab_size": WORDS, "special": SPECIAL, "stored_masks": False}
    data = MaskedRows(RandomRows(8 * rows, length), meta, Masking(0.15, False, 0), padded=False)
    indices = [list(range(start, start + rows)) for start in range(0, len(data), rows)]
    loader = part_loader(
        data,
        indices * 10_000,  # the sampler: it gives the rows of each step
        num_workers=0 if device.type == "cpu" else 4,
        pin_memory=device.type == "cuda",
    )
    model = torch.compile(net) if compiled else net
    times, began = [], time.perf_counter()
    for part in loader:
        part = move(part, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits, _ = model(**part.inputs)
            loss = cross_entropy(logits, part.labels.flatten(), reduction="sum")
        (loss / (data.most * rows)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wait(device)
        times.append(time.perf_counter())
        if len(times) == 6:  # warm: compiled, allocated, tuned
            began = times[-1]
        if len(times) > 10 and times[-1] - began > seconds:
            break
    steps = [after - before for before, after in itertools.pairwise(times[5:])]
    return rows * length / statistics.median(steps)


def peer(device: torch.device, preset: str, length: int, rows: int, seconds: float, compiled: bool) -> float:
    """Tokens per second of transformers.Trainer, its collator and the options its docs advise, in bf16 on a GPU."""
    from transformers import BertConfig, BertForMaskedLM

    from benchmarks.trainer_clock import tokens_per_second
    from bert_ddp.text.vocabulary import SPECIAL as NAMES
    from bert_ddp.text.vocabulary import from_words

    words = [f"word{number}" for number in range(WORDS)]
    for name, number in zip(NAMES, SPECIAL.values(), strict=True):
        words[number] = name
    table = RandomRows(8 * rows, length).columns["input_ids"].tolist()
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**build(preset, length).config.to_dict()))
    steps = 14 if preset == "tiny" else 60
    options = {
        "bf16": device.type == "cuda",
        "torch_compile": compiled,
        "dataloader_num_workers": 0 if device.type == "cpu" else 4,
    }
    options |= {"use_cpu": True} if device.type == "cpu" else {}
    data = [{"input_ids": row} for row in table]
    return tokens_per_second(model, data, from_words(words, True), steps, rows, lambda: wait(device), **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU, to see that it runs")
    parser.add_argument("--preset", choices=("base", "large"), default="base")
    parser.add_argument("--only", choices=("ours", "peer"))
    parser.add_argument("--lengths", help="tokens of a row, with commas between them; 128,512 unless --tiny")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of our measurements")
    args = parser.parse_args()
    device, preset = (torch.device("cpu"), "tiny") if args.tiny else (torch.device("cuda"), args.preset)
    if not args.tiny and not torch.cuda.is_available():
        sys.exit("gpu.py: error: torch sees no CUDA GPU here: use a machine with one, or --tiny to see that it runs")
    torch.set_float32_matmul_precision("high")
    peak = matrix_rate(device, 256 if args.tiny else 8192)
    name = "CPU" if args.tiny else torch.cuda.get_device_name(device)
    print(f"{name}, torch {torch.__version__}, BERT-{preset}: {peak / 1e12:.3g} TFLOP/s in matrix products", flush=True)
    print(
        "| length | rows | program | tokens/s | utilisation | of what is done | peak GiB |\n| --- " + "| --- " * 6 + "|"
    )
    programs = {"ours, compiled": (ours, True), "ours": (ours, False), "Trainer": (peer, False)}
    programs |= {} if args.tiny else {"Trainer, compiled": (peer, True)}
    failed = False
    for length in map(int, (args.lengths or ("32,64" if args.tiny else "128,512")).split(",")):
        rows = 4 if args.tiny else ROWS.get(length, max(1, 32_768 // length))
        full, done = flops_a_row(build(preset, length).config, length, 0.15)
        for title, (program, compiled) in programs.items():
            if (args.only and args.only != program.__name__) or (args.tiny and compiled):
                continue
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                rate = program(device, preset, length, rows, 1.0 if args.tiny else args.seconds, compiled)
            except Exception as error:  # report it, and keep the numbers of the other programs
                print(f"| {length} | {rows} | {title} | failed: {str(error).splitlines()[0][:90]} | | | |", flush=True)
                failed = True
                continue
            memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
            did = done if program is ours else full
            shares = f"{rate / length * full / peak:.1%} | {rate / length * did / peak:.1%}"
            print(f"| {length} | {rows} | {title} | {rate:,.0f} | {shares} | {memory:.1f} |", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
