"""Train the demo model that ships with the package, on the stories of `mhaprune/text/stories.py`.

    python scripts/train_demo_model.py --out mhaprune/model/demo_model

About an hour on two cores. What made the attention heads of the textbook appear at all in so small
a model is told in `experiments/LOG.md`: a position table that starts as sinusoids, small token
embeddings, unannounced repeats in half of the text, and Muon for the weight matrices.
"""

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from mhaprune.roles.patterns import induction_score, previous_token_score, repeated_random_tokens
from mhaprune.text.stories import stories

CONTEXT_LENGTH, VOCAB_SIZE, D_MODEL, ROWS = 256, 1024, 128, 16
END, END_ID = "<|endoftext|>", 0
TOKENIZER_SEED, HELD_OUT_SEED = 1, 3


@dataclass(frozen=True)
class Phase:
    """Steps on rows of `length` tokens of stories with this share of echoes."""

    steps: int
    length: int
    echo_share: float
    seed: int


# Short rows with many repeats until induction heads have formed, then the stories as they are, then
# the whole context, for which learning starts anew: positions beyond 127 are new to the model.
PHASES = (Phase(5_600, 127, 0.8, seed=2), Phase(2_150, 127, 0.5, seed=12))
LAST_PHASE = Phase(1_500, 255, 0.5, seed=22)


def train_tokenizer(vocab_size: int, num_stories: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2's, learnt from the stories."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (story.text for story in itertools.islice(stories(TOKENIZER_SEED), num_stories))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        unk_token=END,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def documents(
    tokenizer: PreTrainedTokenizerFast, seed: int, echo_share: float
) -> Iterator[list[int]]:
    """Token ids of one story after another, each after an end-of-text token."""
    source = stories(seed, echo_share)
    while True:
        texts = [story.text for story in itertools.islice(source, 256)]
        for encoding in tokenizer(texts, add_special_tokens=False).encodings or []:
            yield [END_ID, *encoding.ids]


def batches(tokenizer: PreTrainedTokenizerFast, phase: Phase) -> Iterator[torch.Tensor]:
    """Batches of `[ROWS, length + 1]` token ids; half of the rows begin in mid-story."""
    source = documents(tokenizer, phase.seed, phase.echo_share)
    rng = random.Random(phase.seed)
    while True:
        batch = []
        for row in range(ROWS):
            ids: list[int] = []
            skipped = 0 if row % 2 else rng.randrange(100)
            while len(ids) < skipped + phase.length + 1:
                ids += next(source)
            batch.append(ids[skipped : skipped + phase.length + 1])
        yield torch.tensor(batch)


def new_model(vocab_size: int) -> GPT2LMHeadModel:
    """A GPT-2 whose position table starts as sinusoids, so that "one before" is easy to find."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=CONTEXT_LENGTH,
        n_embd=D_MODEL,
        n_layer=4,
        n_head=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
    )
    model = GPT2LMHeadModel(config)
    positions = torch.arange(CONTEXT_LENGTH)[:, None]
    frequencies = torch.exp(-math.log(10_000) * torch.arange(0, D_MODEL, 2) / D_MODEL)
    with torch.no_grad():
        model.transformer.wte.weight.normal_(std=0.1)
        model.transformer.wpe.weight[:, 0::2] = 0.1 * torch.sin(positions * frequencies)
        model.transformer.wpe.weight[:, 1::2] = 0.1 * torch.cos(positions * frequencies)
    return model


def new_optimizers(model: GPT2LMHeadModel) -> list[torch.optim.Optimizer]:
    """Muon for the weight matrices of the blocks, AdamW for the rest."""
    matrices = [p for p in model.transformer.h.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    adam = torch.optim.AdamW(others, lr=1.5e-3, betas=(0.9, 0.98), weight_decay=0.0)
    muon = torch.optim.Muon(
        matrices, lr=3e-3, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
    )
    return [adam, muon]


@torch.no_grad()
def assess(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Best induction and previous-token scores, and held-out loss over the stories' entropy."""
    model.eval()
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    held_out = next(batches(tokenizer, Phase(1, CONTEXT_LENGTH - 1, 0.5, HELD_OUT_SEED)))
    words = held_out.unique()
    rows = repeated_random_tokens(words[words != END_ID], END_ID, 16, 64, generator)
    repeated = torch.stack(model(rows, output_attentions=True).attentions)
    natural = torch.stack(model(held_out, output_attentions=True).attentions)
    model.set_attn_implementation("sdpa")
    known = [s for s in itertools.islice(stories(HELD_OUT_SEED), 400) if s.log_probability]
    nats = 0.0
    for story in known:
        ids = torch.tensor([[END_ID, *tokenizer(story.text)["input_ids"], END_ID]])[
            :, : CONTEXT_LENGTH + 1
        ]
        logits = model(ids[:, :-1]).logits[0]
        nats += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    model.train()
    induction, previous = induction_score(repeated, 64), previous_token_score(natural)
    return {
        "induction": induction.max().item(),
        "previous": previous.max().item(),
        "loss_over_entropy": nats / -sum(s.log_probability or 0.0 for s in known),
    }


def learning_rate_factor(step: int, horizon: int, peak: float) -> float:
    """Linear warm-up over 200 steps, then a cosine from `peak` to a hundredth at `horizon`."""
    warm = min(1.0, (step + 1) / 200)
    return warm * (0.01 + (peak - 0.01) * 0.5 * (1 + math.cos(math.pi * step / horizon)))


def train(
    model: GPT2LMHeadModel,
    tokenizer: PreTrainedTokenizerFast,
    phases: tuple[Phase, ...],
    horizon: int,
    peak: float,
    out: Path,
) -> None:
    """Train through the phases, printing a line of scores and saving every 250 steps."""
    optimizers = new_optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda n: learning_rate_factor(n, horizon, peak))
        for o in optimizers
    ]
    source = itertools.chain.from_iterable(
        itertools.islice(batches(tokenizer, phase), phase.steps) for phase in phases
    )
    total = sum(phase.steps for phase in phases)
    start, running = time.monotonic(), 0.0
    for step, ids in enumerate(source, start=1):
        logits = model(ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        running = loss.item() if step == 1 else 0.98 * running + 0.02 * loss.item()
        if step % 250 == 0 or step == total:
            seconds = time.monotonic() - start
            record = {"step": step, "of": total, "loss": running, "seconds": round(seconds)}
            print(json.dumps({**record, **assess(model, tokenizer)}), flush=True)
            save(model, tokenizer, out)


def save(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to save the model in")
    parser.add_argument(
        "--last-phase-from", type=Path, help="skip to the last phase, from the model saved here"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.last_phase_from:
        model = GPT2LMHeadModel.from_pretrained(args.last_phase_from)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.last_phase_from)
    else:
        tokenizer = train_tokenizer(VOCAB_SIZE, 20_000)
        model = new_model(len(tokenizer))
        train(model, tokenizer, PHASES, horizon=14_000, peak=1.0, out=args.out)
    train(model, tokenizer, (LAST_PHASE,), horizon=LAST_PHASE.steps, peak=0.6, out=args.out)


if __name__ == "__main__":
    main()
