"""Checkpoints with weights in FP8, served by a prefill and a decode worker."""

import json
import os
import shutil
import subprocess

import openai
import pytest
from conftest import MODEL, running_cluster

FORMS = ["fp8-channel", "fp8-tensor", "fp8-fbgemm", "fp8-blocks"]
# The reference computes in f32, so later tokens may differ: workers multiply in bf16.
SAME_TOKENS = 4


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_served_and_begins_as_transformers_does(form):
    folder = MODEL.parent / form
    prompts = json.loads((folder / "reference.json").read_text())["prompts"]
    with running_cluster("--local-tail-tokens", "0", model=folder) as url, openai.OpenAI(base_url=url, api_key="unused") as client:
        model = client.models.list().data[0].id
        for prompt in prompts:
            body = {"ignore_eos": True, "return_token_ids": True}
            complete = lambda: client.completions.create(model=model, prompt=prompt["ids"], max_tokens=32, temperature=0, extra_body=body)
            # The second time, the prompt's blocks come from the pool.
            first, second = (complete().choices[0].token_ids for _ in range(2))
            assert first == second and len(first) == 32
            assert first[:SAME_TOKENS] == prompt["greedy"][:SAME_TOKENS]


def test_a_scheme_that_is_not_read_ends_the_start_with_what_to_do(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(MODEL.parent / "fp8-channel", folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["format"] = "nvfp4-pack-quantized"
    (folder / "config.json").write_text(json.dumps(config))
    command = [os.environ["TIDEMILL_BIN"], "up", "--http", "127.0.0.1:0", "--model", str(folder), "--restarts", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert "nvfp4-pack-quantized" in ended.stderr and "unquantized" in ended.stderr
