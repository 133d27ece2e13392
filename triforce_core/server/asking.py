"""From a request's body to an answer: what the routes have in common."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from triforce_core.conversation import Turn
from triforce_core.params import SamplingParams, checked
from triforce_core.requests.answer.channels import CHANNEL
from triforce_core.requests.answer.parts import Split
from triforce_core.requests.answer.reasoning import tags_of, variables
from triforce_core.requests.answer.split import format_of, split_of
from triforce_core.requests.guiding import guide_of
from triforce_core.server.answers import Answers
from triforce_core.server.errors import ContextLengthError, UnknownModelError
from triforce_core.server.messages.schema import MOST_CHOICES, ChatRequest, CompletionRequest
from triforce_core.server.messages.tools import ToolUse
from triforce_core.server.settings import SUFFIX, ServerSettings
from triforce_core.server.wording.wording import NewSplit, WholeAnswer, Wording
from triforce_core.server.worker import Prompt, Worker
from triforce_offload.errors import UsageError

# Prompts with more characters than this for each token of the context are rejected before they are
# tokenised, because tokenising them would take minutes and gigabytes. Natural languages average 1
# to 6 characters per token.
MOST_CHARACTERS_OF_A_TOKEN = 16
_STREAMED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Asking:
    """Answers requests by a worker."""

    worker: Worker
    settings: ServerSettings

    async def chat(
        self, request: Request, body: ChatRequest, wording_of: Callable[[NewSplit], Wording]
    ) -> Response:
        """Answer messages. wording_of: the wording for a splitter of the answer"""
        uses, turn = body.tool_use, await self.turn(body)
        prompt = Prompt(turn, True, body.owner)
        params = fitting = self._fitting(prompt, body.params)
        if uses.described:
            # In another thread, because compiling a grammar may take long.
            params = await self._prepared(lambda: self._with_tools(fitting, uses))
        guided = params.json_schema is not None or params.grammar is not None
        new_split = self._splits(turn.text, uses, guided=guided)
        return await self._answer(request, body, [prompt], [params], wording_of(new_split))

    async def turn(self, body: ChatRequest) -> Turn:
        """Return the prompt of messages."""
        self.check(body.model)
        uses, messages, begun = body.tool_use, body.template_messages, body.begun
        texts = [begun, *(each["content"] for each in messages)]
        texts += [json.dumps(each["tool_calls"]) for each in messages if "tool_calls" in each]
        self._check_length([*texts, json.dumps(uses.described)], len(messages))
        given = variables(self.settings.reasoning) | body.template_variables
        return await self._prepared(lambda: self._turn(messages, given, uses, begun))

    async def complete(
        self, request: Request, body: CompletionRequest, wording_of: Callable[[], Wording]
    ) -> Response:
        """Continue texts."""
        self.check(body.model)
        prompts = body.prompts
        if not 1 <= len(prompts) * body.choices <= MOST_CHOICES:
            raise UsageError(f"a request has 1 to {MOST_CHOICES} texts, got {len(prompts)} prompts")
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_length([prompt], 0)
            else:
                self._check_length([], len(prompt))
        ids = await self._prepared(lambda: list(map(self.worker.engine.token_ids, prompts)))
        made = [Prompt(Turn("", tokens), False, body.owner) for tokens in ids]
        params = [self._fitting(each, body.params) for each in made]
        return await self._answer(request, body, made, params, wording_of())

    def check(self, model: str | None) -> None:
        """Raise NotReadyError, or UnknownModelError for another model than the one served."""
        self.worker.check_ready()
        served = self.settings.name
        if model is not None and model.removesuffix(SUFFIX) != served.removesuffix(SUFFIX):
            raise UnknownModelError(other_model(model, self.settings))

    def token_text(self, token: int) -> str:
        """Return the text of a token."""
        return self.worker.engine.tokenizer.decode([token])

    def _turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        given: Mapping[str, Any],
        uses: ToolUse,
        begun: str,
    ) -> Turn:
        tokenizer = self.worker.engine.tokenizer
        if uses.described and tokenizer.has_chat_template:
            # Rejects templates without tools, which would leave them out of the prompt.
            format_of(tokenizer.chat_template)
        if begun and CHANNEL in tokenizer.chat_template:
            raise UsageError("a request cannot begin an answer in channels, as this model gives")
        turn = self.worker.conversations.turn(messages, given, uses.described, begun)
        tags = tags_of(tokenizer.chat_template) if begun else None
        if tags and turn.text.removesuffix(begun).rstrip().endswith(tags.begins):
            raise UsageError("a request cannot begin an answer that begins with reasoning")
        return turn

    def _with_tools(self, params: SamplingParams, uses: ToolUse) -> SamplingParams:
        """Return parameters that keep what a request says of its tools."""
        if not uses.described:
            return params
        form, schema = format_of(self.worker.engine.tokenizer.chat_template), params.json_schema
        if uses.required or schema is not None:
            if uses.required:
                grammar = form.grammar(uses.required_schemas)
                asked, what = "tool_choice must be auto or none", "a call of these tools"
            else:
                grammar = form.grammar_or_answer(uses.schemas, schema)
                asked = "a response_format and tools cannot be used in one request"
                what = "a call of these tools, or an answer in this format,"
            if grammar is None:
                raise UsageError(f"{asked}: this model's calls of tools have no grammar for it")
            params = replace(params, grammar=grammar, json_schema=None)
            self._check_grammar(params, what)
            return params
        if not uses.parallel and form.ends:
            return replace(params, stop=(*params.stop, form.ends))
        return params

    def _check_grammar(self, params: SamplingParams, what: str) -> None:
        """Raise UsageError if the grammar of required tools cannot be used. what: what it gives"""
        engine = self.worker.engine
        try:
            guide_of(params, engine.tokenizer, engine.config)
        except UsageError as error:
            raise UsageError(f"{what} cannot be required: {error}") from error

    def _splits(self, prompt: str, uses: ToolUse, *, guided: bool) -> NewSplit:
        """Return what makes splitters of the answers to a rendered prompt."""
        template, tools = self.worker.engine.tokenizer.chat_template, uses.schemas

        def new_split() -> Split:
            split = split_of(template, prompt, tools, guided=guided, parallel=uses.parallel)
            return split or WholeAnswer()

        return new_split

    async def _answer(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        wording: Wording,
    ) -> Response:
        answers = Answers(self.worker, wording, prompts, params, body.choices)
        if not body.stream:
            return JSONResponse(await answers.whole(request))
        return StreamingResponse(
            await answers.events(), media_type=wording.media_type, headers=_STREAMED
        )

    def _fitting(
        self, prompt: Prompt, params_of: Callable[[int], SamplingParams]
    ) -> SamplingParams:
        """Return the sampling parameters of one prompt, limited to the room left in the context.

        Raises ContextLengthError if the prompt fills the context.
        """
        most, tokens = self.worker.context_tokens, len(prompt.turn.tokens)
        if tokens >= most:
            raise ContextLengthError(f"the prompt has {tokens} tokens, and {_longest(most)}")
        return checked(params_of(most - tokens), self.worker.engine.config.vocab)

    def _check_length(self, texts: Sequence[str], least_tokens: int) -> None:
        """Reject a prompt that cannot fit the context, before any work is done.

        least_tokens: a lower bound on the tokens of the prompt that do not come from `texts`
        Raises ContextLengthError.
        """
        most, characters = self.worker.context_tokens, sum(map(len, texts))
        if least_tokens >= most:
            raise ContextLengthError(
                f"the prompt has {least_tokens} tokens or more, and {_longest(most)}"
            )
        if characters > most * MOST_CHARACTERS_OF_A_TOKEN:
            raise ContextLengthError(
                f"the prompt has {characters} characters, and {_longest(most)}: more than "
                f"{MOST_CHARACTERS_OF_A_TOKEN} characters for each are not processed"
            )

    async def _prepared(self, make: Callable[[], _Made]) -> _Made:
        """Run `make` in another thread while the request holds a place in the queue.

        Raises QueueFullError, NotReadyError, or whatever `make` raises.
        """
        with self.worker.preparing():
            return await asyncio.get_running_loop().run_in_executor(self.worker.preparers, make)


def _longest(tokens: int) -> str:
    """Return the words for the longest context by which clients such as LiteLLM know the error."""
    return f"this model's maximum context length is {tokens} tokens"


def other_model(name: str, settings: ServerSettings) -> str:
    """Return a sentence about a model that is not served."""
    return f"there is no model {name!r} here; this server has {settings.name!r}"
