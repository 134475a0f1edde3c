"""Writes reference.json: what Hugging Face's transformers makes of each template here and each of these histories.

Run it with transformers and jinja2 installed, in any directory: `python make.py`.

The templates are written anew, from how the published ones behave. A history is what a client sends. Where a template refuses it as it
is, the reference is the first of the history's other forms (`forms`) that the template takes and that loses the least: the rules are
those of docs/compatibility.md. A content that is missing is an empty text.
"""

import copy
import datetime as clock
import itertools
import json
import re
from pathlib import Path

from transformers.utils import chat_template_utils as utils

HERE = Path(__file__).parent
NOW = clock.datetime(2026, 1, 5, 12, 0, 0)
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}


class Clock(clock.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


utils.datetime = Clock


def turn(role, content, **more):
    return {"role": role, "content": content} | more


def call(arguments, name="weather", place=1):
    return {"id": f"callnr{place:03}", "type": "function", "function": {"name": name, "arguments": arguments}}


def returned(content, place=1):
    return turn("tool", content, tool_call_id=f"callnr{place:03}", name="weather")


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather's \"state\" <now>.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": " A city's name. "},
                    "days": {"type": ["integer", "null"], "default": None, "minimum": 1},
                    "items": {"type": "array", "items": {"type": "string", "enum": ["rain", "sun"]}},
                    "where": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"], "additionalProperties": False},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "Tells the time.", "parameters": {"type": "object", "properties": {}}}},
]
OBJECT = {"city": "Zürich", "days": 2, "metric": True, "note": None, "items": ["a", 'b"<&>\'c'], "where": {"lat": 47.0, "far": 1e16, "near": 1e-7}}
CITY = '{"city": "Oslo"}'


def called(arguments, content=None):
    """A chat with one call, and what came of it."""
    return [
        turn("user", "Ask-sky?"),
        turn("assistant", content, tool_calls=[call(arguments)]),
        returned("Sunny-returned"),
        turn("assistant", "It-is-sunny."),
        turn("user", "And-then?"),
    ]


def dumped(value):
    return json.dumps(value, ensure_ascii=False)


HISTORIES = {
    "user": [turn("user", "Hello-user")],
    "system": [turn("system", "Be brief-system."), turn("user", "Hello-user")],
    "dialog": [turn("system", "Be brief-system."), turn("user", "One-user"), turn("assistant", "Two-assistant"), turn("user", "Three-user")],
    "thoughts": [turn("user", "One-user"), turn("assistant", "Two-assistant", reasoning_content="hm-thought"), turn("user", "Three-user")],
    "odd text": [turn("system", " a 'b' \"c\"\n"), turn("user", "\n\té <&> {{ x }} 潮\u00a0\n\n"), turn("assistant", " it's \n"), turn("user", "")],
    "call": called(dumped(OBJECT)),
    "call waits": called(dumped(OBJECT))[:3],
    "call and words": called(CITY, "Look-words:"),
    "call without content": [{key: value for key, value in sent.items() if value is not None} for sent in called(CITY)],
    "two calls": [
        turn("system", "Be brief-system."),
        turn("user", "Ask-sky?"),
        turn("assistant", "", tool_calls=[call(CITY), call("{}", "now", 2)]),
        returned("Sunny-returned"),
        returned("Noon-returned", 2),
    ],
    "call with a thought": [
        turn("user", "Ask-sky?"),
        turn("assistant", None, reasoning_content="hm-thought", tool_calls=[call(CITY)]),
        returned("Sunny-returned"),
    ],
    "result without content": [*called(CITY)[:2], returned(None)],
    "no content": [turn("user", "One-user"), turn("assistant", None), turn("user", "Three-user")],
    "refusal": [turn("user", "One-user"), turn("assistant", None, refusal="I-refuse."), turn("user", "Three-user")],
    "arguments cut": called('{"city": "Os'),
    "arguments begun": called("{"),
    "arguments empty": called(""),
    "arguments null": called("null"),
    "arguments list": called('["Oslo", 2]'),
    "arguments number": called("42"),
    "arguments string": called('"Oslo"'),
    "arguments twice encoded": called(dumped(CITY)),
    "system after user": [turn("system", "Be brief-system."), turn("user", "One-user"), turn("system", "Agents-list.")],
    "system later": [
        turn("system", "Be brief-system."),
        turn("user", "One-user"),
        turn("assistant", "Two-assistant"),
        turn("system", "Now-polite."),
        turn("user", "Three-user"),
    ],
    "system between answers": [
        turn("user", "One-user"),
        turn("system", "Agents-list."),
        turn("assistant", "Two-assistant"),
        turn("user", "Three-user"),
    ],
    "system twice": [turn("system", "Be brief-system."), turn("system", "Be kind-system."), turn("user", "Hello-user")],
    "system after result": [*called(CITY)[:3], turn("system", "Reminder-here.")],
    "users in a row": [turn("user", "One-user"), turn("user", "Two-user"), turn("assistant", "Three-assistant"), turn("user", "Four-user")],
    "assistants in a row": [
        turn("user", "One-user"),
        turn("assistant", "Two-assistant"),
        turn("assistant", "Three-assistant"),
        turn("user", "Four-user"),
    ],
    "words beside a result": [*called(CITY)[:3], turn("user", "Words-beside.")],
    "words before a result": [*called(CITY)[:2], turn("user", "Words-before."), returned("Sunny-returned")],
}
# With tools offered; the others without.
OFFERED = {"system", "call", "call and words", "two calls", "arguments cut", "system after user", "words beside a result"}
GOES_ON = {"dialog open": [turn("user", "One-user"), turn("assistant", "Two-ass")]}


