"""The step of every trainer is the same lines: what differs is the data, the model and the loss."""

import symtable

import pytest

from tests.harness import BERT, FINETUNE, MNIST, ROOT

TRAINERS = {
    "mnist": MNIST.parent / "train.py",
    "pretrain": BERT.parent / "pretrain" / "train.py",
    "finetune": FINETUNE.parent / "finetune" / "train.py",
    "chapter": ROOT / "docs" / "your-own-task.md",
}
STEP = """
            batch = next(batches)
            for micro, is_last in batch.micro_batches():
                with model.no_sync(enabled=not is_last):
                    with run.autocast():
                        LOSS = compute_loss(model, micro ...)
                    run.backward(loss_sum / batch.global_count)
            run.optimizer_step(optimizer, clip_norm=args.clip_norm)
            scheduler.step()
            optimizer.zero_grad()
            run.end_step()
"""


def code(path) -> list[str]:
    """The lines without comments and blank lines."""
    lines = [line.partition("  # ")[0].rstrip() for line in path.read_text().splitlines()]
    return [line for line in lines if line.strip()]


@pytest.mark.parametrize("name", TRAINERS)
def test_the_step_is_the_same_ten_lines(name):
    lines, step = code(TRAINERS[name]), STEP.strip("\n").splitlines()
    first = lines.index(step[0])
    found = lines[first : first + len(step)]
    assert "= compute_loss(model, micro" in found[4] and found[4].strip().startswith("loss_sum")
    assert found[:4] + found[5:] == step[:4] + step[5:]


@pytest.mark.parametrize("name, most_lines", [("mnist", 100), ("pretrain", 140), ("finetune", 180)])
def test_a_trainer_fits_on_a_few_screens_and_into_one_head(name, most_lines):
    text = TRAINERS[name].read_text()
    functions = [one for one in symtable.symtable(text, name, "exec").get_children() if one.get_type() == "function"]
    train = next(one for one in functions if one.get_name() == "train")
    assert len(text.splitlines()) <= most_lines
    assert len(train.get_locals()) <= 20, train.get_locals()
    assert sum(line.startswith("from common") for line in text.splitlines()) <= 6
    inner = [inner.get_name() for one in functions for inner in one.get_children()]
    assert all(name in ("genexpr", "listcomp", "dictcomp", "lambda", "__annotate__") for name in inner), inner


def test_the_entries_end_in_the_same_call():
    for entry, module in ((MNIST, "mnist_ddp.train"), (BERT, "bert_ddp.pretrain.train")):
        assert code(entry)[-4:] == [
            "def main() -> None:",
            f'    start.main(flags(), "{module}:train", cli.check_training)',
            'if __name__ == "__main__":',
            "    main()",
        ]
