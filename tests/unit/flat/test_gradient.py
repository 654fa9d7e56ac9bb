"""Sums of sparse gradients, parts of gradients, and segments of a flat tensor."""

import torch

import dgcopt
from dgcopt.compressors.sparse.memory import ErrorFeedback
from dgcopt.flat.buckets import Segment
from dgcopt.flat.gradient import LocalGradient
from dgcopt.kernels import Parts


def test_a_sparse_sum_adds_in_order_and_knows_its_positions() -> None:
    total = dgcopt.SparseSum()
    total.add(torch.tensor([1, 3]), torch.tensor([1.0, 2.0]))
    total.add(torch.tensor([3]), torch.tensor([5.0]))
    assert total.add_to(torch.zeros(5)).tolist() == [0, 1, 0, 7, 0]


def test_a_gradient_that_is_missing_is_not_taken_for_cleared() -> None:
    """What is left of an older one must not be added to."""
    segments = [Segment("a", torch.empty(3), 0), Segment("b", torch.empty(5), 64)]
    grad, v = torch.ones(3), torch.zeros(128)
    local, memory = (
        LocalGradient(Parts([grad, None], torch.tensor([0, 64]), torch.tensor([3, 69])), scale=2.0),
        ErrorFeedback(),
    )
    maxima = memory.accumulate(local, v, None, memory.runs(segments))
    assert v[:3].tolist() == [2.0] * 3 and not v[3:].any() and maxima.tolist() == [2.0, 0.0]
    assert not grad.any()
    assert local.has_cleared(0) and not local.has_cleared(1)


def test_flatten_inverts_view() -> None:
    for tensor in (torch.randn(3, 4), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        segment = Segment("w", tensor, 64)
        flat = torch.zeros(64 + tensor.numel())
        segment.view(flat).copy_(tensor)
        assert torch.equal(segment.flatten(tensor), flat[64:])
        assert segment.flatten(tensor).data_ptr() == tensor.data_ptr()
        assert torch.equal(segment.flatten(tensor.contiguous()), flat[64:])
