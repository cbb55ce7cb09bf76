"""`transformers.Trainer` as the peer: the same rows and the same model, timed step by step."""

import contextlib
import io
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable

from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

WARM_UP_STEPS = 3


class Clock(TrainerCallback):
    """Notes when each step ends; `wait` lets the device finish first."""

    def __init__(self, wait: Callable[[], None] = lambda: None):
        self.wait, self.ends = wait, []

    def on_step_end(self, args, state, control, **others):
        self.wait()
        self.ends.append(time.perf_counter())


def tokens_per_second(
    model, rows, tokenizer, steps: int, batch: int, wait: Callable[[], None] = lambda: None, **options
):
    """Median rate over all steps but the first few; `options` are TrainingArguments."""
    clock = Clock(wait)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=1e-4,
            weight_decay=0.01,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            **options,
        )
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator, callbacks=[clock])
        with contextlib.redirect_stdout(io.StringIO()):  # its own summary
            trainer.train()
    ends = clock.ends[WARM_UP_STEPS:]
    length = len(rows[0]["input_ids"])
    return batch * length / statistics.median(end - begin for begin, end in itertools.pairwise(ends))
