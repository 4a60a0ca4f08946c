"""The memory of a measurement grows with its batches, not with the heads or windows measured."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The high-water mark of this process alone: getrusage's also counts that of the parent it was
# started from, which hides any growth behind the memory of the test suite. What is freed goes back
# to the system at once (MALLOC_MMAP_THRESHOLD_), so that fragments do not blur it.
STATUS = Path("/proc/self/status")
NUM_LAYERS, NUM_HEADS, D_MODEL, CONTEXT = 4, 8, 128, 256
NUM_BLOCKS, BLOCK = 4, 4  # blocks of windows

SCRIPT = f"""
import pathlib
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from mhaprune.model.heads import Head
from mhaprune.measure.leave_one_out import measure, plan
from mhaprune.measure.subject import Subject
from mhaprune.text.sample import Sample
from mhaprune.text.windows import make_windows

torch.set_num_threads(1)
config = GPT2Config(
    vocab_size=1000, n_embd={D_MODEL}, n_layer={NUM_LAYERS}, n_head={NUM_HEADS},
    n_positions={CONTEXT}, bos_token_id=0, eos_token_id=0,
)
model = GPT2LMHeadModel(config).eval()
ids = torch.randint(1000, ({CONTEXT} * {NUM_BLOCKS * BLOCK} + 1,))
windows = make_windows(len(ids), {CONTEXT}, {CONTEXT})
subject = Subject(model, Sample.of(ids, windows), (), None, {BLOCK}, "replay")


def peak_after(heads, numbers):
    units = plan(heads, numbers, {BLOCK})
    for unit, nats in measure(subject, units):
        assert nats.isfinite().all()
    [line] = [line for line in pathlib.Path({str(STATUS)!r}).open() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


layers, heads = range({NUM_LAYERS}), range({NUM_HEADS})
print(peak_after([Head(layer, 0) for layer in layers], range({BLOCK})))
print(peak_after([Head(layer, head) for layer in layers for head in heads], range(len(windows))))
"""


@pytest.mark.skipif(not STATUS.exists(), reason="the high-water mark of memory is Linux's")
def test_memory_does_not_grow_with_the_number_of_heads_or_windows():
    """16 windows x 32 heads after 4 x 4: to hold all variants at once would take 67 MB."""
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    first, last = map(int, finished.stdout.split())
    num_rows = NUM_LAYERS * NUM_HEADS * NUM_BLOCKS * BLOCK
    all_variants = num_rows * CONTEXT * D_MODEL * 4  # their final hidden states alone, in float32
    assert all_variants == pytest.approx(67e6, rel=0.01)
    assert 0 <= last - first < all_variants / 20
