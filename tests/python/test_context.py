"""Context of long conversations, with the official client: summaries, retrieval of old messages, facts about a user."""

import contextlib
import json
import sqlite3

import httpx
import openai
import pytest
from conftest import MODEL
from clusters import Cluster, wait_until

SYSTEM = "You are the keeper of a tide mill."
CONFIG = """
[tier.small]
[tier.small.models.qwen3]
tokens_per_minute = 1
[context]
summary_model = "qwen3"
[memory]
facts_max = 3
bytes_max = "100"
"""


@pytest.fixture(scope="module")
def mill(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("context"), CONFIG, models=[MODEL, MODEL.parent / "qwen3"])
    cluster.key("first", "premium")
    yield cluster
    if cluster.process.poll() is None:
        cluster.stop()


def user(cluster, tenant, name=None, tier="premium"):
    made = cluster.keys("create", "--tenant", tenant, "--tier", tier, *(["--user", name] if name else []))
    assert made.returncode == 0, made.stderr
    return openai.OpenAI(base_url=cluster.url, api_key=made.stdout.strip(), max_retries=0, timeout=60)


def say(client, said, model="llama3", **fields):
    messages = [text if isinstance(text, dict) else {"role": "user", "content": text} for text in [said]]
    body = {"ignore_eos": True, "return_token_ids": True, **fields}
    return client.chat.completions.create(model=model, messages=messages, max_tokens=4, temperature=0, extra_body=body)


def prompt(client, answer):
    """The prompt that the model was given."""
    body = {"model": answer.model, "tokens": answer.prompt_token_ids}
    root = str(client.base_url).removesuffix("v1/")
    return httpx.post(f"{root}detokenize", json=body, headers={"authorization": f"Bearer {client.api_key}"}).raise_for_status().json()["prompt"]


def context(answer):
    return answer.usage.tidemill["context"]


def stored(cluster):
    """The records in the store of a cluster that is not running."""
    [path] = cluster.data.rglob("responses.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT id, summary FROM records").fetchall()


def summary(client, id):
    return client.conversations.retrieve(id).to_dict().get("summary")


def summarized(client, id, items):
    wait_until(lambda: (summary(client, id) or {}).get("items") == items)
    return summary(client, id)["text"]


def begin(client, turns, **wish):
    """A conversation of `turns` turns, of which eight fit."""
    wish = {"strategy": "summary", "turns_max": 8, **wish}
    id = client.conversations.create(extra_body={"instructions": SYSTEM}).id
    answers = [say(client, f"Question {turn} about the tide.", conversation=id, context=wish) for turn in range(1, turns + 1)]
    return id, wish, answers


def test_a_long_conversation_gets_a_summary(client, model):
    id, wish, answers = begin(client, 7)
    assert context(answers[-1])["summary"] == {"state": "not_needed", "turns": 0, "tokens": 0}
    text = summarized(client, id, 10)
    told = summary(client, id)
    assert 0 < told["tokens"] <= 200 and told["model"] == model
    eighth = say(client, "Question 8 about the tide.", conversation=id, context=wish)
    assert context(eighth)["turns_left_out"] == 0 and text not in prompt(client, eighth), "it is there, and its step is not"

    ninth = say(client, "Question 9 about the tide.", conversation=id, context=wish)
    assert context(ninth)["summary"] == {"state": "given", "turns": 5, "tokens": told["tokens"]}
    assert (context(ninth)["turns_left_out"], context(ninth)["strategy"]) == (5, "summary")
    given = prompt(client, ninth)
    assert "Question 5" not in given and given.index(SYSTEM) < given.index(text) < given.index("Question 6")

    tenth = say(client, "Question 10 about the tide.", conversation=id, context=wish)
    beginning = given[: given.index("Question 9")]
    assert prompt(client, tenth).startswith(beginning), "the beginning stays until the next step"
    assert tenth.usage.prompt_tokens_details.cached_tokens >= ninth.usage.prompt_tokens // 16 * 16 - 16
    assert len(list(client.conversations.items.list(id, limit=100))) == 20, "what is left out stays stored"

    # The next summary is made from this one and the messages since.
    for turn in (11, 12):
        say(client, f"Question {turn} about the tide.", conversation=id, context=wish)
    summarized(client, id, 20)
    thirteenth = say(client, "Question 13 about the tide.", conversation=id, context=wish)
    assert text in prompt(client, thirteenth), "the older one is given until the next step"
    assert context(thirteenth)["summary"]["turns"] == 5


