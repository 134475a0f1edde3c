"""Constrained answers of a model with random weights, which would say anything else: each is read by a validator of its own."""

import concurrent.futures
import datetime
import enum
import json
import re
import typing

import httpx
import jsonschema
import pydantic
import pytest
from schemas import FOLLOWED, ONE_LINE, REFUSED

QUESTION = [{"role": "user", "content": "Say anything at all, as long as it is what I asked for."}]
AT_ONCE = 16


@pytest.fixture(scope="module")
def post(disaggregated):
    """POSTs to a cluster where a prefill worker computes every block of a prompt."""
    with httpx.Client(base_url=disaggregated, timeout=120, limits=httpx.Limits(max_connections=AT_ONCE)) as http:
        yield lambda path, **body: http.post(path, json=body)


@pytest.fixture(scope="module")
def answer(post):
    """The one choice of /v1/chat/completions."""

    def answer(**body):
        given = {"messages": QUESTION, "max_tokens": 400, "temperature": 1, "seed": 5}
        response = post("/chat/completions", **(given | body))
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        return choice

    return answer


def strict(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def check(schema, text):
    value = json.loads(text)
    jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema).validate(value)


def test_every_answer_matches_its_schema(answer):
    assert len(FOLLOWED) >= 200
    for schema in FOLLOWED:
        jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator).check_schema(schema)

    def ask(numbered):
        number, schema = numbered
        # Numbers and recursion may be without bound, and then an answer is cut. One of these seeds gives a shorter one.
        for seed in range(number, number + 8):
            choice = answer(response_format=strict(schema), seed=seed, logit_bias=ONE_LINE if seed > number else {})
            if choice["finish_reason"] == "length":
                continue
            assert choice["finish_reason"] == "stop", choice
            try:
                check(schema, choice["message"]["content"])
            except (ValueError, jsonschema.ValidationError) as error:
                raise AssertionError(f"{json.dumps(schema)} was answered {choice['message']['content']!r}") from error
            return True
        return False

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        ended = list(pool.map(ask, enumerate(FOLLOWED)))
    print(f"{sum(ended)} of {len(ended)} schemas were answered to the end, and the answers match their schemas")
    assert sum(ended) >= 0.95 * len(ended), "answers that are cut show little"


@pytest.mark.parametrize(("schema", "path"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_a_schema_that_cannot_be_kept_is_refused_where_it_is_wrong(post, schema, path):
    response = post("/chat/completions", messages=QUESTION, response_format=strict(schema))
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == f"response_format.json_schema.schema{path}"
    assert error["param"] in error["message"]


# A way to ask, and how its answer looks as a whole. Those of `FINITE` allow no long answer.
FINITE = {"regex", "choice", "guided_choice", "gbnf"}
CONSTRAINTS = {
    "json_schema": ({"response_format": strict(FOLLOWED[-1])}, None),
    "json_object": ({"response_format": {"type": "json_object"}}, None),
    "structured json": ({"structured_outputs": {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 5}}}, None),
    "structured json_object": ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, None),
    "guided_json": ({"guided_json": json.dumps({"enum": ["a", "b"]})}, None),
    "regex": ({"structured_outputs": {"regex": r"[a-f]{3,8}-\d{2}"}}, r"[a-f]{3,8}-\d{2}"),
    "guided_regex": ({"guided_regex": r"(yes|no), (really )*[.!]"}, r"(yes|no), (really )*[.!]"),
    "choice": ({"structured_outputs": {"choice": ["left", "right", "straight on"]}}, "left|right|straight on"),
    "guided_choice": ({"guided_choice": ["übermorgen", "gestern"]}, "übermorgen|gestern"),
    "gbnf": ({"guided_grammar": 'root ::= pair ("," pair){0,3}\npair ::= [a-c]{1,2} "=" ("on" | "off")'}, r"[a-c]{1,2}=(on|off)(,[a-c]{1,2}=(on|off)){0,3}"),
    "lark": ({"structured_outputs": {"grammar": 'start: "<" WORD ">" | "<" start ">"\nWORD: /[xyz]{1,5}/'}}, r"<+[xyz]{1,5}>+"),
}


