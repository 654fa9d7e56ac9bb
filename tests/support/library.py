"""Every compressor of the library, in settings that tests go through."""

from __future__ import annotations

import functools
import math

import torch

import dgcopt
from dgcopt.compressors import Compressor

ADAM = {"optimizer": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3)}

SETTINGS: list[tuple[Compressor, dict]] = [
    (dgcopt.NoCompression(), {}),
    (dgcopt.FP16(), {}),
    (dgcopt.BF16(), {}),
    (dgcopt.DGC(0.1), {}),
    (dgcopt.DGC(0.1, residual="bf16", vectors="sparse", granularity="bucket", momentum_masking=False), {}),
    (dgcopt.DGC.compact(0.05, warmup=None), {}),
    (dgcopt.DGC(0.1, warmup=dgcopt.Warmup((1.0, 0.5), steps=1), overlap=False), {}),
    (dgcopt.DGC(0.1, clip=dgcopt.LocalClip(1.0, per="tensor")), {}),
    (dgcopt.DGC(0.1, source="update"), ADAM),
    (dgcopt.DGC(0.1, values="int2", vectors="sparse", overlap=True, reduce="owner"), {}),
    (dgcopt.TopK(0.1), {}),
    (dgcopt.TopK(0.02, "int2", "rice", decay=0.9, granularity="bucket"), {}),
    (dgcopt.TopK(0.1, error_feedback=False), {}),
    (dgcopt.TopK(0.1, "int2", "rice", warmup=dgcopt.Warmup((1.0, 0.5), steps=1)), {}),
    (dgcopt.TopK(0.1), ADAM),
    (dgcopt.TopK(0.1, first_moment="residual"), ADAM),
    (dgcopt.TopK(0.1, reduce="owner"), {}),
    (dgcopt.TopK(0.1, "int8", reduce="owner", keep=math.inf), {}),
    (dgcopt.TopK(0.1, reduce="auto"), {}),
    (dgcopt.TopK(0.1, reduce="partition"), {}),
    (dgcopt.DGC(0.1, vectors="sparse", overlap=True, reduce="partition"), {}),
    (dgcopt.RandomK(0.1), {}),
    (dgcopt.RandomK(0.1, warmup=dgcopt.Warmup((1.0, 0.5), steps=1)), {}),
    (dgcopt.RandomK(0.1, error_feedback=False, unbiased=True), {}),
    (dgcopt.Threshold(0.5, 0.2), {}),
    (dgcopt.ChunkedTopK(), {}),
    (dgcopt.ChunkedTopK(0.1, 128, "fp32", "int32", 1.0), {}),
    (dgcopt.ChunkedTopK(reduce="owner", keep=2), {}),
    (dgcopt.CLTK(0.1), {}),
    (dgcopt.CLTK(0.1, warmup=dgcopt.Warmup((1.0, 0.5), steps=1)), {}),
    (dgcopt.CLTK(0.1, beta=0.3), ADAM),
    (dgcopt.CSC(0.3, 64), {}),
    (dgcopt.CSC(0.1, 64, warmup=dgcopt.Warmup((1.0, 0.5), steps=1)), {}),
    (dgcopt.DeMo(), {}),
    (dgcopt.PowerSGD(start_step=0), {}),
    (dgcopt.PowerSGD(2, start_step=1, iterations=1.5, epsilon=1e-8, batch_same_shapes=True), {}),
    (dgcopt.PowerSGD(start_step=0, granularity="bucket", warm_start=False), ADAM),
    (dgcopt.PowerSGD(start_step=0, error_feedback=False), {}),
    (dgcopt.ByteGrad(), {}),
    (dgcopt.ByteGrad(error_feedback=True), {}),
    (dgcopt.SignSGD(), {}),
    (dgcopt.Signum(), {}),
    (dgcopt.EFSignSGD(), {}),
    (dgcopt.OneBitReduce(), {}),
    (dgcopt.OneBit(), {}),
    (dgcopt.TernGrad(), {}),
    (dgcopt.QSGD(), {}),
    (dgcopt.QSGD(127, block=None, norm="max"), {}),
    (dgcopt.Natural(), {}),
    (dgcopt.QAdam(warmup_steps=2), ADAM),
    (dgcopt.QAdam(warmup_steps=2, faithful=True), ADAM),
    (dgcopt.OneBitAdam(warmup_steps=2), ADAM),
    (dgcopt.FP16(dgcopt.TopK(0.1)), {}),
    (dgcopt.BF16(dgcopt.PowerSGD(start_step=0)), {}),
    (dgcopt.PerParameter({"*[02]*": dgcopt.DGC(0.1), "*": dgcopt.NoCompression()}), {}),
    (dgcopt.PerParameter({"*[02]*": dgcopt.BF16(), "*": dgcopt.PowerSGD(start_step=0)}, source="update"), ADAM),
    (dgcopt.Hierarchical(dgcopt.DGC(0.1)), {}),
    (dgcopt.Hierarchical(dgcopt.DGC(0.1, reduce="owner")), {}),
    (dgcopt.Hierarchical(dgcopt.ByteGrad()), {}),
]
"""With what `check_compressor` needs to know besides."""


FIRST_OF_A_KIND = list(
    {type(c): (c, given) for c, given in reversed(SETTINGS) if "inner" not in vars(c) or given}.values()
)
"""All but those that are there to go around others."""