def test_the_same_history_has_the_same_summary(client):
    texts = [summarized(client, begin(client, 7)[0], 10) for _ in range(2)]
    assert texts[0] == texts[1]


def test_what_changes_under_a_summary_takes_it_along(client):
    id, wish, _ = begin(client, 9)
    text = summarized(client, id, 10)
    items = [item.id for item in client.conversations.items.list(id, order="asc", limit=100)]
    branch = client.post(f"/conversations/{id}/branch", cast_to=httpx.Response, body={"at": items[13]}).json()
    assert branch["summary"]["text"] == text
    short = client.post(f"/conversations/{id}/branch", cast_to=httpx.Response, body={"at": items[5]}).json()
    assert "summary" not in short, "it does not have all that the summary tells of"
    say(client, "Question 9, once more.", conversation={"id": id, "replace": items[16]}, context=wish)
    assert summary(client, id)["text"] == text, "what came later may change"
    client.conversations.items.delete(items[2], conversation_id=id)
    assert summary(client, id) is None
    assert summary(client, branch["id"])["text"] == text, "which has its own history"
    edited = say(client, "Question 3, otherwise.", conversation={"id": branch["id"], "replace": items[4]}, context=wish)
    assert context(edited)["turns"] == 3 and context(edited)["turns_left_out"] == 0
    assert summary(client, branch["id"]) is None


def test_a_summary_is_made_by_another_model_paid_by_its_tenant_and_deleted_with_its_conversation(mill):
    ann = user(mill, "harbour", "ann")
    id, wish, answers = begin(ann, 7)
    text = summarized(ann, id, 10)
    assert summary(ann, id)["model"] == "qwen3"
    for other in [user(mill, "harbour", "bob"), user(mill, "harbour"), user(mill, "quay", "ann")]:
        with pytest.raises(openai.NotFoundError):
            other.conversations.retrieve(id)
    events = [json.loads(line) for line in mill.usage("--tenant", "harbour", "--format", "events").splitlines()]
    made = [event for event in events if event["model"] == "qwen3"]
    assert [(event["user"], event["class"], event["outcome"]) for event in made] == [("ann", "batch", "ok")]
    assert 0 < made[0]["output_tokens"] <= 200 and len(events) == 7 + 1
    metrics = httpx.get(mill.admin + "/metrics").text
    assert 'tidemill_summaries_total{outcome="made"} 1' in metrics

    mill.stop()
    [(_, body)] = [row for row in stored(mill) if row[0] == id]
    assert json.loads(body)[-1]["text"] == text
    mill.start()
    ann = openai.OpenAI(base_url=mill.url, api_key=ann.api_key, max_retries=0, timeout=60)
    for turn in (8, 9):
        answer = say(ann, f"Question {turn} about the tide.", conversation=id, context=wish)
    assert text in prompt(ann, answer), "it outlives the process"
    ann.conversations.delete(id)
    with pytest.raises(openai.NotFoundError):
        ann.conversations.retrieve(id)
    mill.stop()
    assert not [row for row in stored(mill) if row[0] == id or row[1]]
    mill.start()


def test_a_summary_that_cannot_be_made_is_not_waited_for(mill):
    poor = user(mill, "poor", tier="small")
    id, wish, _ = begin(poor, 7)
    wait_until(lambda: 'tidemill_summaries_total{outcome="failed"}' in httpx.get(mill.admin + "/metrics").text)
    for turn in (8, 9):
        answer = say(poor, f"Question {turn} about the tide.", conversation=id, context=wish)
    assert context(answer)["summary"] == {"state": "failed", "turns": 0, "tokens": 0}
    assert context(answer)["turns_left_out"] == 5 and summary(poor, id) is None


