"""lm-evaluation-harness against a served model: the log-likelihoods are those of transformers."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.server import Server, serving

ROOT = Path(__file__).parents[2]
QUESTIONS = ROOT / "tests" / "data" / "demo_questions.jsonl"
COUNT = 24
TASK = """\
task: demo_questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


CHAT_TASK = """\
task: demo_chat
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[gold]}}}}"
generation_kwargs: {{until: ["###"], max_gen_toks: 60, temperature: 0.0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("demo", "--dtype", "float32", "--pp", "2") as started:
        yield started


def write_task(folder: Path) -> None:
    """Each question with its own answer and those of three others."""
    rows = [json.loads(line) for line in QUESTIONS.read_text().splitlines()[:COUNT]]
    answers = [row["answer"] for row in rows]
    questions = folder / "questions.jsonl"
    with questions.open("w") as file:
        for i, row in enumerate(rows):
            choices = [answers[(i + step) % COUNT] for step in (0, 3, 7, 11)]
            print(
                json.dumps({"question": row["question"], "choices": choices, "gold": 0}), file=file
            )
    (folder / "demo.yaml").write_text(TASK.format(file=questions))
    (folder / "chat.yaml").write_text(CHAT_TASK.format(file=questions))


def run_harness(url: str, folder: Path, kind: str, task: str, *more: str) -> list[dict[str, Any]]:
    """What the harness wrote down of each question. kind: of its models."""
    path = "chat/completions" if "chat" in kind else "completions"
    model = f"model=demo,base_url={url}/v1/{path},tokenizer={ROOT / 'gllm' / 'demo'}"
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        "--model",
        kind,
        "--tasks",
        task,
        "--model_args",
        f"{model},num_concurrent=4",
        *more,
        "--include_path",
        str(folder),
        "--output_path",
        str(folder / "out"),
        "--log_samples",
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | offline)
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (folder / "out").rglob("samples_*.jsonl")
    return [json.loads(line) for line in samples.read_text().splitlines()]


@pytest.mark.timeout(300)
def test_loglikelihoods_are_those_of_transformers(server: Server, tmp_path: Path) -> None:
    import transformers

    write_task(tmp_path)
    samples = run_harness(server.url, tmp_path, "local-completions", "demo_questions")
    assert len(samples) == COUNT
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "gllm" / "demo")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        ROOT / "gllm" / "demo", dtype=torch.float32
    ).eval()
    for sample in samples:
        for i, ((answered, _),) in enumerate(sample["resps"]):
            asked = sample["arguments"][f"gen_args_{i}"]
            context = tokenizer(asked["arg_0"])["input_ids"]
            whole = tokenizer(asked["arg_0"] + asked["arg_1"])["input_ids"]
            with torch.inference_mode():
                logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            wanted = sum(
                float(logprobs[at - 1, whole[at]]) for at in range(len(context), len(whole))
            )
            assert abs(float(answered) - wanted) < 1e-3


@pytest.mark.timeout(300)
def test_answers_of_chats_are_the_demo_models(server: Server, tmp_path: Path) -> None:
    """Every answer is that of one greedy request, and most are right."""
    write_task(tmp_path)
    samples = run_harness(
        server.url, tmp_path, "local-chat-completions", "demo_chat", "--apply_chat_template"
    )
    for sample in samples:
        chat = [{"role": "user", "content": sample["doc"]["question"]}]
        body = {"messages": chat, "temperature": 0, "max_tokens": 60}
        (answered,) = sample["resps"][0]
        answer = server.post("/v1/chat/completions", body)[1]
        assert answered == answer["choices"][0]["message"]["content"]
    assert len(samples) == COUNT
    assert sum(sample["exact_match"] for sample in samples) >= 0.8 * COUNT
