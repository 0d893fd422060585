"""From logits to distributions: parameters, processors, generators, log-probabilities."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from speclight.modules import sampling
from speclight.modules.acceptance import Dense, Distribution, OneHot
from speclight.modules.sampling import LogitsPipeline, SamplingParams, greedy_ids, likeliest, logprobs, make_generator
from support import hf_tiny
from torch import Tensor
from transformers import LogitsProcessor

NAN, INF = math.nan, math.inf
ROW = [2.0, 1.0, 0.5, -1.0]


def untyped(**fields: Any) -> SamplingParams:
    """Parameters as JSON or a user without a type checker gives them: past the suite's own checks of annotations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        return SamplingParams(**fields)


def distribution(row: Tensor | list[float], prefix: list[int] | None = None, num_prompt: int = 0, **fields: Any):
    """What the pipeline makes of one row."""
    return LogitsPipeline(untyped(**fields), num_prompt)(torch.as_tensor(row), prefix or [])


def processed(row: list[float], prefix: list[int], num_prompt: int, **fields: Any) -> list[float]:
    """The logits after all processors, recovered up to one constant: the first is taken from the arguments."""
    logs = (
        distribution(torch.tensor(row, dtype=torch.float64), prefix, num_prompt, temperature=1.0, **fields)
        .dense()
        .log()
    )
    return (logs - logs[-1]).tolist()


class Recorder(LogitsProcessor):
    """Remembers the prefixes it was called with and leaves the scores alone."""

    def __init__(self) -> None:
        self.prefixes: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.dtype == torch.long
        assert scores.shape == (1, 4)
        self.prefixes.append(input_ids.tolist())
        return scores


# --- parameters


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, -INF, INF, NAN, 1e7, True, "0.5", [1.0], 10**400)),
        *(("top_k", value) for value in (-2, 1.0, True, None, "5", NAN)),
        *(("top_p", value) for value in (-0.01, 1.01, NAN, True, None, "1")),
        *(("min_p", value) for value in (-0.01, 1.01, NAN, False, None)),
        *(("repetition_penalty", value) for value in (0, 0.0, -1.0, INF, NAN, True, None)),
        *(("presence_penalty", value) for value in (INF, -INF, NAN, True, None, "0", 10**400)),
        *(("frequency_penalty", value) for value in (INF, NAN, False, None)),
        *(("seed", value) for value in (1.0, True, "7", NAN)),
        *(("logit_bias", value) for value in (None, [(1, 2.0)], 5, {"a": 1.0}, {"1.5": 1.0}, {1.0: 1.0}, {-1: 1.0})),
        *(("logit_bias", value) for value in ({"": 1.0}, {"-1": 1.0}, {True: 1.0}, {None: 1.0}, {"1": 1.0, 1: 2.0})),
        *(("logit_bias", value) for value in ({1: NAN}, {1: INF}, {1: True}, {1: "2"}, {1: None})),
        *(("logits_processors", value) for value in (None, Recorder(), ["ban"], [None], "ban")),
    ],
)
def test_a_value_without_meaning_is_refused_with_its_field_and_itself(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}.* must .*, got ") as error:
        untyped(**{field: value})
    assert "valid" not in str(error.value)  # it says what would be valid, not that something is not


def test_an_error_says_what_would_be_valid() -> None:
    with pytest.raises(
        ValueError, match=r"temperature must be a number from 0 \(greedy\) to 1e6, or null for 1, got -1"
    ):
        untyped(temperature=-1)
    with pytest.raises(ValueError, match="top_k must be an integer of at least 1, or 0 or -1 for off, got -2"):
        untyped(top_k=-2)
    with pytest.raises(
        ValueError, match=r"logit_bias\[3\] must be a number below inf \(-inf bans the token\), got nan"
    ):
        untyped(logit_bias={"3": NAN})


def test_numbers_arrive_in_any_numeric_type_and_leave_in_one() -> None:
    params = untyped(temperature=1, top_p=np.float32(0.5), top_k=np.int64(3), seed=-(2**70))
    values = (params.temperature, params.top_p, params.top_k, params.seed)
    assert values == (1.0, 0.5, 3, -(2**70))
    assert [type(value) for value in values] == [float, float, int, int]


