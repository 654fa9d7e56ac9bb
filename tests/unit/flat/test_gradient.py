"""Sums of sparse gradients, parts of gradients, and segments of a flat tensor."""

import pytest
import torch

import dgcopt
from dgcopt.compressors.sparse.memory import ErrorFeedback
from dgcopt.flat.buckets import Bucket, PerTensor, Segment, build_buckets
from dgcopt.flat.gradient import LocalGradient
from dgcopt.kernels import Parts, norm_of


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


def test_a_lazy_negation_is_made_before_loops_read_memory() -> None:
    """Autograd may leave one in the gradient of a parameter of one element, of a complex number's imaginary part."""
    real, imaginary = (torch.ones(1, requires_grad=True) for _ in range(2))
    (torch.complex(real, imaginary).squeeze(0).conj() * 1j).real.backward()
    grad = imaginary.grad
    assert grad is not None and grad.is_neg() and grad.item() == 1
    flat = Segment("w", imaginary, 0).flatten(grad)
    assert not flat.is_neg() and flat.item() == 1


def test_sums_and_norms_of_large_tensors_are_exact() -> None:
    """In float32, one after the other, squares and sums of blocks lose up to a thousandth."""
    flat = torch.rand(2**24, generator=torch.Generator().manual_seed(0))
    total, norm = flat.sum(dtype=torch.float64), torch.linalg.vector_norm(flat, dtype=torch.float64)
    assert float(norm_of(flat)) == pytest.approx(float(norm), rel=1e-5)
    assert float(norm_of(flat.bfloat16())) == pytest.approx(float(norm), rel=1e-5)
    assert float(PerTensor([Segment("a", flat, 0)]).sum(flat)) == pytest.approx(float(total), rel=1e-6)


def test_positions_in_a_bucket_fit_into_32_bits() -> None:
    """Unless the user has grouped parameters, of which int32 positions are refused; small ones beside them are not."""
    numels = (100, 2**31 - 100, 2**30, 2**30 - 128, 1, 1)
    named = [(f"p{i}", torch.empty(numel, dtype=torch.bfloat16, device="meta")) for i, numel in enumerate(numels)]
    apart = build_buckets(named, lambda name, param: None, 2**40, 2**40, None, Bucket)
    assert [[int(s.name[1]) for s in bucket.segments] for bucket in apart] == [[0], [1], [2, 3, 4], [5]]
    assert [bucket.index for bucket in apart] == [0, 1, 2, 3]
    together = build_buckets(named, lambda name, param: None, 2**40, 2**40, dict.fromkeys(dict(named), 0), Bucket)
    assert len(together) == 1 and together[0].numel > 2**32
