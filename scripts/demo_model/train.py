"""Trains the demo model from nothing and writes its folder: one command does everything.

    python -m scripts.demo_model.train

Owns the recipe: sizes, schedule and what is saved. Texts come from `grammar`, the rates that end
the run from `evaluate`. It needs no accelerator; the README it writes names the time it took.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

from scripts.demo_model import card, evaluate, grammar, packing
from scripts.demo_model.chat import END_OF_TEXT, TURN_END
from scripts.demo_model.packing import TrainingText
from scripts.demo_model.tokenization import (
    encode_all,
    save_tokenizer,
    train_tokenizer,
    trained_positions,
)

Batch = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the trained weights are, apart from the corpus."""

    tokenizer_texts: int = 20_000
    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 384
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    context_length: int = 1024
    initializer_range: float = 0.06
    lesson_window: int = 64
    conversation_window: int = 256
    batch_tokens: int = 2560
    learning_rate: float = 2e-3
    final_learning_rate: float = 5e-5
    warmup_steps: int = 50
    weight_decay: float = 0.05
    gradient_clip: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class TrainingResult:
    """What the README tells of a finished run."""

    loss: float
    tokens: int
    steps: int
    seconds: float


def build_model(recipe: Recipe, tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """A freshly initialised model of the recipe's size."""
    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden_size // recipe.heads,
        max_position_embeddings=recipe.context_length,
        tie_word_embeddings=True,
        initializer_range=recipe.initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    return Qwen3ForCausalLM(config)


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to the final rate."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(1, steps - recipe.warmup_steps)
    swing = recipe.learning_rate - recipe.final_learning_rate
    return recipe.final_learning_rate + swing * (1 + math.cos(math.pi * progress)) / 2


def make_optimizer(model: Qwen3ForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW that decays matrices only: norms and embeddings keep their scale."""
    decayed: list[torch.nn.Parameter] = []
    kept: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (kept if parameter.ndim < 2 or "embed" in name else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True)


def make_batches(tokenizer: Tokenizer, recipe: Recipe, share: float) -> list[Batch]:
    """The corpus, lessons first, as (token ids, labels); less of it if ``share`` is below 1."""
    pad_id: int = tokenizer.token_to_id(END_OF_TEXT)  # type: ignore[assignment]
    lessons = grammar.lessons(int(share * grammar.LESSON_COUNT))
    conversations = grammar.conversations(int(share * grammar.CONVERSATION_COUNT))
    parts = ((lessons, recipe.lesson_window), (conversations, recipe.conversation_window))
    result: list[Batch] = []
    for texts, window in parts:
        encoded = [
            TrainingText(tokens, trained_positions(tokenizer, tokens))
            for tokens in encode_all(tokenizer, texts)
        ]
        windows = packing.pack(encoded, window)
        result += packing.batches(windows, window, recipe.batch_tokens // window, pad_id)
    return result


def fit(model: Qwen3ForCausalLM, batches: list[Batch], recipe: Recipe) -> TrainingResult:
    """One pass over the batches."""
    optimizer = make_optimizer(model, recipe)
    smooth_loss, started = 0.0, time.monotonic()
    model.train()
    bar = tqdm(batches, desc="training", mininterval=2)
    for step, (ids, labels) in enumerate(bar):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step, len(batches))
        batch, targets = torch.from_numpy(ids), torch.from_numpy(labels)
        loss = model(input_ids=batch, labels=targets, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_clip)
        optimizer.step()
        optimizer.zero_grad()
        weight = min(0.98, step / (step + 1))
        smooth_loss = weight * smooth_loss + (1 - weight) * float(loss.detach())
        bar.set_postfix(loss=f"{smooth_loss:.3f}", refresh=False)
    tokens = sum(ids.size for ids, _ in batches)
    return TrainingResult(smooth_loss, tokens, len(batches), time.monotonic() - started)


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, recipe: Recipe, folder: Path) -> None:
    """Write the Hugging Face folder, the weights rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    model.bfloat16().save_pretrained(folder)
    save_tokenizer(tokenizer, folder, recipe.context_length)
    generation = {
        "eos_token_id": [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)],
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }
    text = json.dumps(generation, indent=2)
    (folder / "generation_config.json").write_text(f"{text}\n", encoding="utf-8")


def card_facts(
    model: Qwen3ForCausalLM, recipe: Recipe, result: TrainingResult, report: evaluate.Report
) -> card.CardFacts:
    """What the README is to tell of this run."""
    return card.CardFacts(
        parameters=f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M",
        layers=recipe.layers,
        hidden_size=recipe.hidden_size,
        context_length=recipe.context_length,
        vocab_size=recipe.vocab_size,
        documents=grammar.LESSON_COUNT + grammar.CONVERSATION_COUNT,
        tokens=result.tokens,
        steps=result.steps,
        minutes=result.seconds / 60,
        device=f"{torch.get_num_threads()} CPU cores",
        loss=result.loss,
        story_count=evaluate.STORY_COUNT,
        rates=evaluate.describe(report),
    )


def main() -> None:
    """Train, save, evaluate what was saved and write its README."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--output", type=Path, default=evaluate.DEMO_FOLDER)
    parser.add_argument("--share", type=float, default=1.0, help="how much of the corpus to use")
    options = parser.parse_args()
    recipe = Recipe()
    tokenizer = train_tokenizer(grammar.conversations(recipe.tokenizer_texts), recipe.vocab_size)
    model = build_model(recipe, tokenizer)
    result = fit(model, make_batches(tokenizer, recipe, options.share), recipe)
    print(f"loss {result.loss:.4f} after {result.steps} steps, {result.tokens} tokens")
    save(model, tokenizer, recipe, options.output)
    report = evaluate.evaluate(options.output)
    print(evaluate.describe(report))
    card.write(options.output, card_facts(model, recipe, result, report))


if __name__ == "__main__":
    main()