def understood(text):
    """Arguments as an object, if they are one."""
    try:
        value = json.loads(text) if text.strip() else {}
    except ValueError:
        return text
    if isinstance(value, str):
        inner = understood(value)
        return inner if isinstance(inner, dict) else value
    return {} if value is None else value


def with_arguments(messages, way, takes):
    for message in messages:
        for made in message.get("tool_calls", []):
            function = made["function"]
            value = understood(function["arguments"])
            if way == "object" or way == "as it is" and not isinstance(value, dict) and not takes["text" if isinstance(value, str) else "others"]:
                function["arguments"] = value if isinstance(value, dict) else {"arguments": value}
            elif way == "as it is":
                function["arguments"] = value
            else:
                function["arguments"] = value if isinstance(value, str) else dumped(value)
    return messages


def with_contents(messages, beside_calls):
    for message in messages:
        if not message.get("content"):
            message["content"] = message.pop("refusal", None) or ("" if not message.get("tool_calls") else beside_calls)
    return messages


def runs(messages):
    """Turns between those of the assistant."""
    return [(key, list(group)) for key, group in itertools.groupby(messages, lambda message: message["role"] == "assistant")]


def one_call_each(messages):
    """Answers of one call each, with what it returned."""
    out, rest = [], list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            out.append(message)
            continue
        returns = list(itertools.takewhile(lambda each: each["role"] == "tool", rest))
        rest = rest[len(returns) :]
        for place, made in enumerate(calls):
            out.append((message if place == 0 else {"role": "assistant"}) | {"tool_calls": [made]})
            out += [each for each in returns if each["tool_call_id"] == made["id"]]
    return out


def spoken(messages):
    """Calls as text, and what they return as the user's."""
    out = []
    for message in messages:
        if message["role"] == "tool":
            out.append(turn("user", message["content"]))
        elif message.get("tool_calls"):
            calls = [dumped({"name": made["function"]["name"], "arguments": made["function"]["arguments"]}) for made in message["tool_calls"]]
            out.append(turn("assistant", "\n".join([text for text in [message.get("content")] if text] + calls)))
        else:
            out.append(message)
    return out


def joined(turns, role):
    return turn(role, "\n\n".join(each["content"] or "" for each in turns))


def merged(messages, leading, users, after_results, assistants):
    """The same with system messages in users' turns, and with turns of a role in a row as one.

    leading: "keep" the first as it is, or "join" it to the user's turn, too. users: join those in a row. after_results: what stands
    beside results becomes part of the last. assistants: join those in a row.
    """
    messages = copy.deepcopy(messages)
    head = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    rest = messages[len(head) :]
    out = [joined(head, "system")] if head and leading == "keep" else []
    for of_assistant, group in runs(rest if leading == "keep" else messages):
        if of_assistant:
            if assistants:
                joinable = lambda message: not message.get("tool_calls")
                for plain, each in itertools.groupby(group, joinable):
                    each = list(each)
                    out += [joined(each, "assistant")] if plain and len(each) > 1 else each
            else:
                out += group
            continue
        if after_results and any(message["role"] == "tool" for message in group):
            results = [message for message in group if message["role"] == "tool"]
            words = [message for message in group if message["role"] != "tool"]
            results[-1]["content"] = "\n\n".join(part["content"] or "" for part in [results[-1], *words])
            out += results
            continue
        for result, each in itertools.groupby(group, lambda message: message["role"] == "tool"):
            each = list(each)
            if result:
                out += each
            elif users:
                out.append(joined(each, "user"))
            elif not any(message["role"] == "system" for message in each):
                out += each
            else:
                # A system message goes to the user's turn that follows, or else to the one before.
                held, turns = [], []
                for message in each:
                    if message["role"] == "system":
                        held.append(message)
                    else:
                        turns.append(joined([*held, message], "user"))
                        held = []
                if held:
                    turns[-1:] = [joined([*turns[-1:], *held], "user")]
                out += turns
    return out


