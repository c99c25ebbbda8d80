"""lm-evaluation-harness against a served model of two stages."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.servers.pool import DEMO_TWO_STAGES, share
from tests.support.servers.server import Server

pytestmark = pytest.mark.full
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


server = share(DEMO_TWO_STAGES)


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


def evaluate(server: Server, folder: Path) -> dict[str, list[Any]]:
    """Records of the harness on each question, by task."""
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
def test_the_harness_reads_log_likelihoods_and_answers(server: Server, tmp_path: Path) -> None:
    samples = evaluate(server, tmp_path)
    assert [len(rows) for rows in samples.values()] == [COUNT, COUNT]
    check_log_likelihoods(samples["demo_questions"])
    check_answers(server, samples["demo_chat"])


def check_log_likelihoods(samples: list[Any]) -> None:
    """They are those of transformers."""
    import transformers

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


def check_answers(server: Server, samples: list[Any]) -> None:
    """Every answer is that of one greedy request, and most are right."""
    for sample in samples:
        chat = [{"role": "user", "content": sample["doc"]["question"]}]
        body = {"messages": chat, "temperature": 0, "max_tokens": 60}
        (answered,) = sample["resps"][0]
        answer = server.post("/v1/chat/completions", body)[1]
        assert answered == answer["choices"][0]["message"]["content"]
    assert sum(sample["exact_match"] for sample in samples) >= 0.8 * COUNT
