#!/usr/bin/env python3
"""The peer of benchmarks/finetune.py: transformers.Trainer on the same entities, as its own example sets it up.

    trainer_ner.py --model FOLDER --data FOLDER --epochs 3 --lr 5e-5 --batch 32 --seed 0 --out-dir DIR

The same seed gives it the first head and the batches of bert-finetune.py, so that only dropout's draws differ:
another head or order changes F1 by more than the two programs differ. Prints one line of JSON: seconds of
training (without evaluations and checkpoints), and test and dev F1 of the best weights. `--max-steps` ends earlier.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from bert_ddp.finetune.examples import Sentence, label_names
from bert_ddp.finetune.rows import IGNORE
from bert_ddp.finetune.scores import score_entities
from bert_ddp.finetune.sources import DataOptions, find_sources, read_sentences
from common.uneven.plan import plan_batches
from common.uneven.sampling import UnevenDistributedSampler
from common.uneven.seeding import derive_seed


class Examples(torch.utils.data.Dataset):
    """Tokenized sentences, the label on the first piece of each word."""

    def __init__(self, sentences: list[Sentence], names: list[str], tokenizer):
        self.rows = []
        for sentence in sentences:
            row = tokenizer(sentence.words, is_split_into_words=True, truncation=True, max_length=128)
            words = row.word_ids()
            first = [word is not None and word != before for before, word in zip([None, *words], words, strict=False)]
            row["labels"] = [
                names.index(sentence.tags[word]) if begins else IGNORE
                for word, begins in zip(words, first, strict=True)
            ]
            self.rows.append(dict(row))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.rows[index]


class InOrder(torch.utils.data.Sampler):
    """The rows in the order of bert-finetune.py, another one each epoch."""

    def __init__(self, rows: int, batch: int, seed: int):
        self.batches = UnevenDistributedSampler(plan_batches(rows, batch, 1), rank=0, seed=seed)
        self.rows, self.epoch = rows, 0

    def __iter__(self) -> Iterator[int]:
        self.batches.set_epoch(self.epoch)
        self.epoch += 1
        for batch in self.batches:
            yield from batch

    def __len__(self) -> int:
        return self.rows


class TrainerInOrder(Trainer):
    def _get_train_sampler(self, dataset: Examples | None = None) -> InOrder:
        return InOrder(len(self.train_dataset), self.args.per_device_train_batch_size, self.args.seed)


class TrainingClock(TrainerCallback):
    """Seconds inside optimizer steps and between them, apart from evaluations and checkpoints."""

    def __init__(self):
        self.seconds, self.began = 0.0, None

    def on_step_begin(self, *_, **__):
        self.began = self.began or time.perf_counter()

    def on_step_end(self, *_, **__):
        now = time.perf_counter()
        self.seconds, self.began = self.seconds + now - self.began, now

    def on_epoch_end(self, *_, **__):  # evaluation and checkpoint follow
        self.began = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in (("model", str), ("data", str), ("epochs", int), ("lr", float), ("batch", int), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--out-dir", required=True)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--dropout", type=float, help="instead of the model's own")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    sources = find_sources(DataOptions("ner", args.data))
    sentences = {role: read_sentences(source, role) for role, source in sources.items()}
    names = label_names(sentences["train"])
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    sets = {role: Examples(some, names, tokenizer) for role, some in sentences.items()}
    torch.manual_seed(derive_seed(args.seed, "weights"))
    settings = {"num_labels": len(names), "id2label": dict(enumerate(names))}
    if args.dropout is not None:
        settings |= {"hidden_dropout_prob": args.dropout, "attention_probs_dropout_prob": args.dropout}
    model = AutoModelForTokenClassification.from_pretrained(args.model, dtype=torch.float32, **settings)

    def metrics(prediction) -> dict[str, float]:
        answers = prediction.predictions.argmax(-1)
        pairs = [
            [(names[label], names[answer]) for label, answer in zip(*row, strict=True) if label != IGNORE]
            for row in zip(prediction.label_ids, answers, strict=True)
        ]
        gold, found = ([[pair[side] for pair in row] for row in pairs] for side in (0, 1))
        return {"f1": score_entities(gold, found).numbers["f1"]}

    steps = args.epochs * math.ceil(len(sets["train"]) / args.batch)  # `max_steps` alone would go beyond the epochs
    clock = TrainingClock()
    settings = TrainingArguments(
        output_dir=args.out_dir,
        max_steps=min(args.max_steps or steps, steps),
        learning_rate=args.lr,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=64,
        weight_decay=0.01,
        lr_scheduler_type="linear",
        warmup_steps=0.1,
        max_grad_norm=1.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="f1",
        logging_steps=50,
        report_to="none",
        seed=args.seed,
        bf16=args.precision == "bf16",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = TrainerInOrder(
        model,
        settings,
        train_dataset=sets["train"],
        eval_dataset=sets["dev"],
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=metrics,
        callbacks=[clock],
    )
    trainer.train()
    test = trainer.predict(sets["test"]).metrics["test_f1"]
    dev = trainer.evaluate()["eval_f1"]
    print(json.dumps({"training_seconds": clock.seconds, "test_f1": test, "dev_f1": dev}))


if __name__ == "__main__":
    main()