def forms(messages, takes):
    """From the history as it is to one that every template takes, with how much of its calls is changed."""
    later = any(message["role"] == "system" for message in itertools.dropwhile(lambda message: message["role"] == "system", messages))
    twice = [message["role"] for message in messages[:2]] == ["system", "system"]
    several = any(len(message.get("tool_calls") or []) > 1 for message in messages)
    ways = ["as it is", "object", "text"]
    options = [False, True]
    changes = [(0, lambda messages: messages), (1, one_call_each), (2, spoken)]
    if not takes["calls"]:
        changes = changes[2:]
    elif several and not takes["several calls"]:
        changes = changes[1:]
    for change, changed in changes:
        made = {
            (beside_calls, way): with_contents(changed(with_arguments(copy.deepcopy(messages), way, takes)), beside_calls)
            for beside_calls, way in itertools.product(["", None], ways)
        }
        if takes["later systems"] or not (later or twice):
            yield from ((change, form) for form in made.values())
        for silent, form in itertools.product(options, made.values()):
            if silent:
                form = [message for message in form if message["role"] != "assistant" or message["content"] or message.get("tool_calls")]
            for leading, users, after_results, assistants in itertools.product(["keep", "join"], options, options, options):
                yield change, merged(form, leading, users, after_results, assistants)


def calls_lost(messages, text):
    """What does not show of the history's calls: their names, and the words of their arguments."""
    functions = [made["function"] for message in messages for made in message.get("tool_calls") or []]
    words = {function["name"] for function in functions}
    for function in functions:
        words.update(re.findall(r"[a-zü]{2,}", function["arguments"] or "", re.IGNORECASE))
    shown = text.lower()
    # Python's way to print an object is no JSON, and no model calls so.
    return sum(word.lower() not in shown for word in words - {"null", "true"}) + ("{'city': 'Zürich'" in text or "{'city': 'Oslo'" in text)


def rendered(template, messages, tools=None, prompt=True):
    texts, _ = utils.render_jinja_template([messages], tools=tools, chat_template=template, add_generation_prompt=prompt, **SPECIALS)
    return texts[0]


def takes(template):
    """What the template takes as it is, wherever it stands."""
    everywhere = [
        turn("system", "Be-one."),
        turn("user", "Be-two."),
        turn("system", "Be-three."),
        turn("assistant", "Be-four."),
        turn("user", "Be-five."),
        turn("system", "Be-six."),
    ]

    def shows(messages, words=()):
        try:
            text = rendered(template, messages)
        except Exception:  # Whatever a template raises.
            return False
        return all(word in text for word in words)

    def calls_with(*values):
        return any(
            all(shows(with_contents([turn("user", "x"), turn("assistant", None, tool_calls=[call(value)]), returned("y")], beside), ["weather", word]) for value, word in values)
            for beside in ["", None]
        )

    def calls_in_a_dialog(*ids):
        calls = [call(value, place=place) for place in ids]
        results = [returned("y", place) for place in ids]
        return [turn("user", "x"), turn("assistant", beside, tool_calls=calls), *results, turn("assistant", "z"), turn("user", "v")]

    takes_calls = {ids: False for ids in [(1,), (1, 2)]}
    for beside, value, ids in itertools.product(["", None], [{"city": "Oslo"}, CITY], takes_calls):
        takes_calls[ids] = takes_calls[ids] or shows(calls_in_a_dialog(*ids))
    shows_calls = calls_with(({"city": "Oslo"}, "Oslo")) or calls_with((CITY, "Oslo"))
    return {
        "later systems": shows(everywhere, [message["content"] for message in everywhere]),
        "text": not shows_calls or calls_with(('{"city": "Oslo', "Oslo")),
        "calls": takes_calls[(1,)],
        "several calls": takes_calls[(1, 2)],
        "others": not shows_calls or calls_with((["Oslo"], "Oslo"), (17, "17")),
    }


def reference(template, messages, tools, prompt, taken):
    best = None
    for change, form in forms(messages, taken):
        if best and change > best[2]:
            break
        try:
            text = rendered(template, form, tools, prompt)
        except RecursionError:
            return {"refused": "it does not end"}
        except Exception as error:  # Whatever a template raises.
            refused = f"{type(error).__name__}: {error}"
            continue
        lost = calls_lost(messages, text)
        if best is None or lost < best[0]:
            best = (lost, text, change)
        if lost == 0:
            break
    return {"text": best[1]} if best else {"refused": refused}


def main():
    sources = {path.stem: path.read_text() for path in sorted(HERE.glob("*.jinja"))}
    cases = {}
    for name, messages in (HISTORIES | GOES_ON).items():
        offers = [False, True] if name in OFFERED else [False]
        for offered in offers:
            cases[name + (", tools" if offered else "")] = {
                "messages": messages,
                "tools": TOOLS if offered else [],
                "prompt": name not in GOES_ON,
            }
    texts = {}
    for template, source in sources.items():
        taken = takes(source)
        texts[template] = {
            name: reference(source, case["messages"], case["tools"] or None, case["prompt"], taken) for name, case in cases.items()
        }
    out = {"now": int(NOW.replace(tzinfo=clock.timezone.utc).timestamp()), "specials": SPECIALS, "histories": cases, "texts": texts}
    (HERE / "reference.json").write_text(json.dumps(out, ensure_ascii=False, indent=1) + "\n")
    refused = [(template, name, each["refused"]) for template, of in texts.items() for name, each in of.items() if "refused" in each]
    print(f"{len(sources)} templates, {len(cases)} histories, {len(refused)} refused")
    for line in refused:
        print(*line, sep=" | ")


main()
