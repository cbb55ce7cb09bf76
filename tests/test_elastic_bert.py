"""--elastic in pretraining and fine-tuning: a rank that dies changes no loss, no score and no weight."""

import json

import pytest

from tests.harness import BERT, FINETUNE, largest_difference, losses, play, rows, weights
from tests.small_bert import save_model, save_ner
from tests.test_bert_exactness import flags_of, text  # noqa: F401 (a fixture)
from tests.test_elastic import BEGIN, COMES_LATE, DIE, ELASTIC, does
from tests.trainers import altered, until_all_are_there

DIES, RETURN = 7, 9  # the steps after which a rank dies, and from which on the others wait until all are there again
LAST = 12  # at the least


def dying(folder, script, rank):
    """A copy of a trainer, in which a rank ends in its backward, once. Returns its script."""
    dies = does("backward", f"run.step == {DIES} and worker.rank == {rank} and not worker.membership", DIE)
    return altered(folder, {**dies, BEGIN: COMES_LATE + BEGIN, **until_all_are_there(3, RETURN)}, script)


def require_same(folder, alone, rank):
    causes = [row["cause"] for row in rows(folder, "members")]
    assert any(f"lost rank {rank}, node {0 if rank < 2 else 1}" in cause for cause in causes), causes
    assert len(losses(folder)) >= LAST
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-9)
    assert largest_difference(weights(folder), weights(alone)) < 1e-9


@pytest.mark.long
@pytest.mark.parametrize("rank, workers", [(2, 0), (0, 1), (2, 1)])
def test_pretraining_goes_on_also_with_batches_of_processes(rank, workers, text, tmp_path):  # noqa: F811
    flags = flags_of(text, "mlm+nsp", "--precision", "fp64", "--epochs", 2)
    play(BERT, (1,), tmp_path / "alone", *flags)
    script = dying(tmp_path / "dying_bert", BERT, rank)
    play(script, (2, 1), tmp_path / "run", *flags, "--data-workers", workers, *ELASTIC)
    require_same(tmp_path / "run", tmp_path / "alone", rank)


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.long)])
def test_fine_tuning_ends_with_the_same_best_weights_and_report(rank, tmp_path):
    data = ("--task", "ner", "--model", save_model(tmp_path / "model"), "--data", save_ner(tmp_path / "ner"))
    flags = (*data, "--global-batch", 16, "--lr", 3e-3, "--epochs", 3, "--precision", "fp64", "--dropout", 0)
    play(FINETUNE, (1,), tmp_path / "alone", *flags)
    script = dying(tmp_path / "dying_finetune", FINETUNE, rank)
    play(script, (2, 1), tmp_path / "run", *flags, *ELASTIC)
    require_same(tmp_path / "run", tmp_path / "alone", rank)
    found, wanted = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("run", "alone"))
    for role in ("dev", "test"):
        assert found[role].pop("loss") == pytest.approx(wanted[role].pop("loss"), rel=1e-9)
    assert found == wanted
