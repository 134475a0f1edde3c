"""The training text: topics read from `corpus/`, and conversations drawn from them.

A topic is a list of ways to ask and one answer, with what follows it where there is more to say:

    == id
    ~ term, another term            asked for through the templates in `corpus/phrases.txt`: "what is ...", "explain ..."
    ? (how|in which way) is it [ever] asked     (a|b) is a choice, [a] may be left out, {list} is a word from `corpus/words.txt`
    > the answer
    + what "tell me more" brings
    why> what "why?" brings
    eg> what "give me an example" brings

Everything here draws from a `random.Random` that it is given, so a seed makes the same conversations.
"""
import random
import re
import string
from dataclasses import dataclass, field
from pathlib import Path

DIR = Path(__file__).parent / "corpus"
OUTSIDE, SELF = "outside", "self"
UNRELATED = {"more-nothing", "why-nothing", "example-nothing"}  # What "why?" means where nothing was talked about.
"""Follow-ups: the key in a topic, the topic that answers where there is nothing to say, the phrases in `phrases.txt`."""
FOLLOW_UPS = {"more": "more-generic", "why": "why-generic", "eg": "example-generic"}
GENERIC = set(FOLLOW_UPS.values())


def words(text):
    return re.findall(r"[a-z0-9]+", text.lower())


