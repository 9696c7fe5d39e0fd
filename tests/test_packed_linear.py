"""Packed linear layers give the layers' own results, follow changed weights, and leave everything as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from redraft.decoding import packed_linear
from redraft.decoding.packed_linear import packed_linears

torch.set_num_threads(1)

if not packed_linear._supported(torch.float32):
    pytest.skip("weights are packed on x86-64 Linux only", allow_module_level=True)


def make(dtype=torch.float32, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 80, bias=bias), nn.ReLU(), nn.Linear(80, 33)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 3), (1, 17), (40,)], ids=str)
def test_results_are_the_layers_own(dtype, bias, shape):
    model = make(dtype, bias)
    x = torch.randn(*shape, 48).to(dtype)
    with torch.inference_mode():
        expected = model(x)
        with packed_linears(model):
            found = model(x)
    assert found.shape == expected.shape and found.dtype == dtype
    error = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=error, atol=error)


def test_layers_are_really_replaced_and_put_back():
    model = make()
    assert not any("forward" in layer.__dict__ for layer in model)
    with packed_linears(model), packed_linears(model):
        replaced = model[0].forward
        with packed_linears(model):
            assert model[0].forward is replaced
        assert model[0].forward is replaced
    assert not any("forward" in layer.__dict__ for layer in model)
    with pytest.raises(KeyError), packed_linears(model):
        raise KeyError
    assert not any("forward" in layer.__dict__ for layer in model)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.mul_(2),
        lambda layer: layer.weight.data.mul_(2),
        lambda layer: setattr(layer.weight, "data", 2 * layer.weight.data),
        lambda layer: setattr(layer, "weight", nn.Parameter(2 * layer.weight)),
    ],
    ids=["in place", "data in place", "new data", "new parameter"],
)
def test_changed_weights_are_packed_again(change):
    model = make()
    x = torch.randn(3, 48)
    with torch.no_grad():
        with packed_linears(model):
            before = model(x)
        change(model[2])
        expected = model(x)
        with packed_linears(model):
            found = model(x)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, before)


def test_what_is_not_a_plain_layer_stays_as_it_is(monkeypatch):
    class Own(nn.Linear):
        pass

    wrapped = nn.Linear(4, 4)
    wrapped.forward = lambda x: x
    model = nn.Sequential(Own(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4, device="meta"), wrapped)
    forward = wrapped.forward
    with packed_linears(model):
        assert [("forward" in layer.__dict__) for layer in model] == [False, False, False, True]
        assert wrapped.forward is forward
    assert wrapped.forward is forward


def test_no_copy_is_made_where_memory_is_short(monkeypatch):
    model = make()
    monkeypatch.setattr(packed_linear, "_available_memory", lambda: sum(p.nbytes for p in model.parameters()))
    with packed_linears(model):
        assert not any("forward" in layer.__dict__ for layer in model)
    monkeypatch.undo()
    assert packed_linear._available_memory() > 1 << 20
    with packed_linears(model):
        assert "forward" in model[0].__dict__
