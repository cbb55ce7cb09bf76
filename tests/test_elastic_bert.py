"""--elastic in pretraining and fine-tuning: a rank that dies changes no loss, no score and no weight."""

import json

import pytest

from tests.harness import BERT, FINETUNE, ROOT, largest_difference, losses, play, rows, weights
from tests.small_bert import save_model, save_ner
from tests.test_bert_exactness import flags_of, text  # noqa: F401 (a fixture)

ELASTIC = ("--elastic", 1, "--timeout", 20)


def dying(folder, entry, module, step, rank):
    """A copy of a trainer, in which a rank ends in its backward, once. Returns the script."""
    folder.mkdir()
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    place = "                        precision.backward("
    assert source.count(place) == 1
    indent = place[: -len(place.lstrip())]
    dies = f"{indent}if step == {step} and worker.rank == {rank} and not worker.membership:\n"
    dies += f"{indent}    __import__('os').kill(__import__('os').getpid(), 9)\n"
    (folder / "train.py").write_text(source.replace(place, dies + place))
    script = folder / entry.name
    script.write_text(entry.read_text().replace(f"{module}:train", f"{folder.name}.train:train"))
    return script


@pytest.mark.parametrize("rank", [0, 2])
def test_pretraining_goes_on_with_batches_of_processes(rank, text, tmp_path):  # noqa: F811
    flags = flags_of(text, "mlm+nsp", "--precision", "fp64", "--epochs", 2, "--data-workers", 1)
    play(BERT, (1,), tmp_path / "alone", *flags)
    script = dying(tmp_path / "dying_bert", BERT, "bert_ddp.pretrain.train", 7, rank)
    play(script, (2, 1), tmp_path / "run", *flags, *ELASTIC)
    assert rows(tmp_path / "run", "members"), "nobody was lost"
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-9)
    assert largest_difference(weights(tmp_path / "run"), weights(tmp_path / "alone")) < 1e-9


@pytest.mark.parametrize("rank", [0, 2])
def test_fine_tuning_ends_with_the_same_best_weights_and_report(rank, tmp_path):
    data = ("--task", "ner", "--model", save_model(tmp_path / "model"), "--data", save_ner(tmp_path / "ner"))
    flags = (*data, "--global-batch", 16, "--lr", 3e-3, "--epochs", 2, "--precision", "fp64", "--dropout", 0)
    play(FINETUNE, (1,), tmp_path / "alone", *flags)
    script = dying(tmp_path / "dying_finetune", FINETUNE, "bert_ddp.finetune.train", 7, rank)
    play(script, (2, 1), tmp_path / "run", *flags, *ELASTIC)
    assert rows(tmp_path / "run", "members"), "nobody was lost"
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-9)
    assert largest_difference(weights(tmp_path / "run"), weights(tmp_path / "alone")) < 1e-9
    found, wanted = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("run", "alone"))
    for role in ("dev", "test"):
        assert found[role].pop("loss") == pytest.approx(wanted[role].pop("loss"), rel=1e-9)
    assert found == wanted