def test_bias_ids_may_be_strings_as_json_has_them() -> None:
    params = untyped(logit_bias={"5": -100, 7: -INF, np.int64(9): 0.5})
    assert params.logit_bias == {5: -100.0, 7: -INF, 9: 0.5}
    assert [type(key) for key in params.logit_bias] == [int, int, int]


def test_a_caller_who_changes_their_bias_or_list_later_changes_no_request() -> None:
    bias, processors = {1: 2.0}, [Recorder()]
    params = untyped(logit_bias=bias, logits_processors=processors)
    bias[3] = 1.0
    processors.clear()
    assert params.logit_bias == {1: 2.0}
    assert len(params.logits_processors) == 1


@dataclass(frozen=True, kw_only=True)
class Extended(SamplingParams):
    max_new_tokens: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.temperature, float)


def test_parameters_can_be_replaced_pickled_compared_hashed_and_extended() -> None:
    params = Extended(temperature=1.0, top_k=3, logit_bias={2: 1.0}, seed=5)
    assert replace(params, seed=5) == params == pickle.loads(pickle.dumps(params))
    assert replace(params, seed=6) != params
    assert hash(replace(params)) == hash(params)
    with pytest.raises(ValueError, match="top_p"):
        replace(params, top_p=2.0)


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({}, True),
        ({"temperature": 0}, True),
        ({"temperature": 1e-45}, True),
        ({"temperature": 9e-6}, True),
        ({"temperature": 1e-5}, False),
        ({"temperature": None}, False),
        ({"temperature": None, "top_p": 0.0}, True),
        ({"temperature": 1.0, "top_k": 1}, False),  # equals share what top-k keeps
    ],
)
def test_greedy_is_a_temperature_below_1e_5_or_nothing_but_the_top_kept(fields: dict[str, Any], greedy: bool) -> None:
    assert untyped(**fields).is_greedy is greedy


# --- what each field does


CONFIGURATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": ({"temperature": 0.7}, {}),
    "plain": ({"temperature": 1.0}, {}),
    "null temperature": ({"temperature": None}, {}),
    "top_k": ({"temperature": 1.3, "top_k": 5}, {}),
    "top_k above the vocabulary": ({"temperature": 1.3, "top_k": 106}, {}),
    "top_p": ({"temperature": 0.9, "top_p": 0.6}, {}),
    "min_p": ({"temperature": 1.5, "min_p": 0.2}, {}),
    "all warpers": ({"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05}, {}),
    "repetition": ({"temperature": 1.0, "repetition_penalty": 1.7}, {}),
    "everything": (
        {"temperature": 1.5, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.3},
        {"logit_bias": {3: 2.5, 4: -INF, 11: -3.0}},
    ),
    "greedy": ({"temperature": 0.0}, {}),
    "greedy with processors": ({"temperature": 0.0, "repetition_penalty": 1.9}, {"logit_bias": {3: 4.0, 4: -INF}}),
}


@pytest.fixture(scope="module")
def tiny_model():
    return hf_tiny(dtype=torch.float32)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_probabilities_are_those_of_transformers_generate_to_the_bit(tiny_model, name: str) -> None:
    """Fails if an order, a default or a rounding differs; the raw logits are taken from the same run."""
    shared, ours = CONFIGURATIONS[name]
    params, prompt = SamplingParams(**shared, **ours), [5, 3, 8, 3]
    warpers = {} if params.is_greedy else {"top_k": 0} | shared  # transformers warns of warpers when it does not sample
    warpers.pop("repetition_penalty", None)
    torch.manual_seed(0)
    run = tiny_model.generate(
        torch.tensor([prompt]),
        do_sample=not params.is_greedy,
        **warpers,
        repetition_penalty=params.repetition_penalty,
        sequence_bias=[[[token_id], bias] for token_id, bias in params.logit_bias.items()] or None,
        max_new_tokens=10,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    pipeline, ids = LogitsPipeline(params, len(prompt)), run.sequences[0].tolist()
    for step, (raw, scores) in enumerate(zip(run.logits, run.scores, strict=True)):
        found = pipeline(raw[0], ids[: len(prompt) + step])
        if params.is_greedy:
            assert found == OneHot(ids[len(prompt) + step], 96)
        else:
            assert torch.equal(found.dense(), torch.softmax(scores, dim=-1)[0])


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    found = processed([2.0, -1.0, 0.5, 0.0], [0, 1, 0], num_prompt=1, repetition_penalty=2.0)
    assert found == pytest.approx([1.0, -2.0, 0.5, 0.0])


def test_presence_and_frequency_penalties_count_emitted_tokens_only() -> None:
    """Prompt [0, 0, 2], emitted [1, 1, 2]: token 1 loses 0.5 + 2 * 0.25, token 2 loses 0.5 + 0.25, token 0 nothing."""
    prefix = [0, 0, 2, 1, 1, 2]
    found = processed([0.0] * 4, prefix, num_prompt=3, presence_penalty=0.5, frequency_penalty=0.25)
    assert found == pytest.approx([0.0, -1.0, -0.75, 0.0])
    assert processed([0.0] * 4, prefix, num_prompt=3, frequency_penalty=-0.25) == pytest.approx([0.0, 0.5, 0.25, 0.0])
    assert processed([0.0] * 4, prefix, num_prompt=6, presence_penalty=0.5) == pytest.approx([0.0] * 4)


def test_bias_comes_before_the_repetition_penalty_as_in_transformers() -> None:
    """Bias first: (1 + 2) / 2; the other way round it would be 1 / 2 + 2."""
    assert processed([1.0, 0.0], [0], 0, logit_bias={0: 2.0}, repetition_penalty=2.0) == pytest.approx([1.5, 0.0])


def test_penalties_come_before_the_users_processors_and_these_before_the_temperature() -> None:
    seen: list[list[float]] = []

    def clip(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(scores[0].tolist())
        return scores.clamp(max=1.0)

    found = distribution([4.0, 0.0], [0], 0, temperature=0.5, presence_penalty=1.0, logits_processors=(clip,))
    assert seen == [[3.0, 0.0]]
    assert torch.equal(found.dense(), torch.softmax(torch.tensor([2.0, 0.0]), dim=0))


def test_a_banned_token_has_no_probability_and_is_never_drawn() -> None:
    found, generator = distribution([0.0, 9.0, 0.0], temperature=1.0, logit_bias={1: -INF}), make_generator(0)
    assert found.dense().tolist() == [0.5, 0.0, 0.5]
    assert 1 not in {found.sample(generator) for _ in range(1000)}
    assert distribution([0.0, 9.0, 0.0], logit_bias={1: -INF}) == OneHot(0, 3)


def test_top_p_zero_keeps_one_token_even_where_rounding_would_keep_more() -> None:
    """In float32 the cumulative sum of many equal probabilities passes 1 before the last of them."""
    for row in (torch.zeros(50_000), torch.tensor([1.0, 3.0, 3.0])):
        assert distribution(row, temperature=1.0, top_p=0.0) == OneHot(int(row.argmax()), row.shape[0])


def test_each_request_of_a_mixed_batch_gets_its_own_meaning() -> None:
    """Temperatures 0, 1e-6, None, 0.8 with top-k -1, 1, 5, V + 10 and top-p 1, 1, 0, 0.5; no value divides by zero."""
    row = torch.tensor([1.2, 0.3, -0.5, -1.0])
    settings = [(0, -1, 1.0), (1e-6, 1, 1.0), (None, 5, 0.0), (0.8, 14, 0.5), (1e-45, 0, 1.0)]
    found = [distribution(row, temperature=t, top_k=k, top_p=p) for t, k, p in settings]
    assert [item for item in found if isinstance(item, OneHot)] == [OneHot(0, 4)] * 4
    assert found[3].dense().tolist() == [1.0, 0.0, 0.0, 0.0]  # the first token has 0.63 of the mass at temperature 0.8
    wide = distribution(row, temperature=0.8, top_k=14, top_p=0.9).dense()
    assert torch.equal(wide, torch.softmax(torch.tensor([1.2, 0.3, -0.5, -INF]) / 0.8, dim=0))


@pytest.mark.parametrize("off", [0, -1, 4, 14])
def test_top_k_is_off_at_zero_minus_one_and_from_the_vocabulary_up(off: int) -> None:
    assert torch.equal(distribution(ROW, temperature=1.0, top_k=off).dense(), torch.softmax(torch.tensor(ROW), dim=0))


def test_top_k_one_keeps_all_equals_at_the_top_as_transformers_does() -> None:
    assert distribution([0.0, 2.0, 2.0, 1.0], temperature=1.0, top_k=1).dense().tolist() == [0.0, 0.5, 0.5, 0.0]


def test_min_p_drops_what_is_less_likely_than_its_share_of_the_most_likely() -> None:
    """The second token is e^-2.5 = 0.082 times as likely as the first."""
    row = [0.0, -2.5]
    assert distribution(row, temperature=1.0, min_p=0.09).dense().tolist() == [1.0, 0.0]
    assert torch.equal(distribution(row, temperature=1.0, min_p=0.08).dense(), torch.softmax(torch.tensor(row), dim=0))


def test_equals_at_the_top_resolve_to_the_first() -> None:
    assert distribution([0.0, 2.0, 2.0, 1.0]) == OneHot(1, 4)
    assert distribution([0.0, 2.0, 2.0, 1.0], [1], repetition_penalty=1.0, logit_bias={0: 2.0}) == OneHot(0, 4)


@settings(deadline=None)
@given(
    # logits so small that a temperature makes them equal would have two most likely tokens
    st.lists(st.floats(-30, 30, width=32, allow_subnormal=False), min_size=2, max_size=12),
    st.floats(0.01, 100),
    st.integers(-1, 15),
    st.floats(0, 1),
    st.floats(0, 1),
)
@example([0.0, -(2.0**-126)], 100.0, 0, 0.5, 0.0)
def test_whatever_is_filtered_a_distribution_with_its_most_likely_token_remains(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    found = distribution(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = found.dense().tolist()
    assert sum(probs) == pytest.approx(1.0, abs=1e-5)
    assert min(probs) >= 0.0
    left = max(logit for logit, prob in zip(row, probs, strict=True) if prob > 0.0)
    assert left == max(row) or (max(row) - left) / temperature < 1e-37  # less than float32 can tell


# --- precision, purity, errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fields", [{"temperature": 0.7}, {"temperature": 0.7, "logit_bias": {0: 0.01}}])
def test_half_precision_rows_are_widened_before_anything_is_computed(dtype: torch.dtype, fields: dict) -> None:
    row = torch.tensor([30.0, 29.75, 12.0]).to(dtype)
    found = distribution(row, [1], repetition_penalty=1.1, **fields).dense()
    assert found.dtype == torch.float32
    assert torch.equal(found, distribution(row.float(), [1], repetition_penalty=1.1, **fields).dense())


def test_float64_rows_stay_float64() -> None:
    row = torch.tensor(ROW, dtype=torch.float64)
    found = distribution(row, [1], temperature=0.7, top_k=3, repetition_penalty=1.1, presence_penalty=0.1).dense()
    assert found.dtype == torch.float64
    assert distribution(row, temperature=1.0).dense().sum().item() == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_processor_that_writes_into_its_argument_leaves_the_raw_logits_alone(temperature, dtype) -> None:
    def ban_in_place(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 0] = -INF
        return scores

    row = torch.tensor(ROW, dtype=dtype)
    found = distribution(row, temperature=temperature, logits_processors=(ban_in_place,))
    assert found.prob(0) == 0.0
    assert row.tolist() == ROW


def test_plain_greedy_is_an_argmax_that_never_looks_at_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = LogitsPipeline(SamplingParams(), 0)
    monkeypatch.delattr(torch, "from_numpy")  # how a prefix becomes a tensor
    assert pipeline(torch.tensor(ROW), [1, 2, 3]) == OneHot(0, 4)
    with pytest.raises(AttributeError):
        LogitsPipeline(SamplingParams(repetition_penalty=1.1), 0)(torch.tensor(ROW), [1, 2, 3])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.5}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nan_logits_are_refused_wherever_they_stand(temperature: float, extra: dict, dtype: torch.dtype) -> None:
    for place in range(4):
        row = torch.tensor(ROW, dtype=dtype)
        row[place] = NAN
        with pytest.raises(ValueError, match="logits hold NaN"):
            distribution(row, [0], temperature=temperature, **extra)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("extra", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_row_with_every_token_banned_is_refused(temperature: float, extra: dict[str, Any]) -> None:
    bans = dict.fromkeys(range(4), -INF)
    with pytest.raises(ValueError, match=r"all 4 tokens are banned \(-inf\) by logit_bias or logits_processors"):
        distribution(ROW, temperature=temperature, logit_bias=bans, **extra)


def test_logits_that_overflowed_are_refused_when_sampling() -> None:
    with pytest.raises(ValueError, match=r"logits hold \+inf"):
        distribution([1.0, INF, 0.0], temperature=1.0)


def test_a_bias_on_a_token_the_model_lacks_is_refused_but_not_for_a_smaller_draft_model() -> None:
    params = SamplingParams(temperature=1.0, logit_bias={0: -INF, 9: 1.0})
    with pytest.raises(ValueError, match="logit_bias must name ids below 4, the model's vocabulary, got 9"):
        LogitsPipeline(params, 0)(torch.tensor(ROW), [])
    assert LogitsPipeline(params, 0, for_drafts=True)(torch.tensor(ROW), []).prob(0) == 0.0


def test_penalties_ignore_prefix_tokens_that_a_smaller_vocabulary_lacks() -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0, presence_penalty=1.0)
    found = LogitsPipeline(params, 1, for_drafts=True)(torch.tensor([2.0, 0.0]), [7, 2, 0])
    assert torch.equal(found.dense(), torch.softmax(torch.tensor([0.0, 0.0]), dim=0))


# --- the user's processors


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_see_exactly_the_prefix_once_a_call_and_in_order(temperature: float) -> None:
    calls: list[str] = []

    def named(name: str) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda input_ids, scores: calls.append(name) or scores

    recorder = Recorder()
    params = SamplingParams(temperature=temperature, logits_processors=(named("a"), recorder, named("b")))
    pipeline = LogitsPipeline(params, 2)
    for prefix in ([5, 6], [5, 6, 1], []):
        pipeline(torch.tensor(ROW), prefix)
    assert recorder.prefixes == [[[5, 6]], [[5, 6, 1]], [[]]]
    assert calls == ["a", "b"] * 3


def test_drafts_take_every_built_in_field_but_no_processor_of_the_user() -> None:
    recorder = Recorder()
    fields: dict[str, Any] = {"temperature": 0.7, "top_k": 3, "repetition_penalty": 1.2, "presence_penalty": 0.3}
    params = SamplingParams(**fields, logit_bias={1: 0.5}, logits_processors=(recorder,))
    row, prefix = torch.tensor(ROW), [0, 1, 1]
    drafts = LogitsPipeline(params, 1, for_drafts=True)(row, prefix)
    assert recorder.prefixes == []
    assert torch.equal(drafts.dense(), LogitsPipeline(params, 1)(row, prefix).dense())
    assert recorder.prefixes == [[prefix]]


# --- rows at once, log-probabilities, generators


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_greedy_ids_are_each_rows_argmax(dtype: torch.dtype) -> None:
    logits = torch.randn(50, 40, generator=make_generator(0)).to(dtype)  # bfloat16 has equals at the top
    assert greedy_ids(logits) == logits.float().argmax(dim=-1).tolist()
    with pytest.raises(ValueError, match="NaN"):
        greedy_ids(torch.tensor([ROW, [0.0, NAN, 0.0, 0.0]]))
    with pytest.raises(ValueError, match="all 4 tokens are banned"):
        greedy_ids(torch.tensor([ROW, [-INF] * 4]))


@pytest.mark.parametrize("vocab", [5, 300, 64 * 40, 64 * 40 + 7])
def test_the_likeliest_are_those_of_a_full_sort_wherever_they_lie(vocab: int) -> None:
    """Fails if a column or the tail behind the last layer is left out, or if places are counted within a layer."""
    logits = torch.randperm(3 * vocab, generator=make_generator(0)).view(3, vocab).double() / vocab
    logits[1, -1] = logits[2, 0] = 9.0
    ids, values = likeliest(logits, 12)
    expected = logits.log_softmax(-1).sort(descending=True)
    torch.testing.assert_close(values, expected.values[:, :12])
    assert ids.tolist() == expected.indices[:, :12].tolist()
    assert likeliest(logits.bfloat16(), 1)[1].dtype == torch.float32
    same, among = likeliest(logits, 12, among_them=True)
    assert torch.equal(same, ids)
    torch.testing.assert_close(among, expected.values[:, :12].log_softmax(-1))


def test_the_likeliest_of_many_rows_are_those_of_each_and_of_none_none(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(0))
    whole = likeliest(logits, 5)
    monkeypatch.setattr(sampling, "AT_ONCE", 900)  # three rows at once
    assert all(torch.equal(*pair) for pair in zip(likeliest(logits, 5), whole, strict=True))
    monkeypatch.undo()
    among = likeliest(logits, 5, among_them=True)
    monkeypatch.setattr(sampling, "AT_ONCE", 900)
    assert all(torch.equal(*pair) for pair in zip(likeliest(logits, 5, among_them=True), among, strict=True))
    assert [part.shape for part in likeliest(logits[:0], 5)] == [(0, 5), (0, 5)]


def test_logprobs_are_log_softmax_of_the_raw_row_best_first() -> None:
    row = torch.tensor(ROW, dtype=torch.bfloat16)
    normaliser = math.log(sum(math.exp(value) for value in ROW))
    chosen, top = logprobs(row, 3, 2)
    assert chosen == pytest.approx(-1.0 - normaliser, abs=1e-6)
    assert list(top) == [0, 1]
    assert list(top.values()) == pytest.approx([2.0 - normaliser, 1.0 - normaliser], abs=1e-6)
    assert logprobs(row, 0, 0)[1] == {}
    assert len(logprobs(row, 0, 99)[1]) == 4


def numbers(generator: torch.Generator, count: int = 4) -> list[float]:
    return torch.rand(count, generator=generator, dtype=torch.float64).tolist()


def test_a_seed_names_one_generator_and_the_nth_text_uses_seed_plus_n() -> None:
    assert numbers(make_generator(7, 2)) == numbers(make_generator(9)) == numbers(make_generator(9, 0))
    assert numbers(make_generator(7, 2, stream=1)) == numbers(make_generator(9, stream=1))
    for seed in (0, -1, -(2**63), 2**64 + 1, 2**100):
        assert numbers(make_generator(seed)) == numbers(make_generator(seed))


def test_seeds_streams_and_unseeded_requests_all_differ() -> None:
    """Two of 200 32-bit states coincide with probability 5e-6; the seeded ones are fixed, the unseeded ones are not."""
    seeded = [make_generator(seed, stream=stream) for seed in range(50) for stream in (0, 1)]
    unseeded = [make_generator(None, stream=stream) for _ in range(50) for stream in (0, 1)]
    assert len({tuple(numbers(generator)) for generator in seeded + unseeded}) == 200


def test_neighbouring_seeds_and_the_two_streams_of_a_seed_are_independent() -> None:
    """Chi-square on a 10 x 10 grid of pairs of first draws: p > 1e-4. Seeds are fixed, so it does not flicker."""
    first = np.array([[numbers(make_generator(seed, stream=s), 1)[0] for s in (0, 1)] for seed in range(20_000)])
    for x, y in ((first[:, 0], first[:, 1]), (first[:-1, 0], first[1:, 0]), (first[:-1, 0], first[1:, 1])):
        counts, _, _ = np.histogram2d(x, y, bins=10, range=[[0, 1], [0, 1]])
        assert stats.chisquare(counts.ravel()).pvalue > 1e-4


def test_a_distribution_is_dense_or_one_hot_and_both_answer_alike() -> None:
    kinds: list[Distribution] = [distribution(ROW), distribution(ROW, temperature=1.0)]
    assert [type(kind) for kind in kinds] == [OneHot, Dense]
    assert all(kind.prob(0) == float(kind.dense()[0]) for kind in kinds)
