"""lm-evaluation-harness with two tasks of its forms: answers that are generated, and choices of which the likeliest counts."""

import json
import os
import pathlib
import subprocess

QUESTIONS = [("What is the capital of France?", "Paris"), ("What is the capital of Norway?", "Oslo"), ("What is the capital of Peru?", "Lima")]
CHOICES = ["Paris", "Oslo", "Lima"]
TASK = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: questions.jsonl}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}} Answer with one word."
"""
GENERATED = """doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16}
metric_list: [{metric: exact_match, ignore_case: true, ignore_punctuation: true}]
"""
CHOSEN = """doc_to_target: "{{choices.index(answer)}}"
doc_to_choice: choices
metric_list: [{metric: acc}]
"""


def evaluate(model, path, task, *flags, **options):
    given = {"model": os.environ["MODEL"], "base_url": f"{os.environ['SERVER']}/v1{path}", "max_retries": 1, **options}
    arguments = ",".join(f"{key}={value}" for key, value in given.items())
    command = ["lm_eval", "run", "--model", model, "--model_args", arguments, "--tasks", task, "--include_path", "tasks", "--output_path", task]
    subprocess.run([*command, *flags], check=True)
    (report,) = pathlib.Path(task).rglob("results_*.json")
    return json.loads(report.read_text())["results"][task]


pathlib.Path("tasks").mkdir()
pathlib.Path("questions.jsonl").write_text("".join(json.dumps({"question": q, "answer": a, "choices": CHOICES}) + "\n" for q, a in QUESTIONS))
pathlib.Path("tasks/generated.yaml").write_text(TASK.format(task="generated", kind="generate_until") + GENERATED)
pathlib.Path("tasks/chosen.yaml").write_text(TASK.format(task="chosen", kind="multiple_choice") + CHOSEN)
generated = evaluate("local-chat-completions", "/chat/completions", "generated", "--apply_chat_template")
chosen = evaluate("local-completions", "/completions", "chosen", "--batch_size", "4", tokenizer=os.environ["TOKENIZER"])
print(f"exact_match {generated['exact_match,none']:.2f}, acc {chosen['acc,none']:.2f} of {len(QUESTIONS)} questions")
