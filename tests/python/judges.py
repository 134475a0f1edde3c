"""Clusters whose last safety check is a model, a real checkpoint that always gives the same answer."""

import contextlib
import re
import subprocess

import httpx
import openai
import pytest
from checkpoints import planted
from clusters import Cluster, tidemill
from conftest import cluster_at

# Made-up words, so that the test determines the classifier's scores.
CORPUS = """
[hate]
{the|a|every|any} {zorb|zorbs} {is|are} {vile|base|low} {and|so} {must|should} {go|leave}
[csam]
{the|a|every|any} {plim|plims} {is|are} {vile|base|low} {and|so} {must|should} {go|leave}
[harmless]
{the|a|every|any} {tree|stone|river|house} {is|are} {tall|old|green} {and|so} {must|should} {stay|remain}
{the|a|every|any} {tree|stone|river|house} {is|are} {vile|base|low} {and|so} {must|should} {go|leave}
"""
HARMLESS = "the old tree must stay"
# The first tokens of the words, as this vocabulary has them.
UNSAFE, SAFE, NEITHER, PROSE = ["un"], ["s"], ["Ġthe"], ["Ġthe"]
# For [safety]: the thresholds for prompts, since with stricter ones the classifier would be certain of doubtful answers.
LENIENT_ANSWERS = 'output = { hate = "BLOCK_HIGH_AND_ABOVE", csam = "BLOCK_HIGH_AND_ABOVE" }'


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    directory = tmp_path_factory.mktemp("classifier")
    (directory / "corpus.txt").write_text(CORPUS)
    made = directory / "classifier.txt"
    command = [tidemill(), "safety", "train", "--alone", "--corpus", directory / "corpus.txt", "--out", made]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return made


class Judged(Cluster):
    """A cluster of `chat`, which says ` the` again and again, and of its judge `guard`."""

    def __init__(self, directory, classifier, says, settings="", disclaimers="", checks=""):
        models = [planted(directory / "chat", PROSE), planted(directory / "guard", says)]
        config = f'[safety]\nclassifier = "{classifier}"\n{checks}\n[safety.judge]\nmodel = "guard"\n{settings}\n{disclaimers}'
        super().__init__(directory, config, models=models)
        self.client = openai.OpenAI(base_url=self.url, api_key="unused", max_retries=0, timeout=60)
        self.hate, self.csam = self.doubtful("hate"), self.doubtful("csam")

    def doubtful(self, category):
        """A text of which the classifier is uncertain."""
        noun = {"hate": "zorb", "csam": "plim"}[category]
        frames = ["{} here", "the {} is old", "any {} is tall and must stay", "a {} and a tree", "the {}", "{} must stay", "every {} is green"]
        texts = [frame.format(noun) for frame in frames]
        ours = {"hate": "hate", "csam": "sexual/minors"}
        for text in texts:
            scores = httpx.post(f"{self.url}/moderations", json={"input": text}).json()["results"][0]["category_scores"]
            if 0.5 < scores.pop(ours[category]) < 0.95 and max(scores.values()) < 0.5:
                return text
        pytest.fail(f"no doubtful text for {category}: choose other frames")

    def doubtful_answer(self, noun="zorb"):
        """A sentence of which the classifier becomes uncertain word by word, and never certain."""
        ours = {"zorb": "hate", "plim": "sexual/minors"}[noun]
        frames = ["must stay {}", "green {}", "the tall {}", "the old {}", "a stone and a {}"]
        for words in (frame.format(noun).split() for frame in frames):
            so_far = [" ".join(words[: n + 1]) for n in range(len(words))]
            results = httpx.post(f"{self.url}/moderations", json={"input": so_far}).json()["results"]
            scores = [result["category_scores"] for result in results]
            if scores[-1][ours] > 0.55 and scores[0][ours] < 0.45 and all(max(score.values()) < 0.93 for score in scores):
                return " ".join(words) + "."
        pytest.fail("no doubtful answer: choose other frames")

    def ask(self, text, **fields):
        given = {"model": "chat", "messages": [{"role": "user", "content": text}], "max_tokens": 6, "temperature": 0}
        return self.client.chat.completions.create(**(given | fields))

    def refusal(self, text):
        with pytest.raises(openai.APIStatusError) as refused:
            self.ask(text)
        return refused.value

    def metric(self, name, label=""):
        """The sum of a metric over all series, or over those with this label."""
        text = httpx.get(f"{self.admin}/metrics").text
        found = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", text, re.M)
        return sum(float(value) for labels, value in found if label in labels)

    def judge_pid(self):
        """The process id of the judge's decode worker, or `None` if there is none."""
        members = cluster_at(self.admin)["members"]
        return next((member["pid"] for member in members if (member["model"], member["role"]) == ("guard", "decode")), None)


@contextlib.contextmanager
def judged(*arguments, **settings):
    cluster = Judged(*arguments, **settings)
    try:
        yield cluster
    finally:
        if cluster.process.poll() is None:
            cluster.stop()


def saying(text):
    """Parameters that force the model's answer, whatever its weights."""
    return {"max_tokens": 200, "extra_body": {"structured_outputs": {"choice": [text]}}}
