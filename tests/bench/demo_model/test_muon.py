"""Muon's steps have about the same size in every direction, and they lead to a minimum."""

from __future__ import annotations

import pytest
import torch

from bench.demo_model.muon import Muon, orthogonalized


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_singular_values_become_about_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape) * torch.logspace(0, 1, shape[1])
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonalized(matrix)
    turned = left.T @ result @ right.T
    assert values.max() > 5 * values.min()
    assert (turned.diag() - 1).abs().max() < 0.5
    torch.testing.assert_close(turned, turned.diag().diag(), atol=1e-4, rtol=0)


def test_it_finds_the_matrix_of_a_linear_map() -> None:
    torch.manual_seed(0)
    wanted, inputs = torch.randn(6, 4), torch.randn(64, 4)
    matrix = torch.zeros(6, 4, requires_grad=True)
    optimizer = Muon([matrix], rate=0.1)
    for step in range(400):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 400) ** 2
        ((inputs @ (matrix - wanted).T) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(matrix.detach(), wanted, atol=0.05, rtol=0)


def test_momentum_keeps_a_matrix_moving_when_the_gradient_is_gone() -> None:
    matrix = torch.zeros(2, 2, requires_grad=True)
    optimizer = Muon([matrix], rate=1.0)
    matrix.grad = torch.eye(2)
    optimizer.step()
    first = matrix.detach().clone()
    matrix.grad = torch.zeros(2, 2)
    optimizer.step()
    moved = matrix.detach() - first
    assert first.diag().max() < 0
    torch.testing.assert_close(moved, first, atol=0.3, rtol=0.3)
