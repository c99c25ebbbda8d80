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

from tests.support.servers.server import Server, serving

ROOT = Path(__file__).parents[2]
QUESTIONS = ROOT / "tests" / "data" / "demo_questions.jsonl"
COUNT = 12
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
    with serving("demo", "--dtype", "float32", "--pp", "2", "--threads", "1") as started:
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


HARNESS = """
import json, sys
from lm_eval.__main__ import cli_evaluate
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    cli_evaluate()
"""
"""Runs of the harness by their arguments, in one process: its imports take longer than a run."""


def arguments(url: str, folder: Path, kind: str, task: str, *more: str) -> list[str]:
    """Command line of the harness for one kind of its models and one task."""
    path = "chat/completions" if "chat" in kind else "completions"
    model = f"model=demo,base_url={url}/v1/{path},tokenizer={ROOT / 'gllm' / 'demo'}"
    return [
        *("run", "--model", kind, "--tasks", task),
        *("--model_args", f"{model},num_concurrent=4", *more),
        *("--include_path", str(folder), "--output_path", str(folder / task), "--log_samples"),
    ]


@pytest.fixture(scope="module")
def samples(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Records of the harness on each question, by task."""
    folder = tmp_path_factory.mktemp("harness")
    write_task(folder)
    runs = [
        arguments(server.url, folder, "local-completions", "demo_questions"),
        arguments(
            server.url, folder, "local-chat-completions", "demo_chat", "--apply_chat_template"
        ),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    command = [sys.executable, "-c", HARNESS, json.dumps(runs)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | offline)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = {}
    for task in ("demo_questions", "demo_chat"):
        (file,) = (folder / task).rglob("samples_*.jsonl")
        answers[task] = [json.loads(line) for line in file.read_text().splitlines()]
    return answers


@pytest.mark.timeout(900)
def test_loglikelihoods_are_those_of_transformers(samples: dict[str, list[Any]]) -> None:
    import transformers

    assert len(samples["demo_questions"]) == COUNT
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "gllm" / "demo")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        ROOT / "gllm" / "demo", dtype=torch.float32
    ).eval()
    for sample in samples["demo_questions"]:
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


@pytest.mark.timeout(900)
def test_answers_of_chats_are_the_demo_models(
    server: Server, samples: dict[str, list[Any]]
) -> None:
    """Every answer is that of one greedy request, and most are right."""
    for sample in samples["demo_chat"]:
        chat = [{"role": "user", "content": sample["doc"]["question"]}]
        body = {"messages": chat, "temperature": 0, "max_tokens": 60}
        (answered,) = sample["resps"][0]
        answer = server.post("/v1/chat/completions", body)[1]
        assert answered == answer["choices"][0]["message"]["content"]
    assert len(samples["demo_chat"]) == COUNT
    assert sum(sample["exact_match"] for sample in samples["demo_chat"]) >= 0.8 * COUNT
