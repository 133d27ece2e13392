"""What OpenAI's own client gets of the server."""

from __future__ import annotations

import openai
import pytest
from running import CONTEXT, HELLO, serving
from tooled import write_tooled

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts import prefill_parts
from triforce_core.requests.request import Request
from triforce_core.server.settings import ServerSettings


@pytest.fixture(scope="module")
def expected(speaking) -> str:
    """What the engine itself answers."""
    with Engine.from_pretrained(speaking, device="cpu", max_context=CONTEXT) as engine:
        return engine.chat(HELLO, SamplingParams(20, temperature=0)).text


def test_chat_and_its_stream_give_the_engines_text(server, expected) -> None:
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 20, "temperature": 0}
    whole = server.client.chat.completions.create(**options)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (7, 20)
    told = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(server.client.chat.completions.create(**options, **told))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.total_tokens == 27


def test_completions_of_text_tokens_and_several_prompts(server, speaking) -> None:
    with Engine.from_pretrained(speaking, device="cpu", max_context=CONTEXT) as engine:
        params = SamplingParams(8, temperature=0)
        one, other = (engine.generate(prompt, params).text for prompt in ("Hello", "Good day"))
        tokens = engine.token_ids("Hello")
    create = server.client.completions.create
    base = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    assert create(prompt="Hello", **base).choices[0].text == one
    assert create(prompt=tokens, **base).choices[0].text == one
    both = create(prompt=["Hello", "Good day"], **base)
    assert [(c.index, c.text) for c in both.choices] == [(0, one), (1, other)]
    streamed = "".join(c.choices[0].text for c in create(prompt="Hello", stream=True, **base))
    assert streamed == one


def test_seeds_choices_and_stops(server) -> None:
    create = server.client.chat.completions.create
    base = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 1.0}
    texts = [choice.message.content for choice in create(seed=5, n=3, **base).choices]
    assert len(set(texts)) == 3
    whole = create(seed=5, **base).choices[0].message.content
    stop = whole[4:6]
    cut = create(seed=5, stop=[stop], **base).choices[0]
    assert cut.finish_reason == "stop"
    assert stop not in cut.message.content


def test_log_probabilities_are_the_models(server, expected) -> None:
    create = server.client.chat.completions.create
    base = {"model": "tiny", "messages": HELLO, "max_tokens": 20, "temperature": 0}
    asked = {"logprobs": True, "top_logprobs": 3}
    told = create(**base, **asked).choices[0].logprobs.content
    assert "".join(token.token for token in told) == expected
    for token in told:
        assert len(token.top_logprobs) == 3
        # Greedy: each is the likeliest.
        assert token.logprob == token.top_logprobs[0].logprob <= 0
        assert bytes(token.bytes).decode() == token.token
    chunks = create(**base, **asked, stream=True)
    found = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    streamed = [token for logprobs in found if logprobs for token in logprobs.content]
    assert [token.token for token in streamed] == [token.token for token in told]
    text = server.client.completions.create(
        model="tiny", prompt="Hello", max_tokens=4, temperature=0, logprobs=2
    ).choices[0]
    assert "".join(text.logprobs.tokens) == text.text
    assert all(len(likeliest) == 2 for likeliest in text.logprobs.top_logprobs)


def test_a_second_turn_reads_only_its_own_tokens(server) -> None:
    create = server.client.chat.completions.create
    base = {"model": "tiny", "max_tokens": 10, "temperature": 0}
    messages = [{"role": "user", "content": "A first turn of its own"}]
    answer = create(messages=messages, **base).choices[0].message.content
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Next"}]
    used = create(messages=messages, **base).usage
    assert used.prompt_tokens - used.prompt_tokens_details.cached_tokens == len("Next") + 2 + 1


def test_conversations_by_turns_are_kept_apart(tmp_path_factory, speaking) -> None:
    """The KV of one waits in host memory while another has the engine."""
    texts = ["x" * 280, "y" * 280]
    with serving(speaking, max_context=500) as running:
        create = running.client.completions.create
        base = {"model": "tiny", "max_tokens": 4, "temperature": 0}
        first = [create(prompt=text, **base).choices[0].text for text in texts]
        for text, answer in zip(texts, first, strict=True):
            again = create(prompt=text + answer + "and", **base)
            assert again.usage.prompt_tokens_details.cached_tokens >= 280
    with Engine.from_pretrained(speaking, device="cpu", max_context=500) as engine:
        params = SamplingParams(4, temperature=0)
        assert again.choices[0].text == engine.generate(texts[1] + first[1] + "and", params).text


