"""Trains the demo model from nothing and writes its folder: one command does everything.

    python -m scripts.demo_model.train

Owns the recipe: sizes, runs, schedule and what is saved. A run starts from what the run before has
saved, so `--from-run 1` gives the same as doing both. Texts come from `grammar`, the rates that end
the last run from `evaluate`. It needs no accelerator; the README it writes names the time it took.
"""

import argparse
import json
import math
import random
import time
from dataclasses import asdict, dataclass
from itertools import islice
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
    final_learning_rate: float = 5e-5
    warmup_steps: int = 50
    weight_decay: float = 0.05
    gradient_clip: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """One pass over a part of the corpus."""

    lessons: range
    conversations: range
    learning_rate: float
    """The highest."""
    shuffled: bool
    """True if lessons and conversations are mixed; otherwise lessons come first."""


RUNS = (
    # Early practice at looking things up, then the full mix.
    Run(range(26_000), range(36_000), learning_rate=2e-3, shuffled=False),
    # The language is learnt by now; telling two heroes apart takes more questions.
    Run(range(26_000, 86_000), range(36_000, 46_000), learning_rate=1.5e-3, shuffled=True),
)


@dataclass(frozen=True)
class TrainingResult:
    """Facts about a finished run for the README."""

    loss: float
    tokens: int
    steps: int
    seconds: float


def build_model(recipe: Recipe, tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """Return a freshly initialised model of the recipe's size."""
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


def learning_rate(recipe: Recipe, highest: float, step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to the final rate."""
    if step < recipe.warmup_steps:
        return highest * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(1, steps - recipe.warmup_steps)
    swing = highest - recipe.final_learning_rate
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
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def make_batches(tokenizer: Tokenizer, recipe: Recipe, run: Run) -> list[Batch]:
    """Return a run's part of the corpus as (token ids, labels)."""
    pad_id: int = tokenizer.token_to_id(END_OF_TEXT)  # type: ignore[assignment]
    lessons = islice(grammar.lessons(run.lessons.stop), run.lessons.start, None)
    told = grammar.conversations(run.conversations.stop)
    conversations = islice(told, run.conversations.start, None)
    parts = ((lessons, recipe.lesson_window), (conversations, recipe.conversation_window))
    result: list[Batch] = []
    for texts, window in parts:
        encoded = [
            TrainingText(tokens, trained_positions(tokenizer, tokens))
            for tokens in encode_all(tokenizer, texts)
        ]
        windows = packing.pack(encoded, window)
        result += packing.batches(windows, window, recipe.batch_tokens // window, pad_id)
    if run.shuffled:
        random.Random(recipe.seed).shuffle(result)
    return result


def fit(
    model: Qwen3ForCausalLM, batches: list[Batch], recipe: Recipe, highest: float
) -> TrainingResult:
    """One pass over the batches; `highest` is the learning rate after the warm-up."""
    optimizer = make_optimizer(model, recipe)
    smooth_loss, started = 0.0, time.monotonic()
    model.train()
    bar = tqdm(batches, desc="training", mininterval=2)
    for step, (ids, labels) in enumerate(bar):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, highest, step, len(batches))
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
        "temperature": 0.4,
        "top_p": 0.85,
    }
    text = json.dumps(generation, indent=2)
    (folder / "generation_config.json").write_text(f"{text}\n", encoding="utf-8")


def do_run(recipe: Recipe, index: int, folder: Path) -> None:
    """One run: from the folder's model, or from nothing for the first, to the folder."""
    if index:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        texts = grammar.conversations(recipe.tokenizer_texts)
        tokenizer = train_tokenizer(texts, recipe.vocab_size)
        model = build_model(recipe, tokenizer)
    run = RUNS[index]
    batches = make_batches(tokenizer, recipe, run)
    result = fit(model, batches, recipe, run.learning_rate)
    print(f"run {index}: loss {result.loss:.4f}, {result.steps} steps, {result.tokens} tokens")
    save(model, tokenizer, recipe, folder)
    file = folder / "training.json"
    earlier = json.loads(file.read_text(encoding="utf-8"))[:index] if index else []
    file.write_text(json.dumps([*earlier, asdict(result)], indent=2) + "\n", encoding="utf-8")


def card_facts(recipe: Recipe, folder: Path, report: evaluate.Report) -> card.CardFacts:
    """Return the README's facts about the runs that produced a folder."""
    results = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    model = Qwen3ForCausalLM.from_pretrained(folder)
    return card.CardFacts(
        parameters=f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M",
        layers=recipe.layers,
        hidden_size=recipe.hidden_size,
        context_length=recipe.context_length,
        vocab_size=recipe.vocab_size,
        documents=grammar.LESSON_COUNT + grammar.CONVERSATION_COUNT,
        tokens=sum(result["tokens"] for result in results),
        steps=sum(result["steps"] for result in results),
        minutes=sum(result["seconds"] for result in results) / 60,
        device=f"{torch.get_num_threads()} CPU cores",
        loss=results[-1]["loss"],
        story_count=evaluate.STORY_COUNT,
        rates=evaluate.describe(report),
    )


def main() -> None:
    """Train, save, evaluate what was saved and write its README."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--output", type=Path, default=evaluate.DEMO_FOLDER)
    parser.add_argument("--from-run", type=int, default=0, help="go on from the saved model")
    options = parser.parse_args()
    recipe = Recipe()
    for index in range(options.from_run, len(RUNS)):
        do_run(recipe, index, options.output)
    report = evaluate.evaluate(options.output)
    print(evaluate.describe(report))
    card.write(options.output, card_facts(recipe, options.output, report))


if __name__ == "__main__":
    main()
