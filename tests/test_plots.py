"""curves.png: all that is measured has a panel, and no text of "Time by rank" covers anything else."""

import random
from itertools import combinations, pairwise

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from common.record.plots import draw_curves, thinned
from tests.harness import MNIST, nodes_of, playing


def more(*values):
    """Further values of a parameter, for the long level."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def train(*steps):
    return [{"kind": "train", "step": step, "loss": 2.3 / step} for step in steps]


def ranks(number, **change):
    """A row of `number` ranks, of which some compute for longer."""
    rng = random.Random(number)
    times = {f"{name}_ms": [rng.uniform(1, most) for _ in range(number)] for name, most in TIMES.items()}
    return {"kind": "ranks", "step": 1, "shares": [100_000 // number] * number, **times, **change}


TIMES = {"loading": 2, "compute": 30, "communication": 3, "wait": 20}


def panels(rows):
    """The axes of a drawing by title, and its renderer."""
    figure = draw_curves(rows)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return {axes.get_title(): axes for axes in figure.axes}, canvas.get_renderer()


@pytest.mark.parametrize("number", [1, 4, 7, 48, *more(2, 6, 10, 40)])
def test_the_figures_above_the_bars_stay_within_the_frame_and_cover_neither_bars_nor_one_another(number):
    found, renderer = panels([*train(1, 2), ranks(number)])
    axes = found["Time by rank"]
    frame, legend = axes.get_window_extent(renderer), axes.get_legend().get_window_extent(renderer)
    texts = [text.get_window_extent(renderer) for text in axes.texts]
    bars = [bar.get_window_extent(renderer) for bar in axes.patches]
    assert len(texts) == number and len(bars) == number * len(TIMES)
    for text in texts:
        assert frame.x0 <= text.x0 and text.x1 <= frame.x1
        assert frame.y0 <= text.y0 and text.y1 <= frame.y1
    assert not any(one.overlaps(other) for one, other in combinations(texts, 2))
    assert not any(text.overlaps(bar) for text in texts for bar in bars if bar.height > 0)
    assert not any(legend.overlaps(other) for other in [*texts, *bars])


@pytest.mark.parametrize("number", [1, 10, *more(40, 300)])
def test_the_panels_and_their_labels_do_not_touch_one_another_and_stay_in_the_picture(number):
    evals = [{"kind": "eval", "step": step, "loss": 2, "accuracy": 0.5, "perplexity": 900 / step} for step in (1, 2)]
    found, renderer = panels([*train(1, 2), *evals, ranks(number)])
    boxes = [axes.get_tightbbox(renderer) for axes in found.values()]
    assert len(boxes) == 4
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    picture = next(iter(found.values())).figure.bbox
    assert all(picture.x0 <= box.x0 and box.x1 <= picture.x1 and box.y1 <= picture.y1 for box in boxes)
    ticks = [tick.get_window_extent(renderer) for tick in found["Time by rank"].get_xticklabels()]
    assert not any(one.overlaps(other) for one, other in combinations(ticks, 2))


def drawn(axes):
    """The curves of a panel: name -> values."""
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines}


def test_measures_outside_0_to_1_have_a_panel_of_their_own():
    evals = [{"kind": "eval", "step": step, "count": 9, "accuracy": 0.5, "perplexity": 90 / step} for step in (1, 2)]
    found, _ = panels([*train(1, 2), *evals])
    assert drawn(found["Held out"]) == {"accuracy": [0.5, 0.5]}
    assert drawn(found["Held out, other scales"]) == {"perplexity": [90, 45]}


def test_a_language_model_without_a_measure_between_0_and_1_has_no_empty_panel():
    evals = [{"kind": "eval", "step": step, "loss": 4.5, "perplexity": 90 / step} for step in (1, 2)]
    found, _ = panels([*train(1, 2), *evals, ranks(2)])
    assert list(found) == ["Loss", "Held out, other scales", "Time by rank"]


def test_a_measure_that_some_evaluations_lack_or_could_not_compute_is_drawn_where_it_is_known():
    evals = [{"kind": "eval", "step": 1}, {"kind": "eval", "step": 2, "f1": None}, {"kind": "eval", "step": 3, "f1": 1}]
    found, _ = panels([*train(1, 2), *evals])
    assert drawn(found["Held out"]) == {"f1": [1]}


def test_rows_of_an_earlier_version_without_loading_are_drawn():
    row = ranks(2)
    del row["loading_ms"]
    found, _ = panels([*train(1, 2), row, ranks(2)])
    assert len(found["Time by rank"].patches) == 2 * len(TIMES)


def test_of_very_many_steps_an_even_part_is_drawn_and_every_evaluation():
    rows = [{"kind": kind, "step": step} for step in range(1, 1001) for kind in ("train", "eval")]
    found = thinned(rows, most=100)
    steps = [row["step"] for row in found if row["kind"] == "train"]
    assert 50 <= len(steps) <= 101 and steps[0] == 1 and steps[-1] == 1000
    assert len({later - earlier for earlier, later in pairwise(steps[:-1])}) == 1
    assert sum(row["kind"] == "eval" for row in found) == 1000


def test_a_run_on_uneven_ranks_leaves_a_picture(tmp_path):
    nodes = nodes_of((3, 1), tmp_path, "--dataset", "digits", "--max-steps", 3, "--shares", "0,2,1,1")
    for node in nodes:
        node.flags.remove("--no-plot")
    assert [result.code for result in playing(MNIST, nodes, tmp_path).results()] == [0, 0]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_shares_that_change_have_panels_of_their_own():
    rows = [*train(1, 2), ranks(3, shares=[40, 40, 40]), ranks(3, shares=[50, 50, 20])]
    found, _ = panels(rows)
    assert "Shares" not in panels([*train(1, 2), ranks(2), ranks(3), ranks(3)])[0]  # resumed on another layout
    lines = [list(line.get_ydata()) for line in found["Shares"].lines]
    assert lines == [[40, 50], [40, 50], [40, 20]]
    assert len(found["Compute (lines) and wait (dots)"].lines) == 6