def test_what_is_not_there(server) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        server.client.chat.completions.create(model="gpt", messages=HELLO)
    create = server.client.completions.create
    assert create(model="tiny.gguf", prompt="x", max_tokens=1).model == "tiny"
    assert [model.id for model in server.client.models.list()] == ["tiny"]
    assert server.client.models.retrieve("tiny").context_length == CONTEXT
    with pytest.raises(openai.BadRequestError, match=f"context length is {CONTEXT}"):
        server.client.completions.create(model="tiny", prompt="x" * 400)


def test_nulls_neutral_values_and_its_own_answers_are_taken(server) -> None:
    create = server.client.chat.completions.create
    base = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    nothing = {"tools": None, "stop": None, "response_format": None, "reasoning_effort": None}
    neutral = {"tools": [], "store": False, "metadata": {}, "parallel_tool_calls": True}
    reply = create(messages=HELLO, **base, extra_body=nothing | neutral | {"seed": -1, "top_k": -1})
    plain = create(messages=HELLO, **base, response_format={"type": "text"})
    assert reply.choices[0].message.content == plain.choices[0].message.content
    messages = [*HELLO, reply.choices[0].message.model_dump(), {"role": "user", "content": "x"}]
    assert create(messages=messages, **base).usage.completion_tokens == 4


def test_tokens_without_a_text_stay_out_of_other_conversations(server) -> None:
    """A text that reads the same is answered the same, whatever was drawn for it before."""
    create = server.client.chat.completions.create
    base = {"model": "tiny", "messages": [{"role": "user", "content": "Twice"}], "temperature": 0}
    first = create(**base, max_tokens=6)
    hidden = server.worker.engine.tokenizer.decode([96])
    create(**base, max_tokens=3, logit_bias={"96": 100})
    again = create(**base, max_tokens=6)
    assert again.usage.prompt_tokens == first.usage.prompt_tokens
    assert again.choices[0].message.content == first.choices[0].message.content
    assert hidden in ("", "<unk>")


def test_an_answer_given_anew_leaves_other_conversations(speaking) -> None:
    with serving(speaking, max_context=500) as running:
        create = running.client.completions.create
        base = {"model": "tiny", "temperature": 1.0}
        create(prompt="a" * 300, max_tokens=2, **base)
        for _ in range(3):
            create(prompt="b" * 20, max_tokens=300, **base)
        used = create(prompt="a" * 300 + "c", max_tokens=2, **base).usage
        assert used.prompt_tokens_details.cached_tokens >= 299


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_more_conversations_than_are_kept_take_turns(speaking, kept: int) -> None:
    settings = ServerSettings(name="tiny", contexts=kept)
    with serving(speaking, settings, max_context=500) as running:
        create = running.client.completions.create
        base = {"model": "tiny", "temperature": 0, "max_tokens": 2}
        known = 0
        for turn in range(9):
            used = create(prompt="abcd"[turn % 4] * 300 + "e" * turn, **base).usage
            known += used.prompt_tokens_details.cached_tokens >= 299
        assert known == 0, "each was forgotten before its turn came again"
        assert create(prompt="a" * 300 + "f", **base).usage.completion_tokens == 2


@pytest.mark.parametrize("sequences", [1, 3])
def test_conversations_that_share_a_long_beginning_keep_their_own_ends(
    tmp_path, sequences: int
) -> None:
    """With one sequence their KV waits in host memory; with several each has a context."""
    beginning = "You are careful. " * 40
    model = write_tooled(tmp_path, "hermes")
    with serving(model, max_context=2000, sequences=sequences) as running:
        create = running.client.completions.create
        base = {"model": "tiny", "temperature": 0, "max_tokens": 10}
        texts = {name: beginning + name * 300 for name in "ab"}
        # The second conversation shares the beginning of the first.
        least = {"a": 0, "b": len(beginning)}
        for turn in range(3):
            for name, text in texts.items():
                answer = create(prompt=text, **base)
                known = answer.usage.prompt_tokens_details.cached_tokens
                assert known >= least[name], (turn, name)
                least[name] = len(text)
                texts[name] = text + answer.choices[0].text + "more"


