"""What sequences share and what they must not: prompts yes; drafters, and what goes wrong, no."""

from __future__ import annotations

import pytest
from checkpoint import tiny_tokenizer
from speclight.infer.draft_model import DraftModelDrafter
from speclight.infer.drafter import Drafter
from speclight.infer.engine import Engine
from speclight.infer.logitspec import LogitSpecDrafter
from speclight.infer.prompt_lookup import PromptLookupDrafter
from speclight.infer.request import Completion, GenerationParams
from speclight.modules.token_tree import TokenTree
from support import tiny_lm

PROMPT = [(5 * i) % 96 for i in range(41)]

# -- drafters --------------------------------------------------------------------------------------------------------


class OwnAttach(PromptLookupDrafter):
    def attach(self, model, cache) -> None:
        """Says nothing to its base class."""


class Wrapping(Drafter):
    name = "wrapping"

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner


@pytest.mark.parametrize("make", [LogitSpecDrafter, OwnAttach, lambda: DraftModelDrafter(tiny_lm(), num_blocks=9)])
def test_a_drafter_that_an_engine_has_is_refused_by_another(make) -> None:
    """Two engines number their sequences alike: one would draft from the other's texts."""
    drafter = make()
    engine = Engine(tiny_lm(), drafters=[drafter], num_blocks=9)
    for drafters in ([drafter], [Wrapping(drafter)]):
        with pytest.raises(ValueError, match=f"'{drafters[0].name}' belongs to another engine; make a new one"):
            Engine(engine.model, drafters=drafters, num_blocks=9)


def test_a_wrapped_drafter_belongs_to_the_engine_of_the_one_around_it() -> None:
    inner = LogitSpecDrafter()
    Engine(tiny_lm(), drafters=[Wrapping(inner)], num_blocks=9)
    with pytest.raises(ValueError, match="'logitspec' belongs to another engine"):
        Engine(tiny_lm(), drafters=[inner], num_blocks=9)


def test_an_engine_that_could_not_be_made_takes_no_drafter() -> None:
    drafter = LogitSpecDrafter()
    with pytest.raises(ValueError, match="max_num_seqs"):
        Engine(tiny_lm(), drafters=[drafter], num_blocks=9, max_num_seqs=0)
    Engine(tiny_lm(), drafters=[drafter], num_blocks=9)


def test_two_drafters_of_one_name_are_refused_instead_of_dropping_one() -> None:
    with pytest.raises(ValueError, match="names of their own, got 'logitspec' twice"):
        Engine(tiny_lm(), drafters=[LogitSpecDrafter(), LogitSpecDrafter(k=3)], num_blocks=9)


def test_one_bad_proposal_costs_its_own_sequence_only() -> None:
    class OneBad(Drafter):
        name = "one-bad"

        def default_draft_tokens(self) -> int:
            return 3

        def propose(self, sequences):
            return [TokenTree.chain([s.token_ids[-1], 5000 if s.token_ids[0] == 1 else 2]) for s in sequences]

    engine = Engine(tiny_lm(), drafters=[OneBad()], default_method="one-bad", num_blocks=99)
    bad, good = engine.generate([[1, 2], [3, 2]], GenerationParams(max_new_tokens=9))
    assert bad.stats.draft_failures == bad.stats.draft_calls > 0
    assert good.stats.draft_failures == 0 and good.stats.drafted > 0


@pytest.mark.parametrize("hook", ["scheduled", "timed"])
def test_what_a_drafter_is_told_and_cannot_bear_is_reported_once_and_stops_nothing(hook, caplog) -> None:
    class Deaf(Drafter):
        name = "deaf"

        def fail(self, *_) -> None:
            raise RuntimeError("what?")

    setattr(Deaf, hook, Deaf.fail)
    engine = Engine(tiny_lm(), drafters=[Deaf()], num_blocks=99)
    (done,) = engine.generate([[1, 2]], GenerationParams(max_new_tokens=9))
    (alone,) = Engine(tiny_lm(), num_blocks=99).generate([[1, 2]], GenerationParams(max_new_tokens=9))
    assert done.token_ids == alone.token_ids
    assert [record.message.split(";")[0] for record in caplog.records] == [f"drafter deaf failed in {hook}()"]
    engine.reset()
    engine.generate([[1, 2]], GenerationParams(max_new_tokens=9))
    assert len(caplog.records) == 2, "a reset engine is as a fresh one"


# -- prompts ---------------------------------------------------------------------------------------------------------


def texts(method: str, params: dict, prompt=PROMPT, **options) -> list[Completion]:
    drafters = [LogitSpecDrafter(k=4, capacity=8), DraftModelDrafter(tiny_lm(seed=1), num_tokens=3)]
    engine = Engine(tiny_lm(), drafters=drafters, strict=True, **({"num_blocks": 300, "block_size": 4} | options))
    results = engine.generate([prompt], GenerationParams(method=method, max_new_tokens=12, **params))
    assert engine.cache.allocator.num_in_use == 0
    return results


