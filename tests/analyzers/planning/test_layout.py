"""What each rank of a layout holds, against the orders of the schedules themselves."""

from __future__ import annotations

import numpy as np
import pytest

from ppdiag.analyzers.planning import orders
from ppdiag.analyzers.planning.hardware import DEVICES, NETWORKS, Cluster
from ppdiag.analyzers.planning.layout import Job, kept_stages, rank_layers, telling_ranks
from ppdiag.analyzers.planning.models import MODELS
from ppdiag.analyzers.planning.plan import wish
from ppdiag.analyzers.schedules import peak_activations


def _job(model: str, gpus: int, batch: int) -> Job:
    return Job(MODELS[model], Cluster(gpus, 8, DEVICES["h100"], NETWORKS["ndr"]), batch)


def _layout(schedule: str, ranks: int, chunks: int):
    sizes = {"tensor": 1, "pipeline": ranks, "data": 1, "chunks": chunks, "micro": 1}
    return wish(schedule=schedule, recompute=False, zero1=False, **sizes)


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "microbatches"),
    [
        ("gpipe", 4, 1, 8),
        ("1f1b", 4, 1, 8),
        ("1f1b", 8, 1, 3),
        ("interleaved", 4, 2, 8),
        ("interleaved", 4, 4, 4),
        ("interleaved", 2, 3, 16),
        ("zb-v", 4, 2, 12),
        ("dualpipe-v", 4, 2, 12),
    ],
)
def test_kept_activations_are_those_of_the_order(schedule, ranks, chunks, microbatches):
    job, layout = _job("llama3-8b", ranks, microbatches), _layout(schedule, ranks, chunks)
    kept = kept_stages(job, layout, np.arange(ranks)[:, None])[:, 0].tolist()
    peaks = peak_activations(orders.order(schedule, ranks=ranks, chunks=chunks, microbatches=microbatches))
    assert kept == peaks


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_split_weight_gradients_keep_as_much_on_every_rank_as_on_the_first(schedule):
    # Qi et al. 2024, table 2: ZB-H1 p, ZB-H2 2p-1 of a stage's activations
    job, layout = _job("llama3-8b", 4, 12), _layout(schedule, 4, 1)
    first = {"zb-h1": 4, "zb-h2": 7}[schedule]
    assert kept_stages(job, layout, np.arange(4)[:, None])[:, 0].tolist() == [first] * 4


@pytest.mark.parametrize(("ranks", "chunks"), [(16, 1), (16, 4), (2, 1), (8, 2), (64, 2)])
def test_the_ranks_layers_add_up_to_those_of_llama_3(ranks, chunks):
    job = _job("llama3-405b", ranks, 64)
    layout = _layout("interleaved" if chunks > 1 else "1f1b", ranks, chunks)
    layers = rank_layers(job, layout, np.arange(ranks)[:, None])[:, 0]
    assert layers.sum() == 126
    counts = orders.layers_of_stages(126, ranks * chunks)
    assert layers.tolist() == [sum(counts[rank::ranks]) for rank in range(ranks)]


def test_three_ranks_tell_of_all():
    layout = _layout("1f1b", 8, 1)
    assert telling_ranks(layout)[:, 0].tolist() == [0, 1, 7]
    assert telling_ranks(_layout("1f1b", 1, 1))[:, 0].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("schedule", "chunks", "published"),
    # README of github.com/deepseek-ai/DualPipe: activations of each device, in stages, with PP stages on PP/2 devices
    # for DualPipeV; README of the Zero Bubble implementation: ZB1P and ZBV as 1F1B (p stages' worth), ZB2P twice that
    [("1f1b", 1, 8), ("zb-h1", 1, 8), ("zb-h2", 1, 2 * 8 - 1), ("zb-v", 2, 2 * 8), ("dualpipe-v", 2, 2 * 8 + 1)],
)
def test_memory_columns_of_published_schedules(schedule, chunks, published):
    job, layout = _job("llama3-8b", 8, 64), _layout(schedule, 8, chunks)
    assert kept_stages(job, layout, telling_ranks(layout))[0, 0] == published