def test_prompts_are_counted_each_and_logprobs_are_of_the_text(server) -> None:
    create = server.client.completions.create
    base = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    two = create(prompt=["Hello", "Good day"], n=2, **base)
    assert two.usage.prompt_tokens == len("Hello") + len("Good day")
    whole = create(prompt="Hello", **base).choices[0].text
    for stream in (False, True):
        answer = create(prompt="Hello", stop=whole[4:6], logprobs=0, stream=stream, **base)
        chunks = list(answer) if stream else [answer]
        told = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
        tokens = [token for each in told for token in each.tokens]
        assert "".join(tokens) == whole[: whole.index(whole[4:6])]


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("field", ["user", "safety_identifier", "prompt_cache_key"])
def test_nobody_learns_what_anothers_prompt_began_with(
    speaking, field: str, sequences: int
) -> None:
    """Also when its KV waits in host memory, and comes back."""
    text = "my secret begins so, " * 14
    with serving(speaking, max_context=500, sequences=sequences) as running:
        create = running.client.completions.create
        base = {"model": "tiny", "max_tokens": 2, "temperature": 0}

        def cached(prompt: str, name: str | None) -> int:
            extra = {field: name} if name else {}
            used = create(prompt=prompt, extra_body=extra, **base).usage
            return used.prompt_tokens_details.cached_tokens

        assert cached(text + "x", "one") == 0
        assert cached(text + "y", "two") == 0
        assert cached(text + "z", None) == 0
        assert cached(text + "z", "three") == 0
        # To the same one it is known, if there is a place for it: it gets the context of its own.
        assert cached(text + "w", "three") >= len(text)
        assert cached(text + "t", "four") == 0
        assert cached(text + "s", "four") >= len(text)
        if sequences == 1:
            assert cached(text + "v", "three") >= len(text)
            assert cached(text + "u", None) >= len(text)


def test_offsets_of_logprobs_are_positions_in_the_text(server) -> None:
    asked = {"model": "tiny", "prompt": "Hi", "max_tokens": 8, "temperature": 0, "logprobs": 0}
    create = server.client.completions.create
    whole = create(**asked).choices[0]
    chunks = [each.choices[0] for each in create(**asked, stream=True)]
    streamed = [at for each in chunks if each.logprobs for at in each.logprobs.text_offset]
    assert streamed == whole.logprobs.text_offset
    assert streamed[0] == 0
    assert streamed[-1] > 0


def test_chunks_say_how_many_tokens_and_passes_there_are(server) -> None:
    create, base = server.client.completions.create, {"model": "tiny", "temperature": 0}
    *chunks, last = create(prompt="a b a b a b", max_tokens=30, stream=True, **base)
    tokens, passes = ([each.so_far[name] for each in chunks] for name in ("tokens", "passes"))
    assert (tokens, passes) == (sorted(tokens), sorted(passes))
    assert (passes[0], tokens[-1]) == (0, 30)
    # Text that is held back for a stop comes at the end.
    held = create(prompt="a b a b", max_tokens=5, stop=["never to be seen"], stream=True, **base)
    assert [each.so_far["tokens"] for each in held if each.choices[0].text][-1] == 5
    assert passes[-1] * last.timings["tokens_per_pass"] == pytest.approx(29)


def test_a_stream_goes_on_while_another_prompt_is_prefilled(speaking, monkeypatch) -> None:
    """A prompt of 400 tokens is prefilled in 25 parts, with a token of the other text after each,
    and the waiting client learns how far it is.
    """
    monkeypatch.setattr(prefill_parts, "LEAST", 16)
    known, seen = Request.prefill, []
    options = {"method": "autoregressive", "max_context": 500, "sequences": 2}
    with serving(speaking, **options) as running:

        def prefill(self: Request, *args: object) -> None:
            known(self, *args)
            first, *others = running.worker.running
            if others:
                seen.append((first._member.made, others[0].progress))

        monkeypatch.setattr(Request, "prefill", prefill)
        create = running.client.completions.create
        base = {"model": "tiny", "temperature": 0, "stream": True}
        with create(prompt="Hello", max_tokens=450, **base) as first:
            next(iter(first))
            assert list(create(prompt="a" * 400, max_tokens=2, **base))
    made, progress = zip(*seen, strict=True)
    assert made == tuple(range(made[0], made[0] + 25))
    assert progress == pytest.approx([(part + 1) / 25 for part in range(25)])
