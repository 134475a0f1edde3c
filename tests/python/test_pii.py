"""Personal data: models see placeholders, clients get the data back, and data of others is removed from answers. Whole and streamed."""

import httpx
import openai
import pytest
from conftest import running_cluster

MINE = "jane.doe@example.org"
QUESTION = [{"role": "user", "content": f"I am {MINE}, call me: (415) 555-2671. Order #4111111111111111."}]
# Forces the answer, whatever the weights.
FORCED = {"structured_outputs": {"choice": ["Dear [EMAIL_1], ask bob@example.com or [PHONE_1], not [EMAIL_2], version 1.2.3.4."]}}
ANSWER = f"Dear {MINE}, ask [EMAIL] or (415) 555-2671, not [EMAIL_2], version 1.2.3.4."


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    config = tmp_path_factory.mktemp("pii") / "coordinator.toml"
    names = config.with_name("names.txt")
    names.write_text("Bob Stone\n")
    config.write_text(f'[pii]\ninput = "redact"\noutput = "redact"\nnames = "{names}"\n')
    with running_cluster("--coordinator-config", str(config)) as url:
        yield url


@pytest.fixture(scope="module")
def client(private):
    with openai.OpenAI(base_url=private, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


def chat(client, model, extra, **fields):
    given = {"messages": QUESTION, "max_tokens": 200, "temperature": 0, "extra_body": extra}
    return client.chat.completions.create(model=model, **(given | fields))


def test_the_model_sees_placeholders(private, client, model):
    answer = chat(client, model, {"return_token_ids": True}, max_tokens=1)
    seen = httpx.post(private.removesuffix("/v1") + "/detokenize", json={"tokens": answer.prompt_token_ids}).json()["prompt"]
    assert "I am [EMAIL_1], call me: [PHONE_1]. Order #4111111111111111." in seen


def test_the_next_turn_begins_with_the_same_prompt(client, model):
    first = chat(client, model, {"return_token_ids": True}, max_tokens=1)
    turns = [*QUESTION, {"role": "assistant", "content": f"Hello {MINE}"}, {"role": "user", "content": "And bob@example.com?"}]
    second = chat(client, model, {"return_token_ids": True}, messages=turns, max_tokens=1)
    shared = [a == b for a, b in zip(first.prompt_token_ids, second.prompt_token_ids, strict=False)]
    # Everything but the start of the answer is shared.
    assert shared.count(False) <= 4 or all(shared)


def test_an_answer_has_ones_own_data_and_nobody_elses(client, model):
    assert chat(client, model, FORCED).choices[0].message.content == ANSWER
    chunks = [chunk.choices[0] for chunk in chat(client, model, FORCED, stream=True, logprobs=True)]
    deltas = [choice.delta.content or "" for choice in chunks]
    assert "".join(deltas) == ANSWER and len([delta for delta in deltas if delta]) > 5
    said = "".join(entry.token for choice in chunks if choice.logprobs for entry in choice.logprobs.content or [])
    assert "bob" not in said and "Dear" in said


def test_completions_and_responses_do_the_same(client, model):
    answer = client.completions.create(
        model=model, prompt=QUESTION[0]["content"], max_tokens=200, temperature=0, extra_body=FORCED
    )
    assert answer.choices[0].text == ANSWER
    names = {"structured_outputs": {"choice": ["bob stone's friend"]}}
    assert client.responses.create(model=model, input="Who?", temperature=0, extra_body=names).output_text == "[NAME]'s friend"


def test_what_was_not_asked_for_is_plain_text(client, model):
    text = "[EMAIL_1] is a word of mine"
    forced = {"structured_outputs": {"choice": [text]}}
    answer = chat(client, model, forced, messages=[{"role": "user", "content": text}])
    assert answer.choices[0].message.content == text
