"""What a new namespace begins with."""

import numpy as np
import pytest

from redraft.retrieval import evidence as ev
from redraft.retrieval import model


def test_it_begins_with_what_was_learned_and_with_formulas_elsewhere():
    start, formula = model.new_model(), model.formula_model()
    changed = np.flatnonzero((start.cells != formula.cells).any(axis=1))
    assert 1000 < len(changed) and changed[0] > 0 and changed[-1] < ev.TRACK_RECORD_CELLS
    assert np.isfinite(start.cells).all() and np.isfinite(start.weights).all()
    rates = start.cells[changed, model.RATE]
    assert ((rates >= 0) & (rates <= 1)).all() and start.cells[changed, model.TRIALS].max() <= 20
    np.testing.assert_allclose(
        start.cells[1:, model.STRENGTH], model._logit(start.cells[1:, model.RATE].astype(float)), rtol=1e-3, atol=1e-3
    )
    assert not start.weights[ev.N_SETS :].any()  # nothing of situations and of particular tokens


def test_namespaces_do_not_share_their_tables():
    one, other = model.new_model(), model.new_model()
    one.cells[5], one.weights[0] = 7, 7
    assert not (other.cells[5] == 7).any() and not (other.weights[0] == 7).any()
    assert (model.new_model().cells == other.cells).all()


def test_values_of_another_layout_are_refused(monkeypatch):
    monkeypatch.setattr(ev, "TRACK_RECORD_CELLS", ev.TRACK_RECORD_CELLS + 1)
    with pytest.raises(ValueError, match=r"benchmarks/start_values\.py"):
        model._start.__wrapped__()