def test_old_messages_are_looked_up_for_a_new_one(client):
    id = client.conversations.create(extra_body={"instructions": SYSTEM}).id
    wish = {"turns_max": 4, "retrieve": 2, "retrieve_tokens": 64}
    said = ["My sister Ada lives in Kyoto.", *[f"Number {n} is about the wheel." for n in range(8)], "Where does my sister live?"]
    answers = [say(client, text, conversation=id, context=wish) for text in said]
    assert context(answers[1])["retrieved"] == {"messages": [], "tokens": 0}, "nothing is left out yet"
    told = context(answers[-1])["retrieved"]
    items = list(client.conversations.items.list(id, order="asc", limit=100))
    assert items[0].id in told["messages"] and 0 < told["tokens"] <= 64 and len(told["messages"]) <= 2
    given = prompt(client, answers[-1])
    assert given.index(SYSTEM) < given.index("user: My sister Ada lives in Kyoto.") < given.index("Where does my sister live?")
    assert context(answers[-1])["strategy"] == "steps" and context(answers[-1])["turns_left_out"] > 0
    assert items[-2].content[0].text == "Where does my sister live?", "what was looked up is not stored again"
    plain = say(client, "", conversation={"id": id, "replace": items[-2].id}, context={"turns_max": 4})
    assert "sister" not in prompt(client, plain) and "retrieved" not in context(plain)
    for wrong in [{"retrieve": 33}, {"retrieve": 1, "retrieve_tokens": 1}, {"retrieve": "some"}]:
        with pytest.raises(openai.BadRequestError):
            say(client, "x", conversation=id, context=wrong)
    for without in [{"retrieve": 1}, "summary", {"strategy": "summary"}]:
        with pytest.raises(openai.BadRequestError, match="conversation"):
            say(client, "x", context=without)


def remember(client, text):
    return client.post("/memories", cast_to=httpx.Response, body={"text": text}).json()


def remembered(client, **query):
    return client.get("/memories", cast_to=httpx.Response, options={"params": query}).json()


def test_facts_are_remembered_for_their_user_alone(mill):
    ann = user(mill, "mill", "ann")
    first = remember(ann, " Lives in\nKyoto. ")
    assert first["id"].startswith("mem_") and (first["object"], first["text"]) == ("memory", "Lives in\nKyoto.")
    assert remembered(ann)["data"] == [first]
    second = remember(ann, "Likes short answers.")
    page = remembered(ann, limit=1)
    assert page["data"] == [second] and page["has_more"] and remembered(ann, limit=1, after=page["last_id"])["data"] == [first]
    assert ann.get(f"/memories/{first['id']}", cast_to=httpx.Response).json() == first
    for other in [user(mill, "mill", "bob"), user(mill, "mill"), user(mill, "quay", "ann")]:
        assert remembered(other)["data"] == []
        for call in [other.get, other.delete]:
            with pytest.raises(openai.NotFoundError):
                call(f"/memories/{first['id']}", cast_to=httpx.Response)
        assert "Kyoto" not in prompt(other, say(other, "Who am I?", memory=True))

    answer = say(ann, "Who am I?", memory=True)
    assert context(answer)["memory"] | {"tokens": 0} == {"facts": 2, "facts_left_out": 0, "tokens": 0}
    given = prompt(ann, answer)
    assert given.index("- Lives in Kyoto.\n- Likes short answers.") < given.index("Who am I?")
    assert "Kyoto" not in prompt(ann, say(ann, "Who am I?")), "only chats that ask are given them"
    id = ann.conversations.create(extra_body={"instructions": SYSTEM}).id
    turns = [say(ann, text, conversation=id, memory=True) for text in ("Hello.", "Who am I?")]
    begins = [prompt(ann, turn) for turn in turns]
    assert begins[1].startswith(begins[0][: begins[0].index("Hello.")]), "they are always at the same place"
    assert begins[1].index(SYSTEM) < begins[1].index("- Lives in Kyoto.")
    assert ann.conversations.retrieve(id).instructions == SYSTEM, "what is given is not stored again"

    for wrong in ["", "x" * 1025, "x" * 80]:
        with pytest.raises(openai.BadRequestError):
            remember(ann, wrong)
    third = remember(ann, "Has a boat.")
    with pytest.raises(openai.BadRequestError, match="3 facts"):
        remember(ann, "One too many.")
    assert [fact["text"] for fact in remembered(ann, order="asc")["data"]] == ["Lives in\nKyoto.", "Likes short answers.", "Has a boat."]
    assert ann.delete(f"/memories/{third['id']}", cast_to=httpx.Response).json()["deleted"] is True
    with pytest.raises(openai.NotFoundError):
        ann.get(f"/memories/{third['id']}", cast_to=httpx.Response)
    assert ann.delete("/memories", cast_to=httpx.Response).json()["deleted"] == 2
    assert remembered(ann)["data"] == [] and "Kyoto" not in prompt(ann, say(ann, "Who am I?", memory=True))


def test_nothing_is_remembered_unless_the_operator_wants_it(client, model):
    with pytest.raises(openai.BadRequestError, match="memory"):
        say(client, "Who am I?", model=model, memory=True)
    for call in [lambda: remember(client, "x"), lambda: remembered(client)]:
        with pytest.raises(openai.InternalServerError) as refused:
            call()
        assert refused.value.code == "memory_off"
    assert say(client, "Who am I?", model=model, memory=False).choices
