"""Pruned attention, whose output projection runs no hooks, and recurrent layers, which keep a list of weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from held_networks import dense, save_and_load, train
from torch import Tensor, nn

import pruning


def attention() -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(8, 2, batch_first=True)


class TestAttention:
    tokens = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))

    def pruned(self) -> nn.MultiheadAttention:
        module = attention()
        pruning.l1_unstructured(module.out_proj, "weight", 0.5)
        pruning.l1_unstructured(module.out_proj, "bias", 0.5)
        pruning.l1_unstructured(module, "in_proj_weight", 0.5)
        return module

    def run(self, module: Any) -> Tensor:
        output: Tensor = module(self.tokens, self.tokens, self.tokens)[0]
        return output

    def test_trains_right_and_stays_zero(self) -> None:
        module = self.pruned()
        train(lambda: self.run(module), module)
        assert torch.allclose(self.run(module), self.run(dense(module, attention())), atol=1e-6)
        assert not module.out_proj.weight[module.out_proj.weight_mask == 0].any()
        module.eval()
        with torch.no_grad():  # the fused path
            assert torch.allclose(self.run(module), self.run(dense(module, attention()).eval()), atol=1e-6)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, save_and_load])
    def test_copies(self, duplicate: Any) -> None:
        module = self.pruned()
        train(lambda: self.run(module), module)
        copied = duplicate(duplicate(module))
        assert torch.equal(self.run(copied), self.run(module))
        train(lambda: self.run(copied), copied)
        assert torch.allclose(self.run(copied), self.run(dense(copied, attention())), atol=1e-6)

    @pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
    def test_compile_and_export(self) -> None:
        torch.compiler.reset()
        module = self.pruned()
        expected = self.run(module)
        assert torch.allclose(self.run(torch.compile(module, backend="eager")), expected, atol=1e-6)
        program = torch.export.export(module, (self.tokens,) * 3, strict=False)
        assert torch.allclose(self.run(program.module()), expected, atol=1e-6)

    def test_prune_again_and_remove(self) -> None:
        module = self.pruned()
        kind = type(attention().out_proj)
        assert isinstance(module.out_proj, kind)
        pruning.l1_unstructured(module.out_proj, "weight", 0.5)
        assert int((module.out_proj.weight == 0).sum()) == 48
        expected = self.run(module)
        for target, name in ((module.out_proj, "weight"), (module.out_proj, "bias"), (module, "in_proj_weight")):
            pruning.remove(target, name)
        assert type(module.out_proj) is kind
        assert [name for name, _ in module.named_parameters()] == [name for name, _ in attention().named_parameters()]
        assert torch.equal(self.run(module), expected)
        train(lambda: self.run(module), module)

    @pytest.mark.parametrize("first", ["parametrized", "pruned"])
    def test_a_parametrized_output_projection(self, first: str) -> None:
        def parametrized(module: nn.Module) -> None:
            nn.utils.parametrizations.weight_norm(module, "weight")

        def pruned(module: nn.Module) -> None:
            pruning.l1_unstructured(module, "bias", 4)

        module = attention()
        with torch.no_grad():
            module.out_proj.bias.copy_(torch.arange(1.0, 9.0))
        for change in (parametrized, pruned) if first == "parametrized" else (pruned, parametrized):
            change(module.out_proj)
        copied = copy.deepcopy(module)
        train(lambda: self.run(module), module)
        assert (module.out_proj.bias != 0).tolist() == [False] * 4 + [True] * 4
        pruning.remove(module.out_proj, "bias")
        weight = module.out_proj.weight.detach().clone()
        train(lambda: self.run(module), module)
        assert not torch.equal(module.out_proj.weight, weight), "it is parametrized still"
        train(lambda: self.run(copied), copied)
        assert torch.equal(copied.out_proj.bias, copied.out_proj.bias_orig * copied.out_proj.bias_mask)
        nn.utils.parametrize.remove_parametrizations(module.out_proj, "weight")
        train(lambda: self.run(module), module)

    def test_transformer_layer_fused_path(self) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        for module, name in ((layer.self_attn.out_proj, "weight"), (layer.linear1, "weight")):
            pruning.random_unstructured(module, name, 0.5)
        expected = layer(self.tokens)
        with torch.no_grad():
            assert torch.allclose(layer.eval()(self.tokens), expected, atol=1e-5)


class TestRecurrence:
    sequence = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(1))

    def test_an_lstm_keeps_its_own_list_right(self) -> None:
        torch.manual_seed(0)
        lstm = nn.LSTM(4, 3)
        names = [name for name, _ in lstm.named_parameters()]
        pruning.l1_unstructured(lstm, "weight_hh_l0", 0.5)
        assert sum(isinstance(p, nn.Parameter) for p in lstm._flat_weights) == 3
        train(lambda: lstm(self.sequence)[0], lstm)
        reference = dense(lstm, nn.LSTM(4, 3))
        assert torch.allclose(lstm(self.sequence)[0], reference(self.sequence)[0])
        for copied in (copy.deepcopy(lstm), save_and_load(lstm)):
            assert torch.equal(copied(self.sequence)[0], lstm(self.sequence)[0])
        given = {name: p.detach().clone() for name, p in lstm.named_parameters()}
        called = torch.func.functional_call(lstm, given, (self.sequence,))[0]
        assert torch.equal(called, lstm(self.sequence)[0])
        pruning.remove(lstm, "weight_hh_l0")
        assert sum(isinstance(p, nn.Parameter) for p in lstm._flat_weights) == 4
        assert [name for name, _ in lstm.named_parameters()] == names
        assert torch.allclose(lstm(self.sequence)[0], reference(self.sequence)[0])

    def test_to_another_dtype(self) -> None:
        lstm = nn.LSTM(4, 3)
        pruning.random_unstructured(lstm, "weight_ih_l0", 0.5)
        assert lstm.double()(self.sequence.double())[0].dtype == torch.float64