def held_out():
    """The questions that are never trained on, each with its groups of keywords."""
    lines = (DIR.parent / "held-out.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" | ") for line in lines if line.strip() and not line.startswith("#")]
    return [(question, [[word.strip().lower() or word for word in group.split("/")] for group in keys.split(" ; ")]) for question, keys in pairs]


@dataclass
class Topic:
    id: str
    file: str
    terms: list = field(default_factory=list)
    patterns: list = field(default_factory=list)
    answer: str = ""
    more: str = ""
    why: str = ""
    eg: str = ""

    def answers(self):
        return [text for text in (self.answer, self.more, self.why, self.eg) if text]


def sections(path):
    """`key: a, b` or `== key` with a line for each entry."""
    lists, key = {}, None
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("# "):
            continue
        if line.startswith("== "):
            key = line[3:].strip()
            lists[key] = []
        elif key is None or re.match(r"^[a-z_]+: ", line) and path.name == "words.txt":
            key, _, rest = line.partition(": ")
            lists[key] = [word.strip() for word in rest.split(", ")]
        else:
            lists[key].append(line.strip())
    return lists


def read_topics():
    topics, marks = [], {"> ": "answer", "+ ": "more", "why> ": "why", "eg> ": "eg"}
    for path in sorted(DIR.glob("*.txt")):
        if path.name in ("words.txt", "phrases.txt"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            mark = next((m for m in marks if line.startswith(m)), None)
            if not line.strip() or line.startswith("# "):
                continue
            elif line.startswith("== "):
                topics.append(Topic(line[3:].strip(), path.stem))
            elif line.startswith("~ "):
                topics[-1].terms += [term.strip() for term in line[2:].split(", ")]
            elif line.startswith("? "):
                topics[-1].patterns.append(line[2:].strip())
            elif mark:
                setattr(topics[-1], marks[mark], (getattr(topics[-1], marks[mark]) + " " + line[len(mark):].strip()).strip())
            else:
                raise ValueError(f"{path}:{number}: what is this? {line}")
    ids = [topic.id for topic in topics]
    assert len(ids) == len(set(ids)), f"twice: {sorted({i for i in ids if ids.count(i) > 1})}"
    for topic in topics:
        assert topic.answer and (topic.terms or topic.patterns or topic.id in GENERIC), topic.id
    return topics


class Writer:
    """Draws questions and conversations."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.topics = read_topics()
        self.by_id = {topic.id: topic for topic in self.topics}
        self.asked = [topic for topic in self.topics if topic.id not in GENERIC]
        self.words = sections(DIR / "words.txt")
        self.phrases = sections(DIR / "phrases.txt")
        self.swaps = [tuple(side.strip() for side in line.split("=>")) for line in self.phrases["swaps"]]
        self.synonyms = {}
        for line in self.phrases["synonyms"]:
            group = line.split(", ")
            self.synonyms |= {word: [other for other in group if other != word] for word in group}
        self.held_out = {tuple(words(question)) for question, _ in held_out()}
        self.known = set(re.findall(r"[a-z]+", " ".join(
            [t for topic in self.topics for t in topic.answers() + topic.terms + topic.patterns]).lower()))
        # A topic with many ways to ask needs more practice; one with terms has all the templates.
        self.weights = [
            1.0 + min(len(t.patterns), 40) / 20 + 0.1 * len(t.terms) + (1 if t.file == OUTSIDE else 0) + 0.7 * (len(t.answers()) - 1) for t in self.asked
        ]

    def chance(self, p):
        return self.rng.random() < p

    def expand(self, pattern):
        """One of the texts that a pattern stands for."""
        while match := re.search(r"\(([^()\[\]]*\|[^()\[\]]*)\)|\[([^()\[\]]*)\]", pattern):
            if match[1] is not None:
                chosen = self.rng.choice(match[1].split("|"))
            else:
                chosen = self.rng.choice(match[2].split("|")) if self.chance(0.5) else ""
            pattern = pattern[:match.start()] + chosen + pattern[match.end():]
        return " ".join(re.sub(r"\{(\w+)\}", lambda m: self.word(m[1]), pattern).split())

    def word(self, name):
        if name == "number":
            return str(self.rng.randrange(10 ** self.rng.choice((1, 1, 2, 2, 3, 4))))
        if name == "nonsense":
            return self.nonsense()
        return self.rng.choice(self.words[name])

    def nonsense(self):
        """A word that no text of ours knows."""
        while True:
            kind = self.rng.random()
            if kind < 0.6:
                onset = ["b", "bl", "br", "c", "cr", "d", "dr", "f", "fl", "g", "gl", "gr", "h", "j", "k", "kl", "l", "m", "n", "p", "pl", "qu", "r", "s",
                         "sch", "sk", "sm", "sn", "sp", "st", "str", "t", "tr", "v", "w", "x", "y", "z", "zw"]
                middle, end = ["a", "e", "i", "o", "u", "oo", "ee", "ai", "ou", "y"], ["", "", "b", "ck", "d", "ft", "g", "k", "l", "m", "n", "nd", "ng", "p", "r", "rt", "sh", "t", "x", "z"]
                syllables = self.rng.choice((1, 2, 2, 3))
                word = "".join(self.rng.choice(onset) + self.rng.choice(middle) + self.rng.choice(end) for _ in range(syllables))
            elif kind < 0.85:
                word = "".join(self.rng.choice(string.ascii_lowercase) for _ in range(self.rng.randint(3, 9)))
            else:
                row = self.rng.choice(["qwertyuiop", "asdfghjkl", "zxcvbnm", "asdf", "jkl"])
                word = "".join(self.rng.choice(row) for _ in range(self.rng.randint(3, 9)))
            if word not in self.known:
                return word

    def plain_question(self, topic):
        """A question before anyone has typed it carelessly."""
        if topic.terms and self.chance(0.5 if topic.patterns else 1):
            term = self.rng.choice(topic.terms)
            template = self.rng.choice(self.phrases["templates"])
            plural = term.endswith("s") and not term.endswith(("ss", "us", "is", "os"))
            question = self.expand(template.replace("IS", "are" if plural else "is").replace("DOES", "do" if plural else "does"))
            return question.replace("TERM", term)
        return self.expand(self.rng.choice(topic.patterns))

    def reword(self, text):
        """Other words for the same."""
        if self.chance(0.35):
            self.rng.shuffle(self.swaps)
            for old, new in self.swaps:
                changed = re.sub(old, lambda m: m.expand(self.expand(new)), text, count=1)
                if changed != text:
                    text = changed
                    break
        if self.chance(0.3):
            words = text.split(" ")
            text = " ".join(self.rng.choice(self.synonyms[w]) if w in self.synonyms and self.chance(0.4) else w for w in words)
        if self.chance(0.22):
            text = f"{self.rng.choice(self.phrases['before'])} {text}"
        if self.chance(0.12):
            text = f"{text} {self.rng.choice(self.phrases['after'])}"
        return text

    def typo(self, text):
        for _ in range(self.rng.choice((1, 1, 2))):
            at = self.rng.randrange(len(text))
            kind = self.rng.randrange(4)
            if kind == 0 and at + 1 < len(text):
                text = text[:at] + text[at + 1] + text[at] + text[at + 2:]
            elif kind == 1 and len(text) > 4:
                text = text[:at] + text[at + 1:]
            elif kind == 2:
                text = text[:at] + text[at] + text[at:]
            else:
                text = text[:at] + self.rng.choice(string.ascii_lowercase) + text[at + 1:]
        return text

    def typed(self, text):
        """As people type: capitals, question marks, slips."""
        text = text.strip()
        if len(text) > 6 and self.chance(0.1):
            text = self.typo(text)
        if self.chance(0.1):
            text = text.replace("'", "")
        style = self.rng.random()
        if style < 0.5:
            text = text[:1].upper() + text[1:]
            for name in ("tidemill", "kv", "llama", "mistral", "qwen", "quic", "nvme", "ttft", "tpot", "itl", "slo", "gpu", "cpu", "rdma", "api", "openai", "vllm", "http",
                         "python", "rust", "i"):
                proper = {"tidemill": "Tidemill", "llama": "Llama", "mistral": "Mistral", "qwen": "Qwen", "nvme": "NVMe", "openai": "OpenAI", "vllm": "vLLM",
                          "python": "Python", "rust": "Rust"}.get(name, name.upper())
                text = re.sub(rf"\b{name}\b", proper, text)
        elif style < 0.53:
            text = text.upper()
        asks = re.match(r"(what|how|why|when|where|who|which|is|are|can|do|does|did|will|would|could|should|may|am)\b", text.lower())
        end = text[-1:]
        if end.isalnum() or end == ")":
            if asks and self.chance(0.65):
                text += self.rng.choice(("?", "?", "?", "?", "?", "??", " ?"))
            elif not asks and self.chance(0.35):
                text += self.rng.choice((".", ".", "!", "?", "...", "!!"))
        return text

    def question(self, topic):
        """A question on this topic, but none of the held-out ones."""
        while True:
            text = self.plain_question(topic)
            if len(text.split()) > 1 or topic.file != OUTSIDE:
                text = self.reword(text)
            text = self.typed(text)
            if tuple(words(text)) not in self.held_out:
                return text

    def follow_up(self, kind):
        text = self.expand(self.rng.choice(self.phrases[kind]))
        return self.typed(text)

    def has_more(self, topic):
        """Whether "why?" asks about the topic."""
        return topic.file not in (OUTSIDE, SELF) or topic.more or topic.why or topic.eg

    def system(self):
        return self.expand(self.rng.choice(self.phrases["systems"]))

    def conversation(self, turns=None):
        """Messages, and for each answer the topic that it belongs to."""
        messages = []
        if self.chance(0.3):
            messages.append(("system", self.system()))
        if turns is None:
            turns = self.rng.choices((1, 2, 3, 4, 6, 9), (27, 30, 22, 13, 6, 2))[0]
        topic, given = None, set()
        for _ in range(turns):
            kinds = [kind for kind in FOLLOW_UPS if topic is not None and getattr(topic, kind) and kind not in given]
            if topic is not None and self.has_more(topic) and self.chance(0.75 if kinds else 0.1):
                kind = self.rng.choice(kinds if kinds and self.chance(0.9) else tuple(FOLLOW_UPS))
                answer = getattr(topic, kind)
                if not answer or kind in given:
                    answer = self.by_id[FOLLOW_UPS[kind]].answer
                given.add(kind)
                messages += [("user", self.follow_up(kind)), ("assistant", answer)]
            else:
                about = topic is not None and self.has_more(topic)
                topic, given = self.rng.choices(self.asked, self.weights)[0], set()
                while about and topic.id in UNRELATED:
                    topic = self.rng.choices(self.asked, self.weights)[0]
                messages += [("user", self.question(topic)), ("assistant", topic.answer)]
        return messages
