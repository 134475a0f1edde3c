"""/v1/completions, where prompts and answers can be token ids, so that equality is exact whatever the model says."""

import re

import pytest
from conftest import wait_for_publishing

BLOCK = 16
# Any vocabulary has these, and none of them is special.
IDS = [20 + 7 * i % 200 for i in range(75)]
PROMPT = "At high water the gate closes, and the pool keeps what the tide has brought."


def token_ids(completion, choice=0):
    return completion.choices[choice].model_extra["token_ids"]


def test_prompts_are_text_or_ids_or_lists_of_either(complete):
    as_text = complete(PROMPT)
    ids = as_text.choices[0].model_extra["prompt_token_ids"]
    assert token_ids(complete(ids)) == token_ids(as_text)
    other = complete("The wheel turns.")
    for prompts in [[PROMPT, "The wheel turns."], [ids, other.choices[0].model_extra["prompt_token_ids"]]]:
        both = complete(prompts)
        assert [choice.index for choice in both.choices] == [0, 1]
        assert [token_ids(both, 0), token_ids(both, 1)] == [token_ids(as_text), token_ids(other)]
        assert both.usage.prompt_tokens == as_text.usage.prompt_tokens + other.usage.prompt_tokens


def test_n_choices_of_each_prompt(complete):
    drawn = complete([PROMPT, "The wheel turns."], n=2, temperature=1, seed=3)
    assert [choice.index for choice in drawn.choices] == [0, 1, 2, 3]
    assert token_ids(drawn, 0) != token_ids(drawn, 1)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 11}])
def test_a_stream_is_the_same_answer(complete, sampling):
    whole = complete(IDS, max_tokens=40, **sampling)
    chunks = list(complete(IDS, max_tokens=40, stream=True, stream_options={"include_usage": True}, **sampling))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    streamed = [token for choice in choices for token in choice.model_extra.get("token_ids") or []]
    assert streamed == token_ids(whole)
    assert chunks[-1].usage.completion_tokens == 40
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]


def test_a_seed_repeats_a_draw(complete):
    def draw(seed):
        return token_ids(complete(IDS, temperature=1, seed=seed))

    assert draw(5) == draw(5) != draw(6)


def test_the_next_turn_finds_all_of_the_last_one_cached(url, complete):
    # Ids of its own, so that nothing of the first turn is cached by another test.
    prompt = [20 + 11 * i % 190 for i in range(100)]
    first = complete(prompt, max_tokens=60)
    known = prompt + token_ids(first)
    wait_for_publishing(url)
    second = complete(known + IDS[:10], max_tokens=4)
    assert second.usage.prompt_tokens == len(known) + 10
    # The last token was drawn but never fed back, so it has no KV: 159 of the 160 tokens, in full blocks.
    cached = (len(known) - 1) // BLOCK * BLOCK
    assert cached > len(prompt), "this is about the answer, too"
    assert second.usage.prompt_tokens_details.cached_tokens >= cached
    assert token_ids(second) == token_ids(complete(known + IDS[:10], max_tokens=4)), "cached or not, the same answer"


def stoppable(complete):
    """An answer with a plain run of text in it, its parameters, and three characters from the middle of that run."""
    for seed in range(100):
        parameters = {"max_tokens": 96, "temperature": 1, "seed": seed}
        text = complete(PROMPT, **parameters).choices[0].text
        if run := re.compile(r"[ -~]{5,}").search(text, 8):
            return text, parameters, text[run.start() + 1 : run.start() + 4]
    pytest.fail("no seed gave an answer with five plain characters in a row")


def test_a_stop_string_ends_the_answer_before_it(complete):
    text, parameters, stop = stoppable(complete)
    expected = text[: text.find(stop)]
    for stops in (stop, ["\x00never\x00", stop]):
        stopped = complete(PROMPT, stop=stops, **parameters).choices[0]
        assert (stopped.text, stopped.finish_reason) == (expected, "stop")
    chunks = [chunk.choices[0] for chunk in complete(PROMPT, stop=stop, stream=True, **parameters) if chunk.choices]
    # Equal at the end, and a stream cannot take anything back: no part of the stop string was ever sent.
    assert "".join(choice.text for choice in chunks) == expected
    assert [choice.finish_reason for choice in chunks if choice.finish_reason] == ["stop"]


def test_a_text_that_only_begins_like_a_stop_string_is_not_lost(complete):
    text, parameters, stop = stoppable(complete)
    chunks = complete(PROMPT, stop=stop + "\x00", stream=True, **parameters)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text


def test_logprobs_describe_every_token(complete):
    logprobs = complete(IDS, max_tokens=8, logprobs=2).choices[0].logprobs
    lengths = [len(part) for part in (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)]
    assert lengths == [8, 8, 8, 8]
    for logprob, top in zip(logprobs.token_logprobs, logprobs.top_logprobs):
        # By text: different halves of a character can share one entry, so there may be fewer than two.
        assert logprob <= 0 and 1 <= len(top) <= 2
        assert max(top.values()) <= logprob + 1e-6, "greedy takes the likeliest"
    assert logprobs.text_offset == sorted(logprobs.text_offset)


def test_echo_scores_the_prompt_as_generation_did(complete):
    generated = complete(IDS, max_tokens=8, logprobs=1)
    whole = IDS + token_ids(generated)
    # The parameters that lm-evaluation-harness sends.
    scored = complete(whole, max_tokens=1, logprobs=1, echo=True)
    logprobs = scored.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(whole) + 1
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(logprob <= 0 for logprob in logprobs.token_logprobs[1:])
    expected = generated.choices[0].logprobs.token_logprobs
    assert logprobs.token_logprobs[len(IDS) : len(whole)] == pytest.approx(expected, abs=1e-4)


def test_echo_repeats_the_prompts_text(complete):
    echoed = complete(PROMPT, echo=True, max_tokens=4)
    assert echoed.choices[0].text == PROMPT + complete(PROMPT, max_tokens=4).choices[0].text


def test_a_bias_decides(complete):
    assert token_ids(complete(IDS, max_tokens=4, logit_bias={"77": 100})) == [77] * 4