@pytest.mark.parametrize("method", ["ar", "logitspec", "draft-model"])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_batch_tokens": 7}, {"num_blocks": 24}, {"max_num_seqs": 2}],
    ids=lambda o: "-".join(o) or "all",
)
def test_texts_of_one_request_run_their_prompt_once_and_say_what_they_say_alone(method: str, options: dict) -> None:
    """The 40 tokens that fill blocks are run by the first and found by the others; in chunks, preempted, in turns."""
    results = texts(method, {"n": 5, "seed": 3, "temperature": 1.0}, **options)
    assert [result.index for result in results] == [0, 1, 2, 3, 4]
    assert [result.stats.cached_tokens >= 40 for result in results[1:]] == [True] * 4
    for index, result in enumerate(results):
        (alone,) = texts(method, {"seed": 3 + index, "temperature": 1.0})
        assert result.token_ids == alone.token_ids, index


def test_without_prefix_caching_or_with_a_short_prompt_no_text_waits_for_another() -> None:
    for prompt, options in ((PROMPT, {"prefix_caching": False}), (PROMPT[:4], {})):
        engine = Engine(tiny_lm(), num_blocks=300, block_size=4, **options)
        engine.add(prompt, GenerationParams(n=3, max_new_tokens=3))
        engine.step()
        assert len(engine.scheduler.running) == 3


def test_other_requests_pass_those_that_wait_for_their_prompt() -> None:
    engine = Engine(tiny_lm(), num_blocks=300, block_size=4)
    engine.add(PROMPT, GenerationParams(n=3, max_new_tokens=3), "many")
    engine.add([7, 8], GenerationParams(max_new_tokens=3), "other")
    engine.step()
    assert [sequence.request_id for sequence in engine.scheduler.running] == ["many", "other"]
    engine.step()
    assert [sequence.index for sequence in engine.scheduler.running] == [0, 0, 1, 2]
    assert {end.index for end in engine.cancel("many")} == {0, 1, 2}
    engine.check_invariants()


# -- what goes wrong -------------------------------------------------------------------------------------------------


class Breaking:
    """A tokenizer whose decoder breaks on one id."""

    def __init__(self, broken: int) -> None:
        self.inner, self.broken = tiny_tokenizer(), broken

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def decode(self, token_ids, **more) -> str:
        if self.broken in list(token_ids):
            raise RuntimeError("no such piece")
        return self.inner.decode(token_ids, **more)


@pytest.mark.parametrize("method", ["ar", "logitspec"])
@pytest.mark.parametrize("stop", [(), ("never",)])
def test_text_that_cannot_be_made_ends_its_own_sequence_only(method: str, stop: tuple[str, ...]) -> None:
    def engine(tokenizer) -> Engine:
        return Engine(tiny_lm(), tokenizer, drafters=[LogitSpecDrafter()], num_blocks=300)

    params = GenerationParams(method=method, max_new_tokens=16, stop=stop, logprobs=1)
    prompts = [[5, 9, 3], [4, 4], [60, 1, 2]]
    usual = engine(tiny_tokenizer()).generate(prompts, params)
    ids = usual[0].token_ids
    broken = next(token_id for token_id in ids[2:] if not any(token_id in other.token_ids for other in usual[1:]))
    running = engine(Breaking(broken))
    failed, *others = running.generate(prompts, params)
    assert failed.finish_reason == "error" and failed.error == "RuntimeError: no such piece"
    assert failed.token_ids == ids[: len(failed.token_ids)] and len(failed.token_ids) <= ids.index(broken)
    assert len(failed.logprobs) == len(failed.origins) == len(failed.token_ids)
    assert [other.token_ids for other in others] == [other.token_ids for other in usual[1:]]
    assert [other.text for other in others] == [other.text for other in usual[1:]]
    assert running.cache.allocator.num_in_use == 0 and not running.has_work


def test_an_end_of_text_that_cannot_be_made_ends_its_own_sequence_only(monkeypatch) -> None:
    from speclight.infer.text import TextStream

    finish, calls = TextStream.finish, []

    def breaking(stream: TextStream) -> str:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no end")
        return finish(stream)

    monkeypatch.setattr(TextStream, "finish", breaking)
    engine = Engine(tiny_lm(), tiny_tokenizer(), num_blocks=99)
    failed, other = engine.generate([[5, 9, 3], [4, 4]], GenerationParams(max_new_tokens=5))
    assert (failed.finish_reason, failed.error) == ("error", "RuntimeError: no end")
    assert other.finish_reason == "length" and len(other.token_ids) == 5
    assert not engine.has_work and engine.cache.allocator.num_in_use == 0