def fits(name, text):
    pattern = CONSTRAINTS[name][1]
    return json.loads(text) is not None if pattern is None else re.fullmatch(pattern, text)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_each_spelling_constrains_chats_and_completions(post, answer, name):
    body = CONSTRAINTS[name][0]
    choice = answer(**body)
    assert choice["finish_reason"] == "length" or fits(name, choice["message"]["content"]), choice
    response = post("/completions", prompt="Once", max_tokens=400, temperature=1, seed=3, **body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "length" or fits(name, choice["text"]), choice


def test_sixteen_streams_with_mixed_constraints(disaggregated):
    names = list(CONSTRAINTS) + ["free"]

    def stream(number):
        name = names[number % len(names)]
        body = {"messages": QUESTION, "max_tokens": 300, "temperature": 1, "seed": number, "stream": True, **CONSTRAINTS.get(name, ({},))[0]}
        text, finish = "", None
        with httpx.stream("POST", f"{disaggregated}/chat/completions", json=body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
        return name, text, finish

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(stream, range(4 * AT_ONCE)))
    ended = [(name, text) for name, text, finish in results if finish == "stop" and name != "free"]
    assert {name for name, _, finish in results if name in FINITE and finish != "stop"} == set(), "a grammar that can only end ends"
    assert not [(name, text) for name, text in ended if not fits(name, text)]


def test_the_official_client_parses_into_a_model(client, model):
    class Point(pydantic.BaseModel):
        x: int = pydantic.Field(ge=-9, le=9)
        label: str = pydantic.Field(max_length=8)

    given = {"max_tokens": 200, "temperature": 1, "seed": 4, "logit_bias": ONE_LINE}
    completion = client.chat.completions.parse(model=model, messages=QUESTION, response_format=Point, **given)
    point = completion.choices[0].message.parsed
    assert isinstance(point, Point)
    assert -9 <= point.x <= 9


def test_sets_and_dictionaries_of_a_model_come_back_as_such(answer):
    class Color(enum.StrEnum):
        RED = "red"
        GREEN = "green"

    # Members of other names would be without bound.
    class Paint(pydantic.BaseModel, extra="forbid"):
        colors: set[Color] = pydantic.Field(min_length=1)
        order: frozenset[typing.Literal["a", "b", "c"]]
        by_color: dict[Color, bool]
        by_day: dict[datetime.date, bool] = pydantic.Field(max_length=2)

    for seed in range(8):
        choice = answer(response_format=strict(Paint.model_json_schema()), seed=seed, logit_bias=ONE_LINE)
        assert choice["finish_reason"] == "stop", "everything is bounded"
        value = json.loads(choice["message"]["content"])
        paint = Paint.model_validate(value)
        assert len(paint.colors) == len(value["colors"])
        assert len(paint.order) == len(value["order"])


def test_a_constraint_that_cannot_be_kept_is_relaxed_only_where_the_client_is_not_strict(post):
    words = {"type": "array", "uniqueItems": True, "maxItems": 2, "items": {"type": "string", "maxLength": 2}}

    def ask(**more):
        return post("/chat/completions", messages=QUESTION, max_tokens=60, **more)

    assert ask(response_format=strict(words)).status_code == 400
    loose = {"type": "json_schema", "json_schema": {"name": "answer", "schema": words}}
    for body in [{"response_format": loose}, {"guided_json": words}, {"structured_outputs": {"json": words}}]:
        response = ask(**body)
        assert response.status_code == 200, response.text
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"words": words}}}}
    assert ask(tools=[tool], tool_choice="required").status_code == 200
    tool["function"]["strict"] = True
    error = ask(tools=[tool], tool_choice="required").json()["error"]
    assert "words.uniqueItems" in error["message"], error


def test_choices_follow_it_each_for_itself(post):
    response = post("/completions", prompt="x", n=4, max_tokens=50, temperature=1, seed=1, guided_regex="[a-z]{5,20}")
    texts = [choice["text"] for choice in response.json()["choices"]]
    assert len(set(texts)) > 1
    assert all(re.fullmatch("[a-z]{5,20}", text) for text in texts)


def test_other_wishes_hold_within_the_grammar(answer):
    ends = answer(guided_regex="[ab]{1,30}", ignore_eos=True, temperature=0)
    assert len(ends["message"]["content"]) == 30, "the end is put off as long as the grammar can go on"
    assert (ends["finish_reason"], ends["stop_reason"]) == ("stop", None)
    most = answer(guided_regex="[ab]{4}", min_tokens=100)
    assert len(most["message"]["content"]) == 4, "a grammar that is complete ends the answer"
    least = answer(guided_regex="[ab]{1,60}", min_tokens=20, return_token_ids=True)
    assert len(least["token_ids"]) >= 20
    stopped = answer(guided_regex="(alpha )+", stop=["pha"], max_tokens=30)
    assert (stopped["message"]["content"], stopped["stop_reason"]) == ("al", "pha")
    biased = answer(guided_regex="[ab]{3}", logit_bias={str(token): 100 for token in range(5, 60)})
    assert re.fullmatch("[ab]{3}", biased["message"]["content"])
    cut = answer(response_format=strict({"type": "string", "minLength": 50}), max_tokens=5)
    assert cut["finish_reason"] == "length"


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object", "schema": {"enum": ["b"]}}},
        {"response_format": {"type": "regex", "value": '"b"'}},
        {"regex": '"b"'},
        {"ebnf": 'root ::= "\\"b\\""'},
        {"grammar": 'root ::= "\\"b\\""'},
        {"json_schema": '{"enum": ["b"]}'},
        {"format": {"enum": ["b"], "type": "string"}},
        {"nvext": {"guided_json": {"enum": ["b"]}}},
    ],
    ids=lambda body: next(iter(body)),
)
def test_the_words_of_other_servers_are_followed(answer, body):
    assert answer(**body)["message"]["content"] == '"b"'


def test_logprobs_are_what_the_model_would_have_said(answer):
    choice = answer(guided_regex="q{5}", logprobs=True, top_logprobs=3, temperature=0)
    tokens = choice["logprobs"]["content"]
    assert [token["token"] for token in tokens][:5] == ["q"] * 5
    assert all(token["logprob"] < token["top_logprobs"][0]["logprob"] for token in tokens[:5]), "the grammar, not the model, wanted it"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "grammar"}}, "response_format.grammar"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"options": {"num_ctx": 4096}}, "options"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_grammar": "root ::= missing"}, "guided_grammar"),
        ({"guided_grammar": "start: missing"}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a" * 300_000}, "guided_regex"),
    ],
    ids=lambda value: str(value)[:50],
)
@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
def test_mistakes_are_named(post, path, body, param):
    response = post(path, messages=QUESTION, prompt="x", **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
