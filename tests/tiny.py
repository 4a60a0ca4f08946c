"""Tiny models and tokenizers made on the fly, for tests: random weights, GPT-2's architecture."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

END = "<|endoftext|>"
TRAINING_TEXT = "the cat sat on the mat because it was tired and the mat was soft"


def tiny_tokenizer(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text can be tokenized, and bos and eos are both `<|endoftext|>`, id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, model_max_length=64
    )


def tiny_gpt2(
    *,
    vocab_size: int = 300,
    n_layer: int = 2,
    n_head: int = 4,
    n_embd: int = 32,
    n_positions: int = 64,
    seed: int = 0,
) -> GPT2LMHeadModel:
    """GPT-2 with random float32 weights from `seed`, in eval mode; torch's seed is left alone."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        n_positions=n_positions,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config).eval()
