"""Thinking budgets, by the official clients against a real cluster. Its model has random weights and a template that begins a thought, which would
never end by itself."""

import json
import shutil

import anthropic
import openai
import pytest
from conftest import MODEL, running_cluster

# The marks are text in this vocabulary, in several tokens.
TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant:
<think>
{% endif %}{# </think> #}"""
ASKED = {"messages": [{"role": "user", "content": "Why do tides turn?"}], "max_tokens": 60}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """The URL of a cluster whose model thinks."""
    model = tmp_path_factory.mktemp("models") / "thinker"
    shutil.copytree(MODEL, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    settings = model.parent / "coordinator.toml"
    settings.write_text("[thought_budgets]\nlow = 9\n")
    with running_cluster("--coordinator-config", str(settings), model=model) as url:
        yield url


@pytest.fixture
def chat(thinker):
    client = openai.OpenAI(base_url=thinker, api_key="none")
    model = client.models.list().data[0].id

    def chat(budget=None, **more):
        more = {"seed": 3} | more
        extra = {"ignore_eos": True} | ({} if budget is None else {"thinking_token_budget": budget})
        return client.chat.completions.create(model=model, extra_body=extra, **ASKED, **more)

    return chat


def thought_tokens(answer):
    return answer.usage.completion_tokens_details.reasoning_tokens


def test_a_thought_without_a_budget_does_not_end(chat):
    answer = chat()
    assert thought_tokens(answer) == 60
    assert not answer.choices[0].message.content


@pytest.mark.parametrize("budget", [0, 1, 7, 30])
def test_a_budget_is_kept_to_the_token(chat, budget):
    answer = chat(budget)
    assert thought_tokens(answer) == budget
    assert answer.choices[0].message.content, "it answers after its thought"


def test_a_stream_is_the_whole_answer(chat):
    message = chat(7).choices[0].message
    thought, text = "", ""
    for chunk in chat(7, stream=True):
        delta = chunk.choices[0].delta
        thought += getattr(delta, "reasoning", None) or ""
        text += delta.content or ""
    assert (thought, text) == (message.reasoning, message.content)


def test_a_grammar_follows_the_thought(chat):
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["ebb", "flow"]}}}
    answer = chat(7, response_format=schema)
    assert thought_tokens(answer) == 7
    assert json.loads(answer.choices[0].message.content) in ["ebb", "flow"]


def test_efforts_are_numbers_of_tokens(chat):
    assert thought_tokens(chat(reasoning_effort="low")) == 9
    assert thought_tokens(chat(reasoning_effort="none")) == 0
    with pytest.raises(openai.BadRequestError, match="minimal"):
        chat(reasoning_effort="much")
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget"):
        chat(-1)


def test_messages_have_anthropics_rules(thinker):
    client = anthropic.Anthropic(base_url=thinker.removesuffix("/v1"), api_key="none")
    model = client.models.list().data[0].id
    ask = lambda **more: client.messages.create(model=model, **(ASKED | more))  # noqa: E731
    kinds = [block.type for block in ask(thinking={"type": "disabled"}).content]
    assert "thinking" not in kinds
    for budget, most in [(1023, 2000), (2000, 2000)]:
        with pytest.raises(anthropic.BadRequestError, match="budget_tokens"):
            ask(thinking={"type": "enabled", "budget_tokens": budget}, max_tokens=most)
