import importlib.util

import pytest
import torch
from ase.build import bulk

from nvalchemi.models import DemoModelWrapper, LennardJonesModelWrapper, available_models, load_model


def test_rows_say_what_is_usable(monkeypatch):
    rows = {row.name: row for row in available_models()}
    assert {"7net-0", "chgnet", "lj-argon"} <= rows.keys()
    assert rows["lj-argon"].usable
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    row = next(row for row in available_models() if row.name == "7net-0")
    assert (row.usable, row.extra, row.reason) == (False, "sevennet", "pip install 'nvalchemi[sevennet]'")


def test_argon_by_name(make_batch):
    model = load_model("lj-argon", device="cpu", dtype=torch.float64)
    assert isinstance(model, LennardJonesModelWrapper)
    energy = model(make_batch([bulk("Ar", a=5.26)], model))["energy"]
    assert energy.item() == pytest.approx(-0.0842277845, abs=1e-10)


@pytest.mark.parametrize(("name", "precision"), [("7net-0", torch.float64), ("chgnet", torch.float32)])
def test_published_models_by_name(name, precision):
    pytest.importorskip({"7net-0": "sevenn", "chgnet": "chgnet"}[name])
    model = load_model(name.upper(), dtype=precision)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} == {
        precision
    }


def test_unknown_name_lists_the_known_ones_and_a_guess():
    with pytest.raises(
        ValueError, match=r"unknown model '7net0', did you mean '7net-0'\? Known are 7net-0, .*lj-argon"
    ):
        load_model("7net0")
    with pytest.raises(ValueError, match=r"unknown model 'zzz'\. Known are"):
        load_model("zzz")


def test_exported_model_reads_back(tmp_path, make_batch, crystals):
    model = DemoModelWrapper().eval()
    model.export_model(tmp_path / "demo.pt")
    batch = make_batch(crystals)
    copy = load_model(tmp_path / "demo.pt", dtype=torch.float64)
    torch.testing.assert_close(copy(batch), model.double()(batch), rtol=0, atol=0)


def test_file_that_holds_no_model(tmp_path):
    torch.save({"a": 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other.pt holds a dict, not a model"):
        load_model(tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("no model")
    with pytest.raises(ValueError, match=r"text.pt cannot be read as a model file"):
        load_model(tmp_path / "text.pt")
