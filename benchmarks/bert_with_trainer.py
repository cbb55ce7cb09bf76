#!/usr/bin/env python3
"""The peer of benchmarks/bert.py: `transformers.Trainer` on the token rows of a cache of ours.

bert_with_trainer.py CACHE_FOLDER CONFIG_JSON STEPS ROWS_A_STEP     prints its tokens per second
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import datasets
import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from benchmarks.trainer_clock import tokens_per_second

folder, config = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
steps, batch = int(sys.argv[3]), int(sys.argv[4])
rows = datasets.Dataset.from_file(str(folder / "train.arrow")).select_columns(["input_ids"])
torch.manual_seed(0)
model = BertForMaskedLM(BertConfig(**config))
tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
print("tokens/s", tokens_per_second(model, rows, tokenizer, steps, batch, use_cpu=True))
