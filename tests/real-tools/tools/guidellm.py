"""GuideLLM: prompts of its own making over HTTP/2 or 1.1, by each protocol that it knows."""

import json
import os
import pathlib
import subprocess

REQUESTS = 6
for path in "/v1/chat/completions", "/v1/completions", "/v1/responses":
    report = pathlib.Path(path.replace("/", "-").strip("-") + ".json")
    backend = {"kind": "openai_http", "target": os.environ["SERVER"], "model": os.environ["MODEL"], "api_key": os.environ["OPENAI_API_KEY"]}
    command = ["guidellm", "run", "--disable-console", "--backend", json.dumps(backend | {"request_format": path})]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={os.environ['TOKENIZER']}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=100,output_tokens=16", "--output", f"kind=json,path={report}"]
    subprocess.run(command, check=True)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == REQUESTS and not totals["errored"], totals
print(f"{REQUESTS} requests by each of chat, completions and responses")
