"""A GGUF file is served as the model that it was made of."""

import json
import pathlib
import shutil

import openai
from conftest import running_cluster

ROOT = pathlib.Path(__file__).parents[2]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What turns the mill?"}]


def answers(model):
    with running_cluster(model=model) as url, openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60) as client:
        name = client.models.list().data[0].id
        chat = client.chat.completions.create(
            model=name, messages=CHAT, max_tokens=32, temperature=0, logprobs=True, top_logprobs=3
        )
        text = client.completions.create(model=name, prompt="The tide turns the mill", max_tokens=32, temperature=0)
        return name, chat.usage.prompt_tokens, chat.choices[0].message.content, chat.choices[0].logprobs, text.choices[0].text


def test_a_file_in_two_parts_answers_as_its_directory_does(tmp_path):
    directory = shutil.copytree(ROOT / "model/tests/fixtures/qwen2", tmp_path / "qwen2")
    config = json.loads((directory / "config.json").read_text())
    # Files of this architecture cannot say that some layers have windows.
    (directory / "config.json").write_text(json.dumps(config | {"use_sliding_window": False}))
    name, *of_file = answers(ROOT / "gguf/tests/fixtures/qwen2-00001-of-00002.gguf")
    _, *of_directory = answers(directory)
    assert name == "qwen2"
    assert of_file == of_directory
