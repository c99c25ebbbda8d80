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

import torch
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.demo_model import card, evaluate, grammar, packing
from scripts.demo_model.chat import END_OF_TEXT, TURN_END
from scripts.demo_model.tokenization import encode_all, save_tokenizer, train_tokenizer


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the trained weights are."""

    documents: int = grammar.CORPUS_DOCUMENTS
    tokenizer_documents: int = 20_000
    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 384
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    context_length: int = 1024
    window: int = 384
    batch_size: int = 4
    learning_rate: float = 3e-3
    final_learning_rate: float = 1e-4
    warmup_steps: int = 100
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


def build_model(recipe: Recipe, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A freshly initialised model of the recipe's size."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden_size // recipe.heads,
        max_position_embeddings=recipe.context_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    return LlamaForCausalLM(config)


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to the final rate."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(1, steps - recipe.warmup_steps)
    swing = recipe.learning_rate - recipe.final_learning_rate
    return recipe.final_learning_rate + swing * (1 + math.cos(math.pi * progress)) / 2


def make_optimizer(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
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


def fit(model: LlamaForCausalLM, tokenizer: Tokenizer, recipe: Recipe) -> TrainingResult:
    """One pass over the corpus."""
    texts = encode_all(tokenizer, grammar.corpus(recipe.documents))
    windows = packing.pack(texts, recipe.window)
    steps = len(windows) // recipe.batch_size
    optimizer = make_optimizer(model, recipe)
    pad_id: int = tokenizer.token_to_id(END_OF_TEXT)  # type: ignore[assignment]
    smooth_loss, tokens, started = 0.0, 0, time.monotonic()
    model.train()
    bar = tqdm(
        packing.batches(windows, recipe.window, recipe.batch_size, pad_id),
        total=steps,
        desc="training",
        mininterval=2,
    )
    for step, (ids, labels) in enumerate(bar):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step, steps)
        batch, targets = torch.from_numpy(ids), torch.from_numpy(labels)
        loss = model(input_ids=batch, labels=targets, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_clip)
        optimizer.step()
        optimizer.zero_grad()
        tokens += int((targets != packing.IGNORED_LABEL).sum())
        weight = min(0.98, step / (step + 1))
        smooth_loss = weight * smooth_loss + (1 - weight) * float(loss.detach())
        bar.set_postfix(loss=f"{smooth_loss:.3f}", refresh=False)
    return TrainingResult(smooth_loss, tokens, steps, time.monotonic() - started)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, recipe: Recipe, folder: Path) -> None:
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
    model: LlamaForCausalLM, recipe: Recipe, result: TrainingResult, report: evaluate.Report
) -> card.CardFacts:
    """What the README is to tell of this run."""
    return card.CardFacts(
        parameters=f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M",
        layers=recipe.layers,
        hidden_size=recipe.hidden_size,
        context_length=recipe.context_length,
        vocab_size=recipe.vocab_size,
        documents=recipe.documents,
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
    parser.add_argument("--documents", type=int, default=Recipe.documents)
    options = parser.parse_args()
    recipe = Recipe(documents=options.documents)
    tokenizer = train_tokenizer(grammar.corpus(recipe.tokenizer_documents), recipe.vocab_size)
    model = build_model(recipe, tokenizer)
    result = fit(model, tokenizer, recipe)
    print(f"loss {result.loss:.4f} after {result.steps} steps, {result.tokens} tokens")
    save(model, tokenizer, recipe, options.output)
    report = evaluate.evaluate(options.output, recipe.documents)
    print(evaluate.describe(report))
    card.write(options.output, card_facts(model, recipe, result, report))


if __name__ == "__main__":
    main()
